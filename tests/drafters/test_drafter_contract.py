"""Rejected input: drafts that break the contract, impossible sizes, and drafter authors' most likely mistakes."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core.types import NO_DRAFT, Draft, pytree
from support import drafters, toys

pytestmark = pytest.mark.usefixtures("quick_compile")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["model", "draft_ids"], meta_fields=["change"])
@dataclasses.dataclass(frozen=True)
class Wrong(jspec.ModelDrafter):
    """A drafter that returns `change` applied to a valid draft."""

    change: Callable

    def propose(self, state, context, num_draft_tokens):
        draft, state = super().propose(state, context, num_draft_tokens)
        return self.change(draft), state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda draft: Draft(draft.tokens, draft.probs * 1.01),
            "Wrong drafted token 0 of row 0 with a .* sums to 1.01",
        ),
        (
            lambda draft: Draft(draft.tokens, draft.probs.at[:, 1].set(jnp.nan)),
            "token 1 of row 0 with a .* sums to nan",
        ),
        (
            lambda draft: Draft(draft.tokens, jax.nn.one_hot(draft.tokens + 1, 61)),
            "a probability of 0 for the token; expected a sum of 1",
        ),
        (
            lambda draft: Draft(draft.tokens * 0 - 1, draft.probs),
            "Wrong drafted -1 as token 0 of row 0, outside the voc",
        ),
        (
            lambda draft: Draft(draft.tokens.at[1, 2].set(61), draft.probs),
            "drafted 61 as token 2 of row 1, outside the v",
        ),
        (
            lambda draft: Draft(draft.tokens[:, 1:], draft.probs),
            r"tokens int32\[2, 3\] with distributions \[2, 4, 61\]; expected",
        ),
        (lambda draft: Draft(draft.tokens * 1.0, draft.probs), r"tokens float32\[2, 4\]"),
        (
            lambda draft: Draft(draft.tokens, draft.probs[..., 1:]),
            r"expected integers \[2, 4\] with distributions \[2, 4, 61\]",
        ),
    ],
)
def test_debug_mode_enforces_drafter_contract(toy, prompts, change, message, capfd):
    with jax.enable_checks(True), pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(
            jspec.speculative_generate(toy(0), Wrong(toy(1), change), *prompts([3, 2]), max_new_tokens=8)
        )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["model", "draft_ids", "token"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Outside(jspec.ModelDrafter):
    """A drafter that drafts `token` in row 1, from a distribution with mass everywhere."""

    token: jax.Array

    def propose(self, state, context, num_draft_tokens):
        draft, state = super().propose(state, context, num_draft_tokens)
        return Draft(draft.tokens.at[1, 0].set(self.token), jnp.full(draft.probs.shape, 1 / 61)), state


def test_ids_outside_vocabulary_are_reported_and_never_emitted(toy, prompts):
    """This includes -1, which NumPy takes for the last entry. Inside `jax.jit`, such ids count as no draft tokens."""

    def call(target, drafter):
        return jspec.speculative_generate(target, drafter, *prompts([3, 2]), max_new_tokens=8, num_draft_tokens=1)

    plain, inside = jspec.generate(toy(0), *prompts([3, 2]), max_new_tokens=8), jax.jit(call)
    for token in (-1, 61, 10**6):
        drafter = Outside(toy(1), jnp.asarray(token, jnp.int32))
        with pytest.raises(ValueError, match="Outside drafted ids outside the vocabulary of 61 tokens in row 1; draft"):
            call(toy(0), drafter)
        # Nested or inside a program, no error is possible: the id is no draft token, and the output is the target's.
        nested = jspec.FallbackDrafter(drafter, jspec.NGramDrafter(60, 60))
        for out in (inside(toy(0), drafter), call(toy(0), nested)):
            assert (out.origins[1] == NO_DRAFT).all()
            np.testing.assert_array_equal(out.tokens[1], plain.tokens[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jspec.NGramDrafter(0), "max_ngram must be an int of at least 1; got 0"),
        (lambda: jspec.NGramDrafter(3, 1.0), "min_ngram must be an int"),
        (lambda: jspec.NGramDrafter(2, 3), "min_ngram=3 is more than max_ngram=2"),
        (lambda: jspec.UnigramDrafter.from_tokens([], 4), "at least 1 token ids"),
        (lambda: jspec.UnigramDrafter.from_tokens([0.5], 4), "at least 1 token ids"),
        (lambda: jspec.UnigramDrafter.from_tokens([4], 4), "outside the vocabulary of 4"),
        (lambda: jspec.UnigramDrafter.from_tokens([-1], 4), "outside the vocabulary of 4"),
        (lambda: jspec.UnigramDrafter.from_tokens([1], 4, smoothing=0), "smoothing must be a positive number"),
        (lambda: jspec.BigramDrafter.from_tokens([1], 4), "at least 2 token ids"),
        (lambda: jspec.BigramDrafter.from_tokens([1, 2], 4, smoothing=float("nan")), "smoothing must be"),
        (lambda: jspec.BigramDrafter.from_tokens([1, 2], 128_256), "takes 61 GiB; use UnigramDrafter"),
        (lambda: jspec.CascadeDrafter(None, None, 0), "num_small_draft_tokens must be an int of at least 1"),
    ],
)
def test_invalid_sizes_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_mismatched_vocabularies_are_rejected(toy, prompts):
    target, batch = toy(0), prompts([3])
    tables = [jspec.UnigramDrafter.from_tokens([0, 1], size) for size in (8, 9)]
    for drafter, message in (
        (tables[0], "draft's vocabulary has 8 tokens and the target's 61"),
        (jspec.FallbackDrafter(*tables), "combines vocabularies of 8 and 9"),
        (jspec.CascadeDrafter(target, tables[0]), "vocabular"),
    ):
        with pytest.raises(ValueError, match=message):
            jspec.speculative_generate(target, drafter, *batch, max_new_tokens=4)


class Unregistered:
    """A drafter that is not a pytree."""

    vocab_size = max_positions = None
    init = propose = commit = None


@pytree
class Flat(jspec.drafters.AutoregressiveDrafter):
    """The minimum that a stateless drafter must define."""

    logits: jax.Array
    vocab_size = max_positions = None

    def begin(self, state, context, tree):
        return jnp.broadcast_to(self.logits, (context.lengths.size, self.logits.size)), ()

    def extend(self, carry, tokens, level, context):
        return jnp.broadcast_to(self.logits, (*tokens.shape, self.logits.size)), ()


@pytree
class Bare(Flat):
    """A drafter that returns a pair instead of a draft."""

    def propose(self, state, context, num_draft_tokens):
        draft, state = super().propose(state, context, num_draft_tokens)
        return (draft.tokens, draft.probs), state


def test_common_mistakes_of_drafter_authors_are_reported(toy, prompts):
    target, batch = toy(0), prompts([3, 2])
    assert drafters.generate(target, Flat(jnp.zeros(61)), batch, max_new_tokens=8).stats.drafted.all()
    for drafter, message in (
        (Unregistered(), "type Unregistered, which is not a pytree; decorate the class"),
        (Bare(jnp.zeros(61)), r"propose must return \(jspec.drafters.Draft, state\); got \(tuple, state\)"),
    ):
        with pytest.raises(TypeError, match=message):
            jspec.speculative_generate(target, drafter, *batch, max_new_tokens=4)


@pytree
class Withdrawn(jspec.drafters.Stateless):
    """A drafter of two independent children with distributions that marks the later one as no draft token."""

    law: jax.Array
    tree = jspec.Tree((0, 0))
    replacement = True
    vocab_size = max_positions = None

    def propose(self, state, context, num_draft_tokens):
        shape = context.lengths.size, 2
        laws = jnp.broadcast_to(self.law, (*shape, self.law.size))
        tokens = jspec.rules.sample_with_noise(context.noise[:, 0], laws)
        return Draft(tokens, laws, self.tree, jnp.broadcast_to(jnp.array([True, False]), shape)), state


@pytest.mark.parametrize("rule", ["rejection", "traversal", "k-seq"])
def test_withdrawn_draft_token_is_never_accepted(report, rule):
    p, rows = jnp.array([0.1, 0.2, 0.3, 0.4]), 10_000
    target = toys.MarkovModel(jnp.tile(jnp.log(p), (4, 1)))
    batch = jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32), jax.random.split(jax.random.key(0), rows)
    out = drafters.generate(target, Withdrawn(p[::-1]), batch, max_new_tokens=1, accept=rule, record=True)
    off = np.abs(np.bincount(out.tokens[:, 0], minlength=4) / rows - p).max()
    report(largest_difference=f"{off:.3f}")
    assert off < 0.02 and (out.record.fates[..., 1] == 0).all()
