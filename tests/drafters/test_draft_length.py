"""Draft lengths: the distribution is unchanged, drafts end where they should, and unneeded work is skipped."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core.types import pytree
from jspec.drafters.draft_length import compiled_lengths
from support import drafters, oracle, toys
from support.exits import LENGTHS, TOKENS, K, drafted
from support.few import by_default
from support.law import plain
from support.matrix import check_texts, pair, text_p_values

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")

LENGTH_RULES = (
    jspec.UpTo(3),
    jspec.WhileConfident(3, 0.3),
    jspec.Heuristic(3),
    jspec.ByAcceptance(3, cost_ratio=0.3),
    jspec.ByConfidence(3, acceptance=0.7),
    jspec.WhileConfident(3, 0.3, first=0.3),
    jspec.ByEstimatedAcceptance(3, cost_ratio=0.4),
)


JOINT_LAWS = (
    (LENGTH_RULES[0], "retrieval", "rejection"),
    (LENGTH_RULES[4], "mixture", "block"),
    (LENGTH_RULES[5], "model", "rejection"),
    (LENGTH_RULES[5], "fallback", "rejection"),
    (jspec.Heuristic(2), "cascade", "rejection"),
    (jspec.ByAcceptance(2, cost_ratio=0.3), "early exit", "block"),
    (LENGTH_RULES[1], "mixture", "block"),
    (LENGTH_RULES[6], "block with corrections", "block"),
    (LENGTH_RULES[6], "fallback", "rejection"),
)


@pytest.mark.parametrize(("length", "name", "rule"), by_default(JOINT_LAWS, JOINT_LAWS[:4]), ids=str)
def test_three_tokens_have_target_joint_distribution(report, length, name, rule):
    p_values = text_p_values(drafters.make(name, *pair()), rule, 8_192, length)
    check_texts(report, p_values, 8_192, len(JOINT_LAWS))


@pytree
class Discarding(jspec.ModelDrafter):
    """A drafter that stops before a token that it has drawn but is unsure of, which biases the output."""

    def propose(self, state, context, num_draft_tokens):
        draft, state = super().propose(state, context, num_draft_tokens)
        sure = jnp.take_along_axis(draft.probs, draft.tokens[..., None], axis=-1) >= 0.3
        return dataclasses.replace(draft, probs=draft.probs * jnp.cumprod(sure, axis=1)), state


def test_discarding_the_low_confidence_token_is_biased(report):
    """The bias is as large as theory says. The same rule is unbiased if it keeps the token."""
    draws, prompt = 200_000, 3
    target, draft = toys.markov_pair(0)
    p, q = (np.exp(t := np.asarray(model.table[prompt], float)) / np.exp(t).sum() for model in (target, draft))
    sure, left = q >= 0.3, np.maximum(p - q, 0)
    rejected = (q - np.minimum(p, q))[sure].sum()
    biased = np.where(sure, np.minimum(p, q), 0) + rejected * left / left.sum() + q[~sure].sum() * p
    batch = np.full((draws, 1), prompt), np.ones(draws, int), jax.random.split(jax.random.key(0), draws)
    model, found = jspec.ModelDrafter(draft), {}
    for name, drafter, length in (
        ("discarding", Discarding(draft), 1),
        ("keeping", model, jspec.WhileConfident(2, 0.3)),
        ("not drawing", model, jspec.WhileConfident(2, 0.3, first=0.5)),
    ):
        out = jspec.speculative_generate(target, drafter, *batch, max_new_tokens=1, num_draft_tokens=length)
        counts = np.bincount(np.asarray(out.tokens)[:, 0], minlength=8)
        found[name] = oracle.p_value(counts, p), oracle.p_value(counts, biased)
    told = {name: tuple(map(float, ps)) for name, ps in found.items()}
    report(distance=f"{np.abs(p - biased).sum() / 2:.3f}", **told)
    assert found["discarding"][0] < 1e-12 < oracle.ALPHA < found["discarding"][1]
    assert found["keeping"][0] > oracle.ALPHA and found["not drawing"][0] > oracle.ALPHA


def test_draft_stops_after_first_low_confidence_token():
    """The tokens are those of a full draft; their number follows from the draft's own distribution."""
    draft, most, lengths = toys.tiny_llama(11), jnp.array([1, 3, 3, 2, 0]), set()
    for threshold, sampling in ((0.2, {}), (0.45, {"temperature": 0.0}), (0.4, {"top_p": 0.5})):
        full = drafted(jspec.ModelDrafter(draft), **sampling)
        text, after = np.pad(TOKENS, ((0, 0), (0, K))), LENGTHS[:, None] + np.arange(K)
        np.put_along_axis(text, after, full.tokens, axis=1)
        laws = np.take_along_axis(oracle.softmax(np.asarray(plain(draft, text))), after[..., None] - 1, axis=1)
        sure = np.take_along_axis(laws, full.tokens[..., None], axis=-1)[..., 0] >= threshold
        expected = np.minimum(1 + np.cumprod(sure[:, :-1], axis=1).sum(1), most)
        lengths |= set(expected[1:3].tolist())
        rule = jspec.WhileConfident(K, threshold)
        out = drafted(jspec.ModelDrafter(draft), budget=most, draft_length=rule, **sampling)
        kept = np.arange(K) < expected[:, None]
        np.testing.assert_array_equal(out.probs.any(-1), kept)
        np.testing.assert_array_equal(out.tokens[kept], full.tokens[kept])
        np.testing.assert_array_equal(out.probs[kept], full.probs[kept])
    assert lengths == {1, 2, 3}


