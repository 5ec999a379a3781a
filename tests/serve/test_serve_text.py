"""Tokens to the text that clients see: the same however they arrive, no half characters, nothing after the end."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jspec.engine.request import Result
from jspec.generation.complete import truncate_at_stop
from jspec.serve.choice import Choice
from jspec.serve.token_text import Names
from jspec.text import Pieces, pieces
from jspec.text.stop_strings import StopAwareDetokenizer
from support import text_pair

TOKENIZER = text_pair.tokenizer()
TEXTS = st.text(alphabet=st.sampled_from("ab théin🙂Ω≠\n\u0301"), max_size=20)
IDS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40)


def ids_of(text):
    return TOKENIZER(text)["input_ids"]


def written(ids, stop=(), prompt=(), **options):
    """Return a detokenizer that has received all ids, and every text that it showed on the way."""
    writer, shown = StopAwareDetokenizer(TOKENIZER, prompt, stop, **options), []
    for token in ids:
        writer.add(token)
        shown.append(writer.text[: writer.shown])
        if writer.stopped is not None:
            break
    writer.end()
    return writer, [*shown, writer.text[: writer.shown]]


@settings(deadline=None, max_examples=200)
@given(prompt=TEXTS, text=TEXTS, end=IDS)
def test_shown_text_is_never_withdrawn(prompt, text, end):
    """Shown text is never withdrawn, even for garbage after valid text; the joined pieces are the whole text."""
    writer, shown = written(ids_of(text) + end, prompt=ids_of(prompt))
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))
    assert shown[-1] == writer.text == "".join(writer.pieces)
    assert writer.pieces == pieces(TOKENIZER, ids_of(prompt), ids_of(text) + end)
    assert writer.text.startswith(text) or text.startswith(writer.text)
    assert all(writer.text[start:].startswith(piece) for start, piece in zip(writer.starts, writer.pieces, strict=True))


@settings(deadline=None, max_examples=300)
@given(text=TEXTS, stop=st.lists(st.text(alphabet="ab th🙂", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_first_stop_string(text, stop):
    """Text ends at the same place as in `jspec.complete`."""
    expected = truncate_at_stop(pieces(TOKENIZER, (), ids_of(text)), stop)
    writer, shown = written(ids_of(text), stop)
    assert writer.text == (text if expected is None else "".join(expected))
    assert (writer.stopped is None) == (expected is None)
    assert all(writer.text.startswith(one) for one in shown)
    kept, _ = written(ids_of(text), stop, keeps_stop=True)
    assert kept.text == writer.text + (writer.stopped or "") and text.startswith(kept.text)


def test_partial_stop_string_is_held_back():
    writer, shown = written(ids_of("x then"), ["then"])
    assert (writer.text, writer.stopped) == ("x ", "then")
    assert all("t" not in one for one in shown)
    assert "".join(writer.pieces) == "x then"


def test_partial_characters_are_held_back():
    ids = ids_of("a🙂b")
    assert len(ids) == 6
    _, shown = written(ids)
    assert shown == ["a", "a", "a", "a", "a🙂", "a🙂b", "a🙂b"]
    writer, shown = written(ids[:3])
    assert shown == ["a", "a", "a", "a\ufffd"] and writer.text == "a\ufffd"


def test_stop_strings_do_not_match_within_min_tokens():
    ids = ids_of("xyxyx")
    assert written(ids, ["y"], min_tokens=2)[0].text == "xyx"
    assert written(ids, ["xy"], min_tokens=1)[0].text == "xyxyx"[:2]


def test_invalid_bytes_are_not_held_back_forever():
    broken = ids_of("🙂")[:1] * 200
    coming = Pieces(TOKENIZER, ())
    longest = max(len(one) for one in [coming.add(token) for token in broken])
    assert 0 < longest <= 40


def test_token_names_and_bytes():
    names = Names(TOKENIZER)
    for text in ("t", "the", " a"):
        (token,) = ids_of(text)
        assert (names.text(token), names.utf8(token)) == (text, list(text.encode()))
    parts = ids_of("🙂")
    assert [names.text(token) for token in parts] == [f"bytes:\\x{byte:02x}" for byte in "🙂".encode()]
    assert [byte for token in parts for byte in names.utf8(token)] == list("🙂".encode())
    assert names.text(0) == text_pair.END


@pytest.mark.parametrize(
    ("raw", "text", "utf8"), [("▁the", " the", b" the"), ("<0xE2>", "bytes:\\xe2", b"\xe2"), ("x", "x", b"x")]
)
def test_sentencepiece_token_names_and_bytes(raw, text, utf8):
    inner = Tokenizer(models.BPE({"<unk>": 0, raw: 1}, [], unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = Names(PreTrainedTokenizerFast(tokenizer_object=inner))
    assert (names.text(1), names.utf8(1)) == (text, list(utf8))


@pytest.mark.parametrize(("delivered", "ended"), [(2, "abort"), (0, None)])
def test_restarted_request_ends_a_choice_that_has_delivered_text(delivered, ended):
    """New text must not follow text of the old weights."""
    choice, writer = Choice.__new__(Choice), SimpleNamespace(end=lambda: None, stopped=None)
    vars(choice).update(finish_reason=None, count=delivered, _restarts=0, writer=writer, result=Result())
    choice._parsed = SimpleNamespace(max_tokens=9)
    assert choice.advance(Result(restarts=1)) == 0 and choice.finish_reason == ended
