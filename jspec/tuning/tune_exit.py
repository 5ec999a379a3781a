"""A search for the target's own layers that should draft for it, scored on texts that the target writes.

A choice of layers drafts well if its distributions are close to the target's. A draft token is accepted with
probability ``sum_x min(p(x), q(x))`` (Leviathan et al. 2023, theorem 3.5). That is computed on one text, block by
block, with the layers as data, so one program scores every choice. Nothing is timed. The cost of a draft is taken to be
the bytes it reads.
"""

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import ArrayLike

from jspec import theory
from jspec.acceptance import RULES
from jspec.core.keys import trial_keys
from jspec.core.row_ops import slice_rows, write_rows
from jspec.core.sampling import (
    LogitsTransforms,
    SamplingParams,
    add_tokens,
    broadcast_rows,
    count_prompt,
    token_probs,
)
from jspec.core.sharding import on_any_mesh
from jspec.decoding.program import run_program, traced
from jspec.decoding.validate_arguments import as_arrays, check_arguments
from jspec.drafters.draft_length import Fixed
from jspec.drafters.standalone.early_exit import EarlyExitDrafter, check_layers
from jspec.models.kv_cache import KVCache
from jspec.models.llama import Llama
from jspec.models.rope import rope_tables
from jspec.tuning.tune_chain import TRIALS
from jspec.tuning.validate_tuning import check_measurable, check_tuning

log = logging.getLogger(__name__)
_STEPS = 4  # climbing steps, each of which scores as many choices as there are layers
# Maps choices of layers, bool[C, L], to the worth of each, float64[C].
Worth = Callable[[np.ndarray], np.ndarray]


