"""Prompts of every kind become the ids that the model expects; malformed ones raise an error that names the place."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.text.chat_template import encode, listed
from support import text_pair
from support.templates import HELLO, TEMPLATE

TOKENIZER = text_pair.tokenizer()
STARTING = text_pair.tokenizer(bos=True)
STARTING.bos_token = text_pair.END


@pytest.fixture
def chatty():
    """Return ``chatty(bos=False)``, which makes a tokenizer with a chat template; both add BOS, or neither does."""

    def make(bos=False):
        tokenizer = text_pair.tokenizer(bos=bos)
        tokenizer.bos_token = text_pair.END if bos else None
        tokenizer.chat_template = ("{{ bos_token }}" if bos else "") + TEMPLATE
        return tokenizer

    return make


def rows(tokenizer, *prompts):
    batch = encode(tokenizer, prompts)
    return [row[:length].tolist() for row, length in zip(batch.tokens, batch.lengths, strict=True)]


@pytest.mark.parametrize("bos", [False, True])
def test_texts_ids_and_conversations_mix_in_one_batch(chatty, bos):
    tokenizer = chatty(bos)
    ids = tokenizer("the thing", add_special_tokens=False)["input_ids"]
    found = rows(tokenizer, "the thing", ids, np.array(ids), HELLO)
    start = [0] * bos
    answer = tokenizer("[user]Hello\n[assistant]", add_special_tokens=False)["input_ids"]
    assert found == [start + ids, ids, ids, start + answer]


def test_rendered_prompt_gets_one_bos(chatty):
    """A prompt that the caller has rendered with the template gets only one BOS."""
    tokenizer = chatty(bos=True)
    rendered = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert tokenizer(rendered)["input_ids"][:2] == [0, 0]  # the result without this rule
    assert rows(tokenizer, rendered) == rows(tokenizer, HELLO) and rows(tokenizer, rendered)[0].count(0) == 1
    assert rows(STARTING, "a") == [[0, *TOKENIZER("a")["input_ids"]]]
    assert rows(STARTING, f"{text_pair.END}{text_pair.END}a")[0][:-1] == [0, 0]  # both belong to the text
    assert rows(TOKENIZER, f"{text_pair.END}{text_pair.END}a")[0][:2] == [0, 0]  # no BOS, so nothing was added
    silent = text_pair.tokenizer()
    silent.bos_token = text_pair.END  # which the tokenizer does not add
    assert rows(silent, f"{text_pair.END}{text_pair.END}a")[0][:2] == [0, 0]


def test_system_and_earlier_turns_are_kept(chatty):
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    text = "".join(f"[{role}]{content}\n" for role, content in turns) + "[assistant]"
    assert rows(chatty(), messages) == [chatty()(text)["input_ids"]]


@pytest.mark.parametrize(
    ("given", "several"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (HELLO, [HELLO]),
        ([HELLO, "a"], [HELLO, "a"]),
        (("a", "b"), ["a", "b"]),
        (iter(["a", "b"]), ["a", "b"]),
        ([np.int64(1), 2], [[1, 2]]),
        (jnp.array([1, 2]), [[1, 2]]),
        ([jnp.array([1, 2]), "a"], [[1, 2], "a"]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (HELLO[0], HELLO),
        (b"a", [b"a"]),
        (None, [None]),
        ([], []),
    ],
)
def test_single_prompts_are_listed(given, several):
    assert listed(given) == several


REFUSED = {
    "nothing": ([], "There are no prompts"),
    "no ids": ([[]], "The prompt is empty"),
    "an empty text": (["a", ""], "Prompt 2 is empty, and the tokenizer adds no start token"),
    "no prompt": ([None], "The prompt is None; expected text, a list of token ids or a list of messages"),
    "bytes": ([b"a"], "The prompt is b'a'; expected"),
    "halves": (["a", [1, 0.5]], r"Prompt 2 is \[1, 0.5\]; expected"),
    "one message": (HELLO, "The prompt is {.*}; expected text"),
    "ids of nothing": (["a", [2**40]], "Prompt 2 has the id 1099511627776, outside any vocabulary"),
    "half a pair": (["a", "\ud800"], r"Prompt 2 is not UTF-8 text \(character 1\)"),
    "half a pair in a message": ([[{"role": "user", "content": "\ud800"}]], "The prompt is not UTF-8 text"),
    "flags": ([[True]], r"The prompt is \[True\]; expected"),
    "no message": ([[*HELLO, "Hi"]], "The prompt, message 1 is 'Hi'; expected an object with two strings"),
    "no content": (["a", [{"role": "user"}]], "Prompt 2, message 0 is {'role': 'user'}; expected"),
    "parts": ([[{"role": "user", "content": [{"type": "text"}]}]], "message 0 is .* two strings, 'role' and 'content'"),
    "a role": ([[{"role": "usr", "content": "a"}]], "message 0 has the role 'usr'; expected one of system, user"),
    "answered": ([[*HELLO, {"role": "assistant", "content": "Hi"}]], "The prompt ends with an assistant message"),
    "by the template": (
        [[{"role": "tool", "content": "a"}]],
        "is rejected by the model's chat template: no tools here",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_prompts_are_rejected(chatty, case):
    prompts, phrase = REFUSED[case]
    with pytest.raises(ValueError, match=phrase) as caught:
        encode(chatty(), prompts)
    assert "\n" not in str(caught.value)


def test_conversation_requires_chat_template():
    with pytest.raises(ValueError, match="Prompt 2 is a conversation, but the tokenizer has no chat template"):
        encode(TOKENIZER, ["a", HELLO])