def test_draft_does_not_start_without_a_likely_token():
    """The first token's distribution decides, so that a row that begins drafts what it would have drafted anyway."""
    full = drafted(jspec.ModelDrafter(draft := toys.tiny_llama(11)))
    laws = oracle.softmax(np.asarray(plain(draft, TOKENS)))
    text = laws[np.arange(len(TOKENS)), LENGTHS - 1].max(-1)
    for first in (np.sort(text)[1:] + np.sort(text)[:-1]) / 2:
        rule = jspec.WhileConfident(K, 1e-6, first=float(first))
        out = drafted(jspec.ModelDrafter(draft), budget=jnp.full(len(TOKENS), K), draft_length=rule)
        begins = np.asarray(text) >= first
        assert 0 < begins.sum() < len(begins)
        np.testing.assert_array_equal(out.probs.any(-1), np.broadcast_to(begins[:, None], out.tokens.shape))
        np.testing.assert_array_equal(out.probs[begins], full.probs[begins])
        np.testing.assert_array_equal(out.tokens[begins], full.tokens[begins])


@pytree
class Counted(toys.MarkovModel):
    """A model that records in `ROWS` the number of token positions of every pass that actually runs."""

    name: jax.Array

    def forward(self, tokens, cache, start, past=None):
        jax.debug.callback(lambda name: ROWS.append((int(name), tokens.shape[1])), self.name)
        return super().forward(tokens, cache, start, past)


ROWS = []


