"""Trained-head drafters with random weights, and a target whose distribution they can know."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jspec
from jspec.drafters.heads.blockwise import BlockwiseDrafter
from jspec.drafters.heads.hydra import HydraDrafter
from jspec.drafters.heads.kangaroo import KangarooDrafter
from jspec.drafters.heads.medusa import MedusaDrafter
from support import toys

# Logits of a text that cycles through 8 tokens.
CIRCLE = 20 * np.roll(np.eye(8), 3, axis=1)


def drawn(module, seed=0):
    """Return `module` with random matrices and biases, so that its output is far from its input."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape) * leaf.shape[0] ** -0.5, leaf.dtype)

    return jax.tree.map(draw, module)


def spread_out(make, draft_vocab_size, seed):
    """Return a module from ``make()`` with weights far from 0, so that its drafts depend on its input."""
    module, rng = nnx.eval_shape(make), np.random.default_rng(seed)
    for path, leaf in nnx.to_flat_state(nnx.state(module)):
        if path[-1] == "draft_ids":
            leaf.set_value(jnp.minimum(jnp.arange(leaf.shape[0], dtype=jnp.int32), draft_vocab_size))
        elif len(leaf.shape) == 2:
            leaf.set_value(jnp.asarray(rng.normal(size=leaf.shape) * leaf.shape[0] ** -0.5, leaf.dtype))
        else:
            leaf.set_value(jnp.asarray(1 + 0.1 * rng.normal(size=leaf.shape), leaf.dtype))
    return module


def loaded(linear, ours):
    """Copy the weights of a `jspec.models.layers.Linear` or of an output head into `linear`, and return it."""
    import torch  # not installed wherever the tests run

    linear.weight.data = torch.tensor(np.array(ours.weight[...].T))
    if linear.bias is not None:
        linear.bias.data = torch.tensor(np.array(ours.bias[...]))
    return linear


def medusa(target, count=3, blocks=1, seed=0):
    return drawn(MedusaDrafter.untrained(target, count, blocks, rngs=nnx.Rngs(0)), seed)


def hydra(target, count=3, blocks=2, own_head=True, seed=0):
    return drawn(HydraDrafter.untrained(target, count, blocks, own_head, rngs=nnx.Rngs(0)), seed)


def blockwise(target, count=3, seed=0):
    return drawn(BlockwiseDrafter.untrained(target, count, rngs=nnx.Rngs(0)), seed)


def kangaroo(target, num_layers=1, seed=0):
    return drawn(KangarooDrafter.untrained(target, num_layers, rngs=nnx.Rngs(0)), seed)


def vectors(target, count=2, seed=0):
    return drawn(jspec.PassDrafter(jnp.zeros((count, target.config.hidden_size), target.dtype)), seed)


def markov_llama(table):
    """Return a Llama whose logits after a token are always ``table[token]``, because its layers add nothing."""
    model = toys.tiny_llama(0, 2)
    size = model.config.hidden_size
    for layer in model.layers:
        layer.self_attn.o_proj.weight.set_value(jnp.zeros_like(layer.self_attn.o_proj.weight[...]))
        layer.mlp.down_proj.weight.set_value(jnp.zeros_like(layer.mlp.down_proj.weight[...]))
    model.embed_tokens.weight.set_value(jnp.eye(size, len(table)))
    model.lm_head.weight.set_value(output_head(table, size))
    return model


def output_head(table, size):
    """Return the head ``[E, V]`` that maps a token's one-hot vector after a norm to ``table[token]``."""
    return jnp.pad(jnp.asarray(table, jnp.float32), ((0, size - len(table)), (0, 0))) * size**-0.5


class _Counted(jspec.Llama):
    """A Llama that records the number of tokens of every pass that really runs."""

    def forward_with_features(self, tokens, *arguments, **options):
        jax.debug.callback(lambda: _PASSES.append(tokens.shape[1]))
        return super().forward_with_features(tokens, *arguments, **options)


_PASSES = []


def counted(target):
    """Return a list that grows with every pass of `target`, by its number of tokens."""
    target.__class__ = _Counted
    _PASSES.clear()
    return _PASSES


def check_always_right(target, drafter, temperature, num_draft_tokens=3, accept="rejection"):
    """Check 24 tokens after prompts that the target could have written: all drafts are accepted, 4 tokens per round."""
    tokens, keys = (3 * np.arange(4) + [[0], [5]]) % 8, jax.random.split(jax.random.key(0), 2)
    sampling = jspec.SamplingParams(temperature=temperature)
    length = {} if num_draft_tokens is None else {"num_draft_tokens": num_draft_tokens}
    out = jspec.speculative_generate(
        target, drafter, tokens, [4, 3], keys, max_new_tokens=24, sampling=sampling, accept=accept, **length
    )
    assert out.stats.judged.sum() and (out.stats.acceptance_rate == 1).all()
    assert out.stats.rounds.tolist() == [6, 6]
