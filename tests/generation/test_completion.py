"""`jspec.complete` gives the same tokens as the functions it combines, and cuts text at the first stop string."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jspec
from jspec import text
from jspec.decoding import program
from jspec.generation import complete as completion
from jspec.generation.complete import truncate_at_stop
from jspec.text.chat_template import encode
from support import text_pair

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENIZER = text_pair.tokenizer()
PROMPTS = ["the thing", "in a", "x"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return [jspec.load(text_pair.write(folder / str(distance), distance)) for distance in (0.0, 0.3)]


@pytest.fixture
def complete(pair):
    def call(prompts=PROMPTS, draft=pair[1], **options):
        return jspec.complete(pair[0], draft, TOKENIZER, prompts, **{"max_new_tokens": 24} | options)

    return call


@pytest.mark.parametrize("drafted", [False, True])
def test_complete_equals_underlying_functions(pair, complete, drafted):
    batch, keys = encode(TOKENIZER, PROMPTS), text.request_keys(7, 3)
    options = {"max_new_tokens": 24, "sampling": jspec.SamplingParams(temperature=[0.0, 0.7, 1.0]), "eos_ids": (0,)}
    request = batch.tokens, batch.lengths, keys
    out = (
        jspec.speculative_generate(*pair, *request, accept="coupled", **options)
        if drafted
        else jspec.generate(pair[0], *request, **options)
    )
    found = complete(
        draft=pair[1] if drafted else None,
        seed=7,
        sampling=options["sampling"],
        **{"accept": "coupled"} if drafted else {},
    )
    for i, done in enumerate(found):
        size = out.lengths[i]
        assert done.prompt == PROMPTS[i] and done.tokens == out.tokens[i, :size].tolist() and size > 0
        assert done.logprobs == pytest.approx(out.logprobs[i, :size].tolist(), abs=1e-5)
        assert done.origins == out.origins[i, :size].tolist()
        assert done.text == TOKENIZER.decode(done.tokens, skip_special_tokens=True)
        assert done.stats["rounds"] == out.stats.rounds[i] and done.stats["accepted"] == out.stats.accepted[i]


def test_tree_drafter_determines_draft_length(pair, complete):
    options = {"accept": "coupled", "seed": 3}
    drafter = jspec.TreeDrafter(pair[1], jspec.Tree.branching((2, 1)))
    found, plain = complete(draft=drafter, **options), complete(draft=None, seed=3)
    assert [done.tokens for done in found] == [done.tokens for done in plain]
    assert all(done.stats["accepted"] for done in found)
    with pytest.raises(ValueError, match="num_draft_tokens=2 conflicts with a TreeDrafter"):
        complete(draft=drafter, num_draft_tokens=2)


def test_single_prompt_may_be_text_or_ids(complete):
    ids = TOKENIZER("in a")["input_ids"]
    one, same, array = (complete(prompts)[0] for prompts in ("in a", ids, np.array([ids])))
    assert one.tokens == same.tokens == array.tokens and one.prompt == "in a" and same.prompt == ids


def test_row_limits_and_common_limit_apply(complete):
    """The lower limit applies, and another limit compiles nothing."""
    decode = program.decode_program
    free = complete()
    compiled = decode._cache_size()
    found = complete(sampling=jspec.SamplingParams(max_tokens=[0, 3, 30]), max_new_tokens=9)
    assert [len(done.tokens) for done in found] == [9, 3, 9] and {done.finish_reason for done in found} == {"length"}
    assert all(done.tokens == whole.tokens[: len(done.tokens)] for done, whole in zip(found, free, strict=True))
    assert decode._cache_size() == compiled


@pytest.mark.parametrize("drafted", [False, True])
def test_text_ends_before_first_stop_string(complete, pair, drafted):
    draft = pair[1] if drafted else None
    whole = complete(draft=draft)
    stop = [whole[0].text[6:9], whole[1].text[10:12], "never in it"]
    stopped = 0
    for done, free in zip(complete(draft=draft, stop=stop), whole, strict=True):
        starts = [free.text.index(one) for one in stop if one in free.text]
        if not starts:
            assert done == free
            continue
        stopped, kept = stopped + 1, len(done.tokens)
        assert done.finish_reason == "stop" and free.text.startswith(done.text) and len(done.text) in starts
        assert done.tokens == free.tokens[:kept] and done.origins == free.origins[:kept] and kept < len(free.tokens)
        assert len(done.logprobs) == len(done.pieces) == kept
        assert done.stats == free.stats  # they cover everything that was decoded
    assert stopped >= 2


def test_special_token_as_stop_string_ends_decoding(pair, tmp_path):
    """A special token given as a stop string ends decoding, because it never appears in text."""
    model = jspec.load(text_pair.write(tmp_path / "model", eos_token_id=None))
    tokenizer = text_pair.tokenizer()
    tokenizer.eos_token = None
    task = completion.prepare(tokenizer, ["a"], [text_pair.END, "x"])
    assert task.stop == ("x",) and task.ends(model) == (0,)
    tokenizer.add_tokens(["<more>"], special_tokens=True)
    assert completion.prepare(tokenizer, ["a"], "<more>").ends(model) == ()  # the model cannot generate it
    assert completion.prepare(tokenizer, ["a"], "x").ends(model) == ()


def test_special_token_stop_has_finish_reason_stop(pair, complete, monkeypatch):
    whole = complete("in a", draft=None)[0]
    monkeypatch.setattr(completion, "_special", lambda _, string: whole.tokens[3])
    (done,) = complete("in a", draft=None, stop="any")
    assert done.finish_reason == "stop" and done.tokens == whole.tokens[: whole.tokens.index(done.tokens[-1]) + 1]


def test_eos_ids_of_generation_config_end_text(pair, complete, tmp_path):
    whole = complete("in a", draft=None, sampling=jspec.SamplingParams(temperature=0))[0]
    end, folder = whole.tokens[5], text_pair.write(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    greedy = jspec.SamplingParams(temperature=0)
    (done,) = jspec.complete(jspec.load(folder), None, TOKENIZER, "in a", max_new_tokens=24, sampling=greedy)
    assert done.finish_reason == "eos" and done.tokens == whole.tokens[: whole.tokens.index(end) + 1]


@pytest.mark.parametrize(
    ("draft", "given", "expected"),
    [
        (jspec.NGramDrafter(), None, jspec.UpTo(4)),
        (jspec.NGramDrafter(), 7, jspec.UpTo(7)),
        (jspec.NGramDrafter(), np.int64(7), jspec.UpTo(7)),
        (jspec.FallbackDrafter(jspec.NGramDrafter(), jspec.NGramDrafter()), None, 4),
        (
            jspec.FallbackDrafter(jspec.NGramDrafter(), jspec.EarlyExitDrafter(1)),
            None,
            jspec.WhileConfident(4, 0.6, 0.6),
        ),
        (jspec.FallbackDrafter(jspec.NGramDrafter(), jspec.EarlyExitDrafter(1)), 7, 7),
        (jspec.FallbackDrafter(jspec.EarlyExitDrafter(2), jspec.EarlyExitDrafter(1)), None, 4),
        (jspec.NGramDrafter(), "auto", "auto"),
        (jspec.NGramDrafter(), jspec.Heuristic(3), jspec.Heuristic(3)),
        (jspec.EarlyExitDrafter(1), None, 4),
        (jspec.EarlyExitDrafter(1), 7, 7),
    ],
)
def test_default_draft_length_by_drafter(draft, given, expected):
    assert completion.draft_length_of(draft, given) == expected
    if given is None:  # an engine's draft length is a number or "auto"
        varies = isinstance(expected, jspec.WhileConfident)
        assert completion.engine_draft_length(draft) == (
            "auto" if varies else getattr(expected, "max_draft_tokens", expected)
        )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.text("ab", max_size=3), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_like_a_decoder_that_stops(pieces, stop):
    written = ""
    for count, piece in enumerate(pieces, 1):
        written += piece
        if starts := [written.index(one) for one in stop if one in written]:
            found = truncate_at_stop(pieces, stop)
            assert found is not None and len(found) == count and "".join(found) == written[: min(starts)]
            assert all(whole.startswith(kept) for whole, kept in zip(pieces, found, strict=False))
            return
    assert truncate_at_stop(pieces, stop) is None


REFUSED = {
    "empty stop": ({"stop": ["a", ""]}, "expected non-empty strings"),
    "stop of ids": ({"stop": [3]}, "expected non-empty strings"),
    "stop of nothing": ({"stop": None}, "stop is None; expected non-empty strings"),
    "half a special stop": (
        {"stop": f"{text_pair.END}x"},
        "of which decoded text shows only 'x'; pass",
    ),
    "no seed": ({"seed": 1.5}, "seed must be an int from 0 to 4294967295; got 1.5"),
    "a long seed": ({"seed": 2**32}, "seed must be an int"),
    "a length of none": ({"draft": jspec.NGramDrafter(), "num_draft_tokens": 0}, "num_draft_tokens must be an int"),
    "much too long": ({"max_new_tokens": 10**20}, "positions"),
    "no limits": ({"sampling": jspec.SamplingParams(max_tokens=None)}, "max_tokens must be a number"),
    "no room": ({"max_new_tokens": 0}, "max_new_tokens must be an int of at least 1; got 0"),
    "too long": ({"max_new_tokens": 500}, "501 positions"),
    "length of no draft": ({"draft": None, "num_draft_tokens": 4}, "draft is None, so num_draft_tokens cannot be used"),
    "rule of no draft": ({"draft": None, "accept": "block"}, "draft is None, so accept cannot be used"),
    "limit below zero": ({"sampling": jspec.SamplingParams(max_tokens=-1)}, "max_tokens must be"),
    "limits of others": ({"sampling": jspec.SamplingParams(max_tokens=[1, 2])}, "max_tokens must be a number, or"),
    "no parameters": ({"sampling": {"temperature": 0}}, "sampling is of type dict; pass a jspec.SamplingParams"),
    "ids outside": ({"prompts": [[1, 10**6]]}, "outside the vocabulary"),
    "an empty prompt": ({"prompts": ["a", ""]}, "Prompt 2 is empty"),
    "no prompts": ({"prompts": []}, "There are no prompts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_reported_before_decoding(complete, monkeypatch, case):
    monkeypatch.setattr(program, "decode_program", lambda *_, **__: pytest.fail("it decoded"))
    options, phrase = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=phrase):
        complete(**{"prompts": "x"} | options)


def test_invalid_model_or_tokenizer_is_reported(pair):
    with pytest.raises(TypeError, match="target is of type str, which lacks config"):
        jspec.complete("smollm2", None, TOKENIZER, "a")
    with pytest.raises(TypeError, match="tokenizer is of type NoneType; pass"):
        jspec.complete(pair[0], None, None, "a")


def test_seed_determines_keys(complete):
    first, again, other = (complete("x", seed=seed)[0].tokens for seed in (1, 1, 2))
    assert first == again != other