def test_unneeded_passes_are_skipped():
    table = jnp.asarray(3 * np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    target, draft = (Counted(table, jnp.array(name)) for name in (0, 1))
    batch = np.array([[1]]), np.array([1]), jax.random.split(jax.random.key(0), 1)

    def rows(drafter, length, batch=batch):
        ROWS.clear()
        out = drafters.generate(target, drafter, batch, max_new_tokens=24, num_draft_tokens=length)
        jax.effects_barrier()
        counts = {name: sorted(n for which, n in ROWS[1:] if which == name) for name in (0, 1)}
        return counts, int(out.stats.rounds.sum()), int(out.stats.drafted.sum())

    counts, rounds, drafted = rows(jspec.NGramDrafter(60, 60), jspec.UpTo(4))
    assert (counts[0], drafted) == ([1] * rounds, 0)
    counts, rounds, drafted = rows(jspec.ModelDrafter(draft), jspec.WhileConfident(4, 0.999))
    assert counts[0] == [2] * rounds and len(counts[1]) == drafted + 1  # one pass per token, plus the prompt's
    behind_lookup = jspec.FallbackDrafter(jspec.NGramDrafter(60, 60), jspec.ModelDrafter(draft))
    for drafter in (jspec.ModelDrafter(draft), behind_lookup):
        counts, rounds, drafted = rows(drafter, jspec.WhileConfident(4, 0.999, first=0.999))
        assert (counts[0], drafted) == ([1] * rounds, 0) and len(counts[1]) <= rounds + 1  # it only reads
    both = jspec.FallbackDrafter(jspec.UnigramDrafter.from_tokens(np.arange(8), 8), jspec.ModelDrafter(draft))
    counts, rounds, drafted = rows(both, jspec.UpTo(4))
    assert drafted and len(counts[1]) <= rounds + 1
    counts, rounds, drafted = rows(jspec.ModelDrafter(draft), jspec.Heuristic(4))
    assert set(counts[0]) > {5} and set(counts[0]) <= {1 + n for n in compiled_lengths(jspec.Heuristic(4))}


@pytest.mark.parametrize("length", by_default(LENGTH_RULES, LENGTH_RULES[1:2]), ids=lambda one: type(one).__name__)
def test_coupled_output_equals_plain_decoding_alone_and_in_batch(report, toy, prompts, length):
    """This holds for any sampling parameters, limits and EOS tokens."""
    target, drafter = toy(0), jspec.ModelDrafter(toy(0, distance=0.1))
    batch, options = prompts([9, 1, 5, 3, 7, 2, 4]), drafters.every_parameter(7, 61)
    common = {"max_new_tokens": 24, "num_draft_tokens": length, "accept": "coupled"}
    plain = jspec.generate(target, *batch, max_new_tokens=24, **options)
    out = drafters.generate(target, drafter, batch, **common, **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    np.testing.assert_allclose(out.logprobs, plain.logprobs, atol=1e-4)
    np.testing.assert_allclose(out.raw_logprobs, plain.raw_logprobs, atol=1e-4)
    row = slice(2, 3)
    batch = [part[row] for part in batch]
    alone = drafters.generate(target, drafter, batch, **common, **drafters.of_rows(options, row))
    assert out.stats.accepted_at.shape == (7, 3)
    np.testing.assert_array_equal(alone.stats.accepted_at[0], out.stats.accepted_at[2])
    report(drafted=int(out.stats.drafted.sum()), accepted=int(out.stats.accepted.sum()))


@dataclasses.dataclass(frozen=True)
class Recorded(jspec.Heuristic):
    """A rule that records in `RECORDS` the drafted and accepted counts of each round."""

    def update(self, state, drafted, accepted):
        jax.debug.callback(lambda *counts: RECORDS.append(counts), drafted, accepted)
        return super().update(state, drafted, accepted)


@pytree
class Asked(jspec.ModelDrafter):
    """A drafter that records in `ASKED` the number of tokens that each row wanted."""

    def propose(self, state, context, num_draft_tokens):
        jax.debug.callback(ASKED.append, context.budget)
        return super().propose(state, context, num_draft_tokens)


RECORDS, ASKED = [], []


def test_length_rule_receives_counts_of_each_round(toy, prompts):
    """Each row's counts over all rounds add up to its statistics, and a finished row asks for no more tokens."""
    RECORDS.clear(), ASKED.clear()
    options = {"max_new_tokens": 24, "sampling": jspec.SamplingParams(max_tokens=np.array([0, 3, 9]))}
    drafter, length = Asked(toy(0, distance=0.1)), Recorded(4)
    out = drafters.generate(toy(0), drafter, prompts([9, 1, 5]), num_draft_tokens=length, **options)
    jax.effects_barrier()
    drafted, accepted = np.sum(RECORDS, axis=0)
    np.testing.assert_array_equal(drafted, out.stats.drafted)
    np.testing.assert_array_equal(accepted, out.stats.accepted)
    assert len(RECORDS) == len(ASKED) == out.stats.rounds.max() > out.stats.rounds.min()
    np.testing.assert_array_equal((np.array(ASKED) > 0).sum(0), out.stats.rounds)


@dataclasses.dataclass(frozen=True)
class TooMany(jspec.UpTo):
    def budget(self, state, batch):
        return jnp.full(batch, self.max_draft_tokens + 5)


def test_budget_above_maximum_is_clamped(toy, prompts):
    target, batch = toy(0), prompts([4, 1])
    drafter = jspec.CascadeDrafter(toy(1), jspec.NGramDrafter())
    texts = [
        drafters.generate(target, drafter, batch, max_new_tokens=8, num_draft_tokens=length).tokens
        for length in (TooMany(2), jspec.UpTo(2))
    ]
    np.testing.assert_array_equal(*texts)


@pytest.mark.parametrize("name", ["retrieval", "cascade"])
def test_one_token_drafts_are_supported(toy, prompts, name):
    target, batch = toy(0), prompts([4, 1])
    drafter = drafters.make(name, target, toy(0, distance=0.1))
    out = drafters.generate(
        target, drafter, batch, max_new_tokens=8, num_draft_tokens=jspec.UpTo(np.int64(1)), accept="coupled"
    )
    np.testing.assert_array_equal(out.tokens, jspec.generate(target, *batch, max_new_tokens=8).tokens)


@dataclasses.dataclass(frozen=True)
class Bursts(jspec.UpTo):
    """A rule that wants no tokens for five rounds and then the maximum, with the rows out of step."""

    def init(self, batch):
        return 3 * jnp.arange(batch)

    def budget(self, state, batch):
        return jnp.where(state % 6 == 5, self.max_draft_tokens, 0)

    def update(self, state, drafted, accepted):
        return state + 1


def test_drafter_catches_up_after_rounds_without_drafts(prompts):
    """A draft by the target itself is always accepted, after any rounds without drafts and beside any neighbours."""
    target = toys.tiny_llama(10)
    drafter, batch = drafters.make("cascade", target, target), prompts([3, 4], vocab_size=8)
    options = {"max_new_tokens": 60, "num_draft_tokens": Bursts(4)}
    with jax.enable_checks(True):  # a cascade drafts too much; the surplus is cut off and need not be valid
        out = drafters.generate(target, drafter, batch, **options)
        alone = drafters.generate(target, drafter, [part[:1] for part in batch], **options)
    np.testing.assert_array_equal(out.tokens[0], alone.tokens[0])
    np.testing.assert_array_equal(out.stats.accepted, out.stats.drafted)


class Loose(jspec.UpTo):
    __hash__ = None


def test_mistakes_are_reported(toy, prompts):
    for make, message in (
        (lambda: jspec.UpTo(0), "max_draft_tokens must be an int of at least 1; got 0"),
        (lambda: jspec.Heuristic(True), "max_draft_tokens must be an int"),
        (lambda: jspec.WhileConfident(4, 1.5), "threshold must be a number above 0 and at most 1; got 1.5"),
        (lambda: jspec.WhileConfident(4, "a"), "threshold must be a number above 0 and at most 1; got 'a'"),
        (lambda: jspec.WhileConfident(4, first=-0.1), "first must be a number above 0 and at most 1; got -0.1"),
        (lambda: jspec.WhileConfident(4, first=None), "first must be a number above 0 and at most 1; got None"),
        (lambda: jspec.ByConfidence(4, 0), "acceptance must be a number above 0 and at most 1; got 0"),
        (lambda: jspec.ByEstimatedAcceptance(4, 0), "cost_ratio must be a number above 0 and at most 1000; got 0"),
        (lambda: jspec.ByAcceptance(4, float("nan")), "cost_ratio must be a number above 0 and at most 1000; got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    for length, message in (
        (jspec.WhileConfident(4), "the draft's confidence in each token, which NGramDrafter does"),
        (jspec.ByEstimatedAcceptance(4), "the draft's confidence in each token, which NGramDrafter does"),
        (jspec.UpTo, r"an object such as jspec.UpTo\(8\)"),
        (SimpleNamespace(budget=1, max_draft_tokens=2), "which lacks needs_confidence, init"),
        (Loose(2), r"Loose\(max_draft_tokens=2\) is not hashable"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            jspec.speculative_generate(
                toy(0), jspec.NGramDrafter(), *prompts([3]), max_new_tokens=4, num_draft_tokens=length
            )
