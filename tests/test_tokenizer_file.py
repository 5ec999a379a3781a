"""tokenizer.json read alone says what transformers makes of it, or is left to transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import text_pair
from transformers import AutoTokenizer

from jspec import text, tokenizer_file
from jspec.weights import PAIR

ALPHABETS = (
    *("def return (self): \n\t  []{}#'\"._=+-*/0123456789", "abcxyzTHEtheina ", "Ωμέγα ≠ 🙂🙃 ñçß 漢字 \u200b\u0301"),
    "".join(map(chr, range(256))),
)


def strings(count):
    """Texts of every kind, special tokens in some of them."""
    rng = np.random.default_rng(0)
    words = [*Path(__file__).read_text(encoding="utf-8").split(" "), text_pair.END, "<|endoftext|>", "<|more|>"]
    for number in range(count):
        letters = [*ALPHABETS[number % len(ALPHABETS)]]
        yield "".join(rng.choice(letters, rng.integers(0, 40))) + " ".join(rng.choice(words, number % 5))


@pytest.fixture(params=["target", "draft", "plain", "with a start", "with an added token"])
def folder(request, tmp_path):
    if request.param in ("target", "draft"):
        return PAIR / request.param
    tokenizer = text_pair.tokenizer(bos=request.param == "with a start")
    if request.param == "with an added token":
        tokenizer.add_tokens(["<|more|>"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_ids_and_texts_are_those_of_transformers(folder, report):
    light, whole = text.load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(light, tokenizer_file.TokenizerFile) and not isinstance(whole, tokenizer_file.TokenizerFile)
    texts = list(strings(2000))
    for special in (True, False):
        ids = light(texts, add_special_tokens=special)["input_ids"]
        assert ids == whole(texts, add_special_tokens=special, verbose=False)["input_ids"]
    ids = light(texts)["input_ids"]
    assert [light(one)["input_ids"] for one in texts[:200]] == ids[:200]
    rng = np.random.default_rng(1)
    ids = [*ids, *(rng.integers(0, len(whole), 20).tolist() for _ in range(1000))]  # models write what nobody would
    for skip in (True, False):
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        assert [light.decode(row, **options) for row in ids] == [whole.decode(row, **options) for row in ids]
    assert light.get_vocab() == whole.get_vocab() and len(light) == len(whole)
    assert light.eos_token_id == whole.eos_token_id
    report(texts=len(texts), token_rows=len(ids))


def change(folder, name, **fields):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


DIFFERENT = {
    "another class": {"tokenizer_class": "LlamaTokenizer"},
    "a start of its own": {"add_bos_token": True},
    "a token that is not there": {"eos_token": "the"},
    "a described token": {"eos_token": {"content": text_pair.END, "lstrip": True}},
    "spaces to clean up": {"clean_up_tokenization_spaces": True},
    "code": {"auto_map": {"AutoTokenizer": ["a.B", None]}},
}


@pytest.mark.parametrize("fields", DIFFERENT.values(), ids=DIFFERENT)
def test_what_says_more_is_left_to_transformers(tmp_path, fields):
    text_pair.tokenizer().save_pretrained(tmp_path)
    assert tokenizer_file.read(tmp_path) is not None
    change(tmp_path, "tokenizer_config.json", **fields)
    assert tokenizer_file.read(tmp_path) is None


def test_so_is_what_older_versions_have_written(tmp_path):
    text_pair.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text("{}")
    assert tokenizer_file.read(tmp_path) is None


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_chats_are_written_as_transformers_writes_them(tmp_path, place):
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content | trim }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    text_pair.tokenizer(bos=True).save_pretrained(tmp_path)
    if place == "chat_template.jinja":
        (tmp_path / place).write_text(template)
    else:
        change(tmp_path, place, chat_template=template)
    light, whole = text.load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(light, tokenizer_file.TokenizerFile) and light.chat_template == whole.chat_template == template
    chat = [{"role": "user", "content": " the\n "}, {"role": "assistant", "content": "a"}]
    for start in (False, True):
        options = {"add_generation_prompt": start}
        written = [one.apply_chat_template(chat, tokenize=False, **options) for one in (light, whole)]
        assert written[0] == written[1] and written[0].endswith("<assistant>") == start
        ids = [one.apply_chat_template(chat, **options)["input_ids"] for one in (light, whole)]
        assert ids[0] == ids[1]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_and_what_is_not_there(tmp_path, name):
    text_pair.tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    assert tokenizer_file.read(tmp_path) is None


def test_texts_are_neither_cut_nor_filled_up(tmp_path):
    tokenizer = text_pair.tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding()
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    light = text.load_tokenizer(tmp_path)
    assert list(map(len, light(["abc", "x"])["input_ids"])) == [3, 1] and light.eos_token_id is None
