"""Where a sequence ends: EOS tokens, limits and the context's end at every position of a round, against an oracle."""

import dataclasses

import jax
import numpy as np
import pytest

import jspec
from jspec.core.types import ACCEPTED, BONUS, CORRECTED, PADDING
from support.few import by_default

pytestmark = pytest.mark.usefixtures("quick_compile")

PAD = 59
NEW = 40
DRAFTS = {"unrelated": (1, 0.0), "related": (0, 0.08), "itself": (0, 0.0)}


@dataclasses.dataclass
class Text:
    """The expected output of one row."""

    tokens: list
    logprobs: list
    origins: list
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    judged: int = 0
    accepted_at: list = dataclasses.field(default_factory=list)


def _rounds(origins):
    """Split a row's origins into rounds; each ends with its only token that was not drafted."""
    ends = np.flatnonzero(origins != ACCEPTED) + 1
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _cut(free, row, eos, limit, k):
    """Return the oracle: row `row` of `free`, an output without limit or EOS, cut at the first `eos` or the limit."""
    tokens, origins = free.tokens[row], free.origins[row]
    found = np.flatnonzero(tokens == eos)
    end = min(found[0] + 1 if found.size else len(tokens), limit)
    text = Text(tokens[:end], free.logprobs[row, :end], origins[:end], accepted_at=[0] * k)
    for start, stop in _rounds(origins):
        if start >= end:
            break
        taken = int((origins[start : min(stop, end)] == ACCEPTED).sum())
        text.rounds += 1
        text.accepted += taken
        text.judged += taken + int(start + taken < end and origins[start + taken] == CORRECTED)
        ended_inside = taken and tokens[start + taken - 1] == eos
        text.drafted += taken if ended_inside else min(k, limit - start)
        text.accepted_at[:taken] = [n + 1 for n in text.accepted_at[:taken]]
    return text


def _assert_row(out, row, text):
    """Assert that row `row` of an output is exactly `text`, and blank after it."""
    end = len(text.tokens)
    assert out.lengths[row] == end
    for name, blank in (("tokens", PAD), ("logprobs", 0), ("origins", PADDING)):
        np.testing.assert_array_equal(getattr(out, name)[row, :end], getattr(text, name), err_msg=name)
        assert (getattr(out, name)[row, end:] == blank).all(), name
    for name in ("rounds", "drafted", "judged", "accepted", "accepted_at"):
        np.testing.assert_array_equal(getattr(out.stats, name)[row], getattr(text, name), err_msg=name)


def _decode(target, draft, batch, k, eos, limits):
    size = len(batch[1])
    out = jspec.speculative_generate(target, draft, *batch, num_draft_tokens=k, **_options(size, eos, limits))
    return jax.tree.map(np.asarray, out)


def _options(size, eos, limits):
    sampling = jspec.SamplingParams(max_tokens=np.broadcast_to(limits, size).astype(np.int32))
    eos_ids = np.broadcast_to(eos, (size, 1)).astype(np.int32)
    return {"max_new_tokens": NEW, "pad_id": PAD, "sampling": sampling, "eos_ids": eos_ids}


@pytest.mark.parametrize("k", by_default(range(1, 9), (1, 5)))
def test_eos_and_limit_at_every_position_of_a_round(toy, prompts, k, report):
    """Each row tests one pair (EOS at token i, limit after token j) in the second round."""
    target = toy(0)
    i, j = (axis.ravel() for axis in np.meshgrid(np.arange(k + 2), np.arange(k + 2)))
    batch = prompts(1 + np.arange(i.size) % 6, seed=k)
    cases, at_limit, at_eos = 0, 0, 0
    for changes in DRAFTS.values():
        draft = toy(*changes)
        free = _decode(target, draft, batch, k, -1, 0)
        assert (free.lengths == NEW).all()
        second = np.array([_rounds(row)[1][0] for row in free.origins])
        eos = free.tokens[np.arange(i.size), second + i]
        limits = second + j
        out = _decode(target, draft, batch, k, eos[:, None], limits)
        for row in range(i.size):
            text = _cut(free, row, eos[row], limits[row], k)
            _assert_row(out, row, text)
            at_eos += text.tokens[-1] == eos[row]
            at_limit += text.tokens[-1] != eos[row]
        cases += i.size
    report(cases=cases, ended_by_eos=at_eos, ended_by_limit=at_limit, wrong=0)
    assert min(at_eos, at_limit) > 0


def test_plain_decoding_stops_at_same_positions(toy, prompts):
    target, batch = toy(0), prompts(1 + np.arange(16) % 6, seed=3)

    def decode(eos, limits):
        return jax.tree.map(np.asarray, jspec.generate(target, *batch, **_options(16, eos, limits)))

    free = decode(-1, 0)
    assert (free.origins == BONUS).all()
    eos, limits = free.tokens[np.arange(16), np.arange(16) % 8], 1 + np.arange(16) % 5
    out = decode(eos[:, None], limits)
    for row in range(16):
        _assert_row(out, row, _cut(free, row, eos[row], limits[row], 0))


