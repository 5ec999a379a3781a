"""A draft equal to the target is always accepted, for every drafter that can be one, every length and every rule.

A mistake in any other part of a round shows here as a rejection, and there must be none. The other parts are caches,
tokens that a drafter has not read, penalties, and the shortest verification that holds all drafts.
"""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.acceptance import RULES
from jspec.core.types import ACCEPTED, BONUS, NO_DRAFT, PADDING, pytree
from jspec.drafters import CascadeDrafter, EarlyExitDrafter, FallbackDrafter, MixtureDrafter, ModelDrafter, NGramDrafter
from jspec.models.kv_cache import KVCache, visible, write
from support import drafters
from support.few import by_default

pytestmark = pytest.mark.usefixtures("quick_compile")
K, NEW, VOCAB, FEATURES = 3, 20, 8, 4


@functools.partial(jax.tree_util.register_dataclass, data_fields=["embedding", "head"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Reader:
    """A single-layer model with a cache that sums what it has read, and compiles in half a Llama's time.

    A token adds a whole number that depends on its position, so sums do not depend on their order.
    """

    embedding: jax.Array  # [V, E]
    head: jax.Array  # [E, V]

    config = types.SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=1 << 20)
    layers = (None,)

    def new_cache(self, batch, slots):
        return KVCache((), (jnp.zeros((batch, 1, slots, FEATURES)),))

    def forward(self, tokens, cache, start, layers=None, past=None):
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        first = jnp.zeros_like(start) if past is None else past[1]
        new = self.embedding[tokens] * (1 + positions % 5)[..., None]
        read = write(cache.values[0], new[:, None], start - first, axis=2)
        hidden = visible(positions - first[:, None], read.shape[2]) @ read[:, 0]
        if past is not None:
            hidden += visible(first[:, None] - 1, past[0].values[0].shape[2]) @ past[0].values[0][:, 0]
        return hidden, KVCache((), (read,))

    def logits(self, hidden):
        return jnp.sin(hidden) @ self.head


def reader(kind=Reader):
    """Return a reader whose distributions are far from uniform."""
    rng = np.random.default_rng(0)
    return kind(
        jnp.asarray(rng.integers(-9, 9, (VOCAB, FEATURES)), jnp.float32),
        jnp.asarray(2 * rng.normal(size=(FEATURES, VOCAB)), jnp.float32),
    )


@pytree
class NowAndThen(ModelDrafter):
    """A drafter that drafts nothing in every other round. What it reads in those rounds is not in the sequence."""

    def begin(self, cache, context, tree):
        logits, cache = super().begin(cache, context, tree)
        return jnp.where(context.lengths[:, None] // (K + 1) % 2 == 1, -jnp.inf, logits), cache


DRAFTERS = {
    "model": ModelDrafter,
    "early exit": lambda target: EarlyExitDrafter(1),
    "mixture": lambda target: MixtureDrafter(ModelDrafter(target), ModelDrafter(target), 0.3),
    "cascade": lambda target: CascadeDrafter(target, CascadeDrafter(target, NGramDrafter(2, 1), 1), 1),
    "fallback": lambda target: FallbackDrafter(NowAndThen(target), ModelDrafter(target)),
}
LENGTHS = (
    jspec.WhileConfident(K, 0.4),
    K,
    jspec.UpTo(K),
    jspec.Heuristic(K),
    jspec.ByAcceptance(K, 0.3),
    jspec.ByEstimatedAcceptance(K, 0.3),
)
CONFIDENT = jspec.WhileConfident | jspec.ByEstimatedAcceptance  # those that need the drafter's confidence
BATCH = (
    np.random.default_rng(1).integers(VOCAB, size=(4, 6)),
    np.array([6, 1, 4, 3]),
    jax.random.split(jax.random.key(1), 4),
)
POSSIBLE = [
    (name, length, rule)
    for name, length, rule in itertools.product(DRAFTERS, LENGTHS, RULES)
    if not (name == "cascade" and isinstance(length, CONFIDENT))  # it does not report its confidence
]
# Every pair of drafter and length, of drafter and rule, and of length and rule.
COVERING = [
    combination
    for combination in POSSIBLE
    if (list(DRAFTERS).index(combination[0]) + LENGTHS.index(combination[1])) % 3 == list(RULES).index(combination[2])
]


def judged(name, length, rule):
    """Return the number of verified draft tokens, none of which may be rejected.

    The rows have different settings, and some have limits in mid-round.
    """
    target = reader()
    sampling = jspec.SamplingParams(
        temperature=[1.0, 0.0, 0.7, 1.5], frequency_penalty=[0.0, 0.5, 0.3, 0.0], max_tokens=[0, 0, 18, 0]
    )
    options = {"max_new_tokens": NEW, "num_draft_tokens": length, "accept": rule, "sampling": sampling}
    out = drafters.generate(target, DRAFTERS[name](target), BATCH, **options)
    np.testing.assert_array_equal(out.stats.acceptance_rate, 1)
    np.testing.assert_array_equal(out.stats.accepted_at, out.stats.judged_at)
    undrafted = {NO_DRAFT} if isinstance(length, jspec.ByEstimatedAcceptance) else set()  # it may draft nothing
    assert set(np.unique(out.origins)) <= {ACCEPTED, BONUS, PADDING} | undrafted
    if not isinstance(length, CONFIDENT | jspec.Heuristic | jspec.ByAcceptance):
        np.testing.assert_array_equal(out.stats.rounds, -(-out.lengths // (K + 1)))
    return int(out.stats.judged.sum())


@pytest.mark.parametrize(("name", "length", "rule"), by_default(COVERING, COVERING[::2]), ids=str)
def test_draft_equal_to_target_is_always_accepted(report, name, length, rule):
    report(judged=judged(name, length, rule), refused=0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length", "rule"), POSSIBLE, ids=str)
def test_draft_equal_to_target_is_always_accepted_in_every_case(report, name, length, rule):
    report(judged=judged(name, length, rule), refused=0)


PASSES = []


@functools.partial(jax.tree_util.register_dataclass, data_fields=["embedding", "head"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Counted(Reader):
    """A reader that records every pass that actually runs."""

    def forward(self, tokens, cache, start, layers=None, past=None):
        jax.debug.callback(lambda: PASSES.append(tokens.shape[1]))
        return super().forward(tokens, cache, start, layers, past)


def test_cascade_of_equal_models_uses_fewest_passes():
    """The draft of `small` is right if it has read what `middle` and the target added; otherwise, it costs passes."""
    PASSES.clear()
    drafter = CascadeDrafter(reader(Counted), ModelDrafter(reader()), K - 1)
    out = drafters.generate(reader(), drafter, BATCH, max_new_tokens=NEW, num_draft_tokens=K)
    jax.effects_barrier()
    np.testing.assert_array_equal(out.stats.rounds, NEW // (K + 1))
    assert len(PASSES) == 1 + NEW // (K + 1)  # one for the prompt, and one per draft
