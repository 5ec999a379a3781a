"""Log-probabilities from the server: raw, the model's own, each at its place in the text."""

import itertools

import jax
import numpy as np
import pytest

from jspec.text import pieces
from support.servers import PROMPT
from support.serving import alone

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_logprobs_are_raw(running, complete, chat):
    """Log-probabilities are raw for any sampling parameters, each at the offset of its token."""
    tokens, text, expected = alone(running, PROMPT, 5, 0, temperature=0.7, top_k=9)
    choice = complete(temperature=0.7, extra_body={"top_k": 9}, logprobs=0).choices[0]
    np.testing.assert_allclose(choice.logprobs.token_logprobs, expected, atol=2e-5)
    assert choice.text == text and len(choice.logprobs.tokens) == len(tokens)
    assert choice.logprobs.top_logprobs == [
        {name: value} for name, value in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
    ]
    starts = [len("".join(pieces(running.tokenizer, (), tokens)[:i])) for i in range(len(tokens))]
    assert choice.logprobs.text_offset == starts
    chunks = complete(temperature=0.7, extra_body={"top_k": 9}, logprobs=0, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [*itertools.chain(*(getattr(part, name) for part in parts))] == getattr(choice.logprobs, name)
    echo = complete(temperature=0.7, extra_body={"top_k": 9}, logprobs=0, echo=True).choices[0].logprobs
    assert echo.text_offset[-len(tokens) :] == [len(PROMPT) + start for start in starts]
    assert echo.tokens[-len(tokens) :] == choice.logprobs.tokens and echo.token_logprobs[0] is None
    content = chat(logprobs=True).choices[0].logprobs.content
    streamed = [chunk.choices[0].logprobs for chunk in chat(logprobs=True, stream=True)]
    assert [*itertools.chain(*(part.content for part in streamed if part))] == content
    assert len(content) == 12 and content[0].top_logprobs == []
    assert all(bytes(one.bytes).decode("utf-8", "replace") in (one.token, "\ufffd") for one in content)


def test_top_logprobs_are_returned(running, complete, chat):
    choice = complete(logprobs=3, temperature=0).choices[0]
    for name, value, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert top[name] == value == max(top.values()) and 3 <= len(top) <= 4
    entries = chat(logprobs=True, top_logprobs=2, temperature=0).choices[0].logprobs.content
    assert all([one.top_logprobs[0].token, len(one.top_logprobs)] == [one.token, 2] for one in entries)


def test_prompt_logprobs_equal_model(running, complete):
    """A prompt's log-probabilities, requested as lm-eval does, equal the model's own."""
    ids = running.tokenizer(PROMPT)["input_ids"]
    choice = complete(prompt=[ids], max_tokens=1, echo=True, logprobs=1, temperature=0).choices[0]
    law = jax.nn.log_softmax(running.engine.device.target(np.array([ids]))[0])
    values = choice.logprobs.token_logprobs
    assert values[0] is None and len(values) == len(ids) + 1
    np.testing.assert_allclose(values[1:-1], law[np.arange(len(ids) - 1), ids[1:]], atol=1e-5)
    for value, top, row in zip(values[1:-1], choice.logprobs.top_logprobs[1:-1], law[:-1], strict=True):
        assert value in top.values() and max(top.values()) == pytest.approx(float(row.max()), abs=1e-5)
    for name, start in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[start:].startswith(name) or name.startswith("bytes:")
    only = complete(prompt=[ids], max_tokens=0, echo=True, logprobs=1).choices[0]
    assert only.logprobs.token_logprobs == values[:-1] and only.text == PROMPT