def best_exit(
    target: Llama,
    tokens: ArrayLike,
    lengths: ArrayLike,
    keys: Array,
    *,
    max_new_tokens: int = 64,
    sampling: SamplingParams = SamplingParams(),
    max_draft_tokens: int = 8,
) -> EarlyExitDrafter:
    """Return the layers that should draft fastest for `target`: where to exit, and which layers to skip before that.

    The search is that of Draft & Verify (Zhang et al. 2024), made deterministic and small. It tries every exit. Then it
    skips one layer, and then more and more layers, in the order of the acceptance that each alone has cost. From the
    best of these it climbs at most four steps; each step adds or removes one layer.

    The worth of a choice is its speedup at the best draft length, by theorem 3.8 of Leviathan et al. 2023. Acceptance
    is measured on texts that `target` writes, and cost is the bytes of weights that are read. `jspec.tune` measures
    whether to draft with the choice at all, and how far.

    Args:
        target: a model of at least two layers.
        tokens, lengths, keys, sampling: as for `tune`; no key is used as it is.
        max_new_tokens: the length of the texts to write and score.
        max_draft_tokens: the longest draft to consider.

    Raises:
        ValueError, TypeError: as `tune`; also if the target has only one layer, or none that can be left out.
    """
    check_layers(target, "jspec.best_exit")
    if len(target.layers) < 2:
        raise ValueError("target has one layer, so that none can be left out; draft with another model, or by lookup.")
    tokens, lengths, eos_ids, sampling = as_arrays(tokens, lengths, (), sampling)
    check_tuning(max_new_tokens, max_draft_tokens, 0)
    check_arguments(target, None, tokens, lengths, keys, max_new_tokens, None, sampling, eos_ids, 0)
    check_measurable(target, None, tokens, lengths, keys, sampling)
    log.info("Writing texts")
    out = run_program(target, None, tokens, lengths, trial_keys(keys, TRIALS), sampling, eos_ids, 0,
                      max_new_tokens=int(max_new_tokens), draft_length=Fixed(0), rule=RULES["rejection"])  # fmt: skip
    texts = write_rows(jnp.pad(jnp.asarray(tokens), ((0, 0), (0, max_new_tokens))), out.tokens, jnp.asarray(lengths))
    own, drafts, *_ = traced(sampling, eos_ids, 0)

    def worth(chosen: np.ndarray) -> np.ndarray:
        rates = acceptance_rates(target, chosen, texts, lengths, own, drafts, block=int(max_draft_tokens),
                                 blocks=int(max_new_tokens) // int(max_draft_tokens))  # fmt: skip
        rates = np.clip(np.asarray(rates, float).mean(0), 0, 1)[:, None]
        costs = pass_costs(target, chosen)[:, None]
        return np.asarray(theory.speedup(rates, np.arange(1, max_draft_tokens + 1), costs)).max(1)

    chosen = np.flatnonzero(search(worth, len(target.layers)))
    skipped = np.setdiff1d(np.arange(chosen[-1]), chosen)
    return EarlyExitDrafter(int(chosen[-1]) + 1, tuple(map(int, skipped)))


def search(worth: Worth, num_layers: int) -> np.ndarray:
    """Return the best ``bool[L]`` that the search of `best_exit` tries. Each call of `worth` scores L choices."""

    numbers = itertools.count(1)

    def scored(chosen: np.ndarray) -> list[tuple[float, np.ndarray]]:
        log.info("Scoring layers to leave out, %d of at most %d", next(numbers), 3 + _STEPS)
        worths = worth(chosen)
        return [(float(value), one) for value, one in zip(worths, chosen, strict=True) if one.any() and not one.all()]

    def best(found: list[tuple[float, np.ndarray]]) -> tuple[float, np.ndarray]:
        return max(found, key=lambda pair: pair[0])  # the first of equals

    exits = scored(np.tril(np.ones((num_layers, num_layers), bool)))
    singles = scored(~np.eye(num_layers, dtype=bool))
    order = np.argsort([-value for value, _ in singles], kind="stable")
    gone = np.argsort(order)  # layer i is the gone[i]-th to go
    ranked = scored(np.array([gone > n for n in range(num_layers)]))
    found = best([*exits, *singles, *ranked])
    for _ in range(_STEPS):
        nearby = best([found, *scored(found[1] ^ np.eye(num_layers, dtype=bool))])
        if nearby is found:
            break
        found = nearby
    return found[1]


def pass_costs(target: Llama, chosen: np.ndarray) -> np.ndarray:
    """Return the bytes of weights that each choice of layers reads in a pass, over those of the whole target.

    The choices are ``chosen[C, L]``, and the result is ``float64[C]``.
    """
    layers = np.array([_bytes(layer) for layer in target.layers], float)
    head = _bytes(target.embed_tokens if target.lm_head is None else target.lm_head)
    return (chosen @ layers + head) / (layers.sum() + head)


def _bytes(part: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(part))


@functools.partial(jax.jit, static_argnames=("block", "blocks"))
@on_any_mesh
def acceptance_rates(
    target: Llama,
    chosen: Array,
    tokens: Array,
    lengths: Array,
    transforms: LogitsTransforms,
    drafter_transforms: LogitsTransforms,
    *,
    block: int,
    blocks: int,
) -> Array:
    """Return how often a draft token of each choice of layers would be accepted, ``float32[B, C]``.

    Args:
        target: the model.
        chosen: ``bool[C, L]``, which layers each choice runs.
        tokens: ``int32[B, P + N]``, prompts and the texts that `target` wrote after them.
        lengths: ``int32[B]``, the lengths of the prompts.
        transforms, drafter_transforms: the sampling transforms of the target's and the drafts' distributions.
        block: the distance between the starts of two drafts. A draft reads the states of all layers for the text before
            it.
        blocks: the number of drafts; ``block * blocks <= N``.
    """
    batch, width = tokens.shape
    own, drafts = broadcast_rows(transforms, batch), broadcast_rows(drafter_transforms, batch)
    hidden, cache = target.forward(tokens, target.new_cache(batch, width), jnp.zeros(batch, jnp.int32))
    index = jnp.arange(width)
    prompts = count_prompt(tokens, lengths, target.config.vocab_size) if own.penalised else None

    def of_block(sums: Array, number: Array) -> tuple[Array, None]:
        start = lengths - 1 + number * block
        inputs, counts = slice_rows(tokens, start, block), None
        if prompts is not None:
            counts = add_tokens(prompts, tokens, (index >= lengths[:, None]) & (index <= start[:, None]))

        def law(hidden: Array, transforms: LogitsTransforms) -> Array:
            return token_probs(target.logits(hidden), transforms, counts, inputs[:, 1:])

        p = law(slice_rows(hidden, start, block), own)

        def accepted(chosen: Array) -> Array:
            return jnp.minimum(p, law(_through(target, chosen, inputs, start, cache), drafts)).sum((1, 2))

        return sums + lax.map(accepted, chosen), None

    sums, _ = lax.scan(of_block, jnp.zeros((len(chosen), batch), jnp.float32), jnp.arange(blocks))
    return sums.T / (block * blocks)


def _through(target: Llama, chosen: Array, tokens: Array, start: Array, past: KVCache) -> Array:
    """Return the output of an `EarlyExitDrafter` for ``tokens[B, S]``.

    Its layers are data: those where ``chosen[L]`` is True.
    """
    slots = start[:, None] + jnp.arange(tokens.shape[1])
    tables = rope_tables(slots, target.config.rope, target.config.head_dim)
    own = target.new_cache(*tokens.shape)
    x = target.embed_tokens(tokens).astype(target.dtype)
    for i, layer in enumerate(target.layers):

        def run(x: Array, i: int = i, layer: Any = layer) -> Array:
            before, held = (past.keys[i], past.values[i], None, start), (own.keys[i], own.values[i])
            return layer(x, layer.input_layernorm(x), *held, slots, tables, before, None, None, None)[0]

        x = lax.cond(chosen[i], run, lambda x: x, x)
    return x
