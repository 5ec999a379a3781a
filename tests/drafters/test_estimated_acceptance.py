"""Drafts end when the next token would not pay off by its estimated acceptance, before the token is drawn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from convert.heads.block.config import MarkovConfig
from jspec.core.types import pytree
from jspec.drafters import BlockDrafter, FallbackDrafter
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from support import blocks, drafters, oracle, toys
from support.exits import LENGTHS, TOKENS, K, drafted
from support.law import plain

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")


def best_lengths(estimates, cost):
    """Return the lengths ``[B]`` for ``estimates[B, K]``: each token must increase the tokens per unit of time."""
    counts = []
    for row in np.asarray(estimates, float):
        count = 0
        while count < len(row):
            ratios = [(1 + np.cumprod(row[:k]).sum()) / (1 + k * cost) for k in (count, count + 1)]
            if not ratios[1] > ratios[0]:
                break
            count += 1
        counts.append(count)
    return np.array(counts)


def check_drafts(out, full, expected):
    """Check that `out` holds the first ``expected[B]`` tokens of the drafts `full`, and no distribution after them."""
    kept = np.arange(full.tokens.shape[1]) < expected[:, None]
    np.testing.assert_array_equal(out.probs.any(-1), kept)
    np.testing.assert_array_equal(out.tokens[kept], full.tokens[kept])
    np.testing.assert_array_equal(out.probs[kept], full.probs[kept])


def test_draft_ends_when_another_token_does_not_pay_off():
    """Without a confidence head, the estimate is the probability of the most likely token, before any transforms."""
    draft, most, lengths = toys.tiny_llama(11), np.array([1, 3, 3, 2, 3]), set()
    for cost, sampling in ((0.15, {}), (0.4, {"temperature": 0.0}), (0.25, {"top_p": 0.5}), (0.55, {})):
        full = drafted(jspec.ModelDrafter(draft), **sampling)
        text, after = np.pad(TOKENS, ((0, 0), (0, K))), LENGTHS[:, None] + np.arange(K)
        np.put_along_axis(text, after, full.tokens, axis=1)
        laws = np.take_along_axis(oracle.softmax(np.asarray(plain(draft, text))), after[..., None] - 1, axis=1)
        expected = np.minimum(best_lengths(laws.max(-1), cost), most)
        lengths |= set(expected.tolist())
        length = jspec.ByEstimatedAcceptance(K, cost)
        check_drafts(
            drafted(jspec.ModelDrafter(draft), budget=jnp.asarray(most), draft_length=length, **sampling),
            full,
            expected,
        )
    assert lengths == {0, 1, 2, 3}


@pytree
class Fed(AutoregressiveDrafter[tuple[()], jax.Array]):
    """A drafter with given distributions and estimates for the token after each token, ``[V, V]`` and ``[V]``."""

    table: jax.Array
    estimates: jax.Array
    vocab_size = 8

    def begin(self, state, context, tree):
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        return self.table[last], self.estimates[last]

    def extend(self, carry, tokens, level, context):
        return self.table[tokens], self.estimates[tokens[:, 0]]

    def acceptance(self, carry, logits):
        return carry


def test_estimates_of_ones_own_drafter_are_used():
    rng, most = np.random.default_rng(0), jnp.full(len(TOKENS), K)
    table, estimates = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32), rng.uniform(0.3, 1, size=8)
    drafter, lengths = Fed(table, jnp.asarray(estimates, jnp.float32)), set()
    full = drafted(drafter)
    before = np.concatenate([TOKENS[np.arange(5), LENGTHS - 1][:, None], full.tokens[:, :-1]], axis=1)
    for cost in (0.05, 0.25, 0.5):
        expected = best_lengths(estimates[before], cost)
        lengths |= set(expected.tolist())
        check_drafts(drafted(drafter, budget=most, draft_length=jspec.ByEstimatedAcceptance(K, cost)), full, expected)
    assert lengths == {0, 1, 2, 3}


def confident_block(target, bias, kind="vanilla"):
    """Return a block drafter whose confidence head has this bias."""
    block = blocks.block(target, markov=MarkovConfig(kind, 4), confidence="state and token", drafts_from_first=True)
    block.confidence_head.bias.set_value(jnp.full(1, bias))
    return BlockDrafter(block)


def test_confidence_head_decides(prompts):
    target, batch = toys.tiny_llama(0, 3), prompts([5, 1, 3], vocab_size=8)
    shares = []
    for bias, length in ((-30, None), (0.5, None), (30, None), (0.5, 4)):
        drafter, length = confident_block(target, bias), length or jspec.ByEstimatedAcceptance(4, 0.2)
        stats = drafters.generate(target, drafter, batch, max_new_tokens=20, num_draft_tokens=length).stats
        shares.append(stats.drafted.sum() / stats.rounds.sum())
    assert shares[0] == 0 < shares[1] < shares[2] == shares[3]


WRAPPED = {
    "block": lambda block, draft: block,
    "lookup, then block": lambda block, draft: FallbackDrafter(jspec.NGramDrafter(2, 1), block),
    "block, then model": lambda block, draft: FallbackDrafter(block, draft),
    "mixture": lambda block, draft: jspec.MixtureDrafter(block, draft, 0.5),
}


@pytest.mark.parametrize(
    "kind", [*list(WRAPPED)[:1], *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(WRAPPED)[1:])]
)
def test_coupled_output_equals_plain_decoding_alone_and_in_batch(report, toy, prompts, kind):
    """Neighbours change neither the output nor where drafts end. This holds for any sampling parameters and limits."""
    target, draft = (toy(0, distance=distance, num_hidden_layers=3) for distance in (0, 0.1))
    drafter = WRAPPED[kind](confident_block(target, 0.5), draft)
    batch, options = prompts([9, 1, 5, 3, 7]), {"max_new_tokens": 24} | drafters.every_parameter(5, 61)
    plain_output = jspec.generate(target, *batch, **options)
    options |= {"num_draft_tokens": jspec.ByEstimatedAcceptance(4, 0.2), "accept": "coupled"}
    out = drafters.generate(target, drafter, batch, **options)
    np.testing.assert_array_equal(out.tokens, plain_output.tokens)
    row = slice(2, 3)
    options |= drafters.of_rows(drafters.every_parameter(5, 61), row)
    alone = drafters.generate(target, drafter, [part[row] for part in batch], **options)
    np.testing.assert_array_equal(alone.stats.drafted[0], out.stats.drafted[2])
    np.testing.assert_array_equal(alone.stats.accepted_at[0], out.stats.accepted_at[2])
    report(drafted=int(out.stats.drafted.sum()), rounds=int(out.stats.rounds.sum()))
    assert 0 < out.stats.drafted.sum() < 4 * out.stats.rounds.sum()


def test_samples_of_a_prompt_have_their_own_lengths(prompts):
    target, (tokens, lengths, keys) = toys.tiny_llama(0, 3), prompts([5, 3, 4, 2], vocab_size=8)
    options = {"max_new_tokens": 16, "num_draft_tokens": jspec.ByEstimatedAcceptance(4, 0.2)}
    drafter, one = confident_block(target, 0.5), (tokens[:1], lengths[:1])
    out = drafters.generate(target, drafter, (*one, keys), samples_per_prompt=4, **options)
    repeated = [np.repeat(part, 4, axis=0) for part in one]
    expected = drafters.generate(target, drafter, (*repeated, keys), **options)
    jax.tree.map(np.testing.assert_array_equal, out, expected)
    assert len(set(out.stats.drafted.tolist())) > 1


@dataclasses.dataclass(frozen=True)
class Endless(jspec.lengths.DraftLength):
    """A policy without a budget of its own that drafts two tokens."""

    max_draft_tokens: int

    def budget(self, state, batch):
        return None

    def is_worthwhile(self, state, num_drafted, expected, survival):
        return jnp.full(survival.shape, num_drafted < 2)


def test_policy_without_a_budget_decides(toy, prompts):
    out = drafters.generate(
        toy(0), jspec.ModelDrafter(toy(0)), prompts([4, 2]), max_new_tokens=9, num_draft_tokens=Endless(4)
    )
    np.testing.assert_array_equal(out.stats.rounds, 3)
    np.testing.assert_array_equal(out.stats.drafted, 6)


def test_part_without_estimates_drafts_its_whole_length():
    """In a fallback, a horizontal cascade's second part must not count from the cascade's first token again."""
    part = jspec.HorizontalDrafter(toys.tiny_llama(11), toys.tiny_llama(12), 1)
    both, length = jspec.FallbackDrafter(part, toys.tiny_llama(13)), jspec.ByEstimatedAcceptance(K, 1.0)
    decided = drafted(both, budget=jnp.full(len(TOKENS), K), draft_length=length)
    check_drafts(decided, drafted(part), np.full(len(TOKENS), K))


@pytest.mark.parametrize("name", ["ngram", "cascade", "horizontal", "lookup tree", "recycling"])
def test_drafter_without_estimates_is_refused(toy, prompts, name):
    with pytest.raises((ValueError, TypeError), match=r"num_draft_tokens|confidence"):
        drafters.generate(
            toy(0, num_hidden_layers=2),
            drafters.make(name, toy(0, num_hidden_layers=2), toy(1)),
            prompts([4]),
            max_new_tokens=4,
            num_draft_tokens=jspec.ByEstimatedAcceptance(2),
        )


def test_trees_take_no_length(toy, prompts):
    for drafter in (
        jspec.TreeDrafter(toy(1), jspec.Tree((0, 0))),
        jspec.DynamicTreeDrafter(toy(1), 4, 2, 2),
    ):
        with pytest.raises(ValueError, match="num_draft_tokens"):
            drafters.generate(
                toy(0), drafter, prompts([4]), max_new_tokens=4, num_draft_tokens=jspec.ByEstimatedAcceptance(2)
            )
