"""Helpers for the tests of block drafters: how far a drafter is from its reference."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.tree import Level, Tree
from jspec.drafters import BlockDrafter
from jspec.drafters.base import Context, TargetView
from jspec.drafters.signals import PromptSignals
from support import block_checkpoints, toys
from support.block_checkpoints import CONFIGS
from support.head_rounds import rounds


def torch_tensor(value):
    import torch  # not installed everywhere that tests run

    return torch.tensor(np.array(value))


def reference_error(path, name):
    """Return the largest difference between a drafter and its PyTorch reference, in logits and estimates.

    The drafter, with the config `name`, is written to `path`. It drafts a teacher-forced chain after sequences of
    different lengths, one of them a single token.
    """
    from support.block_torch import Reference

    raw, target = CONFIGS[name], toys.tiny_llama(0, 3, rms_norm_eps=1e-5)
    weights = block_checkpoints.write(path, raw)
    drafter = BlockDrafter.load(path, target, jnp.float32)
    own = [np.array(module.weight[...].T) for module in (target.embed_tokens, target.lm_head)]
    reference, k = Reference(raw, weights, *own, np.array(target.norm.weight[...])), drafter.max_chain_length
    vocab, rng, lengths = target.config.vocab_size, np.random.default_rng(0), np.array([7, 1, 4])
    tokens, forced = rng.integers(vocab, size=(3, 8)), rng.integers(vocab, size=(3, k))
    zeros, layers = jnp.zeros(3, jnp.int32), range(4)
    states = target.forward_with_features(jnp.asarray(tokens), target.new_cache(3, 8), zeros, layers)[1]
    signals = PromptSignals(states[:, :, list(drafter.features)], jnp.asarray(lengths), target)
    state, view = drafter.init(jnp.asarray(tokens), 12, signals), TargetView(target, target.new_cache(3, 1), 1)
    context = Context(jnp.asarray(tokens), jnp.asarray(lengths), zeros, None, None, view, vocab)
    found, carry = drafter.begin(state, context, Tree.chain(k))
    found, estimates = [found], [drafter.acceptance(carry, found)]
    for depth in range(1, k):
        following, carry = drafter.extend(carry, jnp.asarray(forced[:, depth - 1 : depth]), Level(depth), context)
        found.append(following[:, 0])
        estimates.append(drafter.acceptance(carry, following[:, 0]))
    drafted, worst = [1, 2, 4, 6, 7] if "d2t" in weights else list(range(vocab)), 0.0
    for row, length in enumerate(lengths):
        given = [torch_tensor(states[row, : length - 1, i]) for i in layers]
        before = [tokens[row, length - 1], *forced[row, :-1]]
        expected = reference.logits(given, before).numpy()
        ours = np.stack([one[row] for one in found])
        assert np.isneginf(np.delete(ours, drafted, axis=1)).all()
        np.testing.assert_array_equal(np.isneginf(ours[:, drafted]), np.isneginf(expected))
        likely = np.isfinite(expected)
        worst = max(worst, np.abs(ours[:, drafted][likely] - expected[likely]).max())
        if raw.get("enable_confidence_head"):
            ours = np.stack([one[row] for one in estimates])
            worst = max(worst, np.abs(ours - reference.acceptance(given, before).numpy()).max())
    return worst


def features_of(target, block, tokens):
    """Return the target's hidden states at ``tokens[B, S]`` that `block` reads."""
    batch, size = tokens.shape
    zeros = jnp.zeros(batch, jnp.int32)
    return target.forward_with_features(tokens, target.new_cache(batch, size), zeros, block.config.features)[1]


def cache_error(target, drafter, block, inner, batch, length, rule):
    """Return the largest error of a drafter's cache after any round, and the number of accepted draft tokens.

    The cache is compared with the keys and values of the target's states at the text so far, read in one piece.
    ``inner(state.drafter)`` is the state of the `BlockDrafter`.
    """

    @jax.jit
    def read_whole(tokens):
        states, start = features_of(target, block, tokens), jnp.zeros(len(tokens), jnp.int32)
        return block.read(states, block.new_cache(*tokens.shape), start, target)

    worst, accepted, before = 0.0, 0, None
    for state in rounds(target, drafter, batch, length, rule, [20, 7, 20, 1]):
        drafted = inner(state.drafter)
        whole, found, lengths, done = jax.device_get((read_whole(state.tokens), drafted, state.lengths, state.done))
        for row in np.flatnonzero(~done):
            assert found.lengths[row] == lengths[row]
            end = lengths[row] - 1
            for ours, expected in zip(found.cache.values, whole.values, strict=True):
                worst = max(worst, np.abs(ours[row, :, :end] - expected[row, :, :end]).max(initial=0))
            for ours, expected in zip(found.cache.keys, whole.keys, strict=True):
                worst = max(worst, np.abs(ours[row, ..., :end] - expected[row, ..., :end]).max(initial=0))
        accepted += 0 if before is None else int(np.maximum(lengths - before - 1, 0).sum())
        before = lengths
    return worst, accepted
