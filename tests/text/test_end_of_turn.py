"""An answer ends where the chat template ends it, whatever the files call EOS."""

import numpy as np
import pytest

import jspec
from jspec import text
from jspec.text.end_of_turn import end_of_turn
from support import text_pair

pytestmark = pytest.mark.usefixtures("quick_compile")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    CHATML: "<|im_end|>",
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }} <|stop|>{% endfor %}": "<|stop|>",
    "{% for m in messages %}{% if m.role == 'user' %}U: {{ m.content }}{% else %}A:{% generation %}"
    "{{ m.content }}\n<|stop|>{% endgeneration %}{% endif %}{% endfor %}": "<|stop|>",
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}": text_pair.END,
    "{% if tools is not none %}{{ tools[0].name }}{% endif %}{% if documents is not none %}{{ documents[0].text }}"
    "{% endif %}{% for m in messages %}{{ m.content }}<|stop|>{% endfor %}": "<|stop|>",
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}\n{% endfor %}": None,
    "{% for m in messages %}{{ m.content }}\nthe end<|stop|>{% endfor %}": None,
    "{% for m in messages %}{{ m.content }}<more>{% endfor %}": None,
    "{{ raise_exception('no') }}": None,
    "{% for m in %}": None,
    "{{ 1 / 0 }}": None,
    "{% for m in messages %}{{ m.content.parts[0].text }}{% endfor %}": None,
    "": None,
}


def tokenizer(template):
    result = text_pair.tokenizer()
    result.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|stop|>"]})
    result.add_tokens(["<more>"])
    result.chat_template = template
    return result


@pytest.mark.parametrize("template", TEMPLATES)
def test_end_of_turn_token_is_found_in_template(template, tmp_path):
    """The end-of-turn token is found with transformers' tokenizers and with jspec's own."""
    theirs, expected = tokenizer(template), TEMPLATES[template]
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for one in (theirs, text.load_tokenizer(tmp_path)):
        assert end_of_turn(one) == (None if expected is None else theirs.convert_tokens_to_ids(expected))


def test_end_of_turn_requires_chat_template(toy):
    ours = tokenizer(None)
    assert end_of_turn(ours) is None
    target = toy(0, vocab_size=len(ours), eos_token_ids=(0,))
    assert text.eos_ids(target, ours) == (0,)
    ours.chat_template = CHATML
    assert text.eos_ids(target, ours) == (0, ours.convert_tokens_to_ids("<|im_end|>"))


def test_chat_answer_ends_at_end_of_turn(toy):
    ours = tokenizer(CHATML)
    end = ours.convert_tokens_to_ids("<|im_end|>")
    target = toy(0, vocab_size=len(ours), eos_token_ids=(0,))
    sampling = jspec.SamplingParams(temperature=0.0, logit_bias=100.0 * np.eye(len(ours))[end])
    options = {"max_new_tokens": 5, "sampling": sampling}
    chat = [{"role": "user", "content": "the"}]
    (done,) = jspec.complete(target, None, ours, chat, **options)
    assert (done.text, done.finish_reason, done.tokens) == ("", "eos", [end])
    last = list(jspec.stream(target, None, ours, chat, **options))[-1]
    assert (last.text, last.finish_reason) == ("", "eos")