def test_any_of_several_eos_ids_ends_a_row(toy, prompts):
    """All rows may share the ids, or each row may have its own number of ids, padded with -1."""
    target, draft, batch = toy(0), toy(*DRAFTS["related"]), prompts([3, 5, 2, 8])
    options = {"max_new_tokens": NEW, "num_draft_tokens": 2, "pad_id": PAD}
    never = np.full((4, 3), -1, np.int32)
    free = np.asarray(jspec.speculative_generate(target, draft, *batch, **options, eos_ids=never).tokens)

    def check(eos_ids, of_row):
        out = jspec.speculative_generate(target, draft, *batch, **options, eos_ids=eos_ids)
        for row in range(4):
            ends = np.flatnonzero(np.isin(free[row], of_row(row)))
            end = ends[0] + 1 if ends.size else NEW
            assert out.lengths[row] == end
            np.testing.assert_array_equal(out.tokens[row], [*free[row, :end], *[PAD] * (NEW - end)])

    shared = [int(free[0, 4]), int(free[2, 7]), int(free[3, 1])]
    check(shared, lambda row: shared)
    own = np.array([[free[0, 3], -1, -1], [-1, -1, -1], [free[2, 9], free[2, 2], -1], [-1, free[3, 5], -1]], np.int32)
    check(own, lambda row: own[row][own[row] >= 0])


def test_statistics_are_consistent(toy, prompts, report):
    target, draft = toy(0), toy(*DRAFTS["related"])
    batch = prompts(1 + np.arange(64) % 6, seed=9)
    out = _decode(target, draft, batch, 6, np.arange(64)[:, None] % 61, 1 + np.arange(64) % NEW)
    stats = out.stats
    np.testing.assert_array_equal(stats.accepted, stats.accepted_at.sum(1))
    np.testing.assert_array_equal(stats.accepted, (out.origins == ACCEPTED).sum(1))
    np.testing.assert_array_equal(out.lengths, (out.origins != PADDING).sum(1))
    np.testing.assert_array_equal(stats.judged - stats.accepted, (out.origins == CORRECTED).sum(1))
    own = np.isin(out.origins, (CORRECTED, BONUS)).sum(1)
    assert (stats.accepted <= stats.drafted).all()
    assert (stats.drafted <= 6 * stats.rounds).all()
    # A round ends with a token from the target, unless the row ends on a draft token.
    assert ((stats.rounds == own) | (stats.rounds == own + 1)).all()
    assert (np.diff(stats.accepted_at, axis=1) <= 0).all()
    assert not stats.invalid.any()
    report(
        rows=64,
        tokens=out.lengths.sum(),
        rounds=stats.rounds.sum(),
        drafted=stats.drafted.sum(),
        accepted=stats.accepted.sum(),
    )


def _log_law(logits, temperature, top_k):
    """Return log-probabilities over the last axis, in float64 NumPy, after temperature and then top-k."""
    scaled = logits.astype(np.float64) / temperature[:, None, None]
    kth = np.take_along_axis(-np.sort(-scaled, axis=-1), top_k[:, None, None] - 1, axis=-1)
    scaled = np.where(scaled >= kth, scaled, -np.inf)
    return scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True)


def test_logprobs_equal_distribution_sampled_from(toy, prompts, report):
    target, draft = toy(0), toy(*DRAFTS["related"])
    tokens, lengths, keys = prompts([3, 1, 6, 4, 2, 5])
    temperature, top_k = np.array([0.5, 1.0, 1.5, 0.8, 1.0, 2.0]), np.array([61, 5, 20, 3, 61, 2])
    sampling = jspec.SamplingParams(temperature=temperature, top_k=top_k)
    out = jspec.speculative_generate(
        target, draft, tokens, lengths, keys, max_new_tokens=16, num_draft_tokens=3, sampling=sampling
    )
    text = np.zeros((6, 22), np.int32)
    for row, n in enumerate(lengths):
        text[row, : n + 16] = np.concatenate([tokens[row, :n], out.tokens[row]])
    laws = _log_law(np.asarray(target(text)), temperature, top_k)
    expected = np.stack([laws[b, np.arange(n - 1, n + 15), out.tokens[b]] for b, n in enumerate(lengths)])
    worst = np.abs(out.logprobs - expected).max()
    raw = _log_law(np.asarray(target(text)), np.ones(6), np.full(6, 61))
    raw = np.stack([raw[b, np.arange(n - 1, n + 15), out.tokens[b]] for b, n in enumerate(lengths)])
    assert np.abs(out.raw_logprobs - raw).max() <= 1e-4
    report(tokens=expected.size, mean=f"{expected.mean():.2f}", max_difference=f"{worst:.1e}")
    assert worst <= 1e-4


def test_last_context_position_is_usable(toy, prompts):
    """Prompt + max_new_tokens = max_position_embeddings decodes as with a longer context; one more is rejected."""
    batch = prompts([12, 3, 12, 7])
    short, long = (toy(0, max_position_embeddings=n) for n in (32, 256))
    greedy = jspec.SamplingParams(temperature=0.0)
    free = jspec.generate(long, *batch, max_new_tokens=20, sampling=greedy)
    out = jspec.speculative_generate(short, short, *batch, max_new_tokens=20, num_draft_tokens=5, sampling=greedy)
    np.testing.assert_array_equal(out.tokens, free.tokens)
    assert (out.stats.accepted == out.stats.drafted).all()
    with pytest.raises(ValueError, match="33 positions, but the target model has 32"):
        jspec.speculative_generate(short, long, *batch, max_new_tokens=21)
    with pytest.raises(ValueError, match="33 positions, but the draft model has 32"):
        jspec.speculative_generate(long, short, *batch, max_new_tokens=21)
