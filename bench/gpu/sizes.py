"""The sizes of the drill's models and measurements: real ones, and tiny ones for the rehearsal on CPU."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from bench.pairs import SHAPES, llama
from convert.config import LlamaConfig

ACCEPTANCE = 0.8  # of every drafted token, whatever it is (`bench.synthetic`)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured, and how often.

    Attributes:
        target, draft, large: the models; `large` decodes plainly.
        dtype: of weights, activations and caches.
        width: tokens of a prompt.
        new_tokens: the most new tokens, which fixes the size of the cache.
        short, long: new tokens of the two calls whose difference is timed.
        repeats: readings of each call.
        batches: batch sizes beside 1.
        contexts: tokens in the cache before a pass.
        draft_vocab: tokens that an EAGLE head can guess.
        trained: rows of a training batch, their length, and how far a head is unrolled.
        tree: nodes of a tree of guesses, and its depth.
        slots: of the engine; with one it has the fewest programs.
    """

    target: LlamaConfig
    draft: LlamaConfig
    large: LlamaConfig
    dtype: Any
    width: int
    new_tokens: int
    short: int
    long: int
    repeats: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    draft_vocab: int
    trained: tuple[int, int, int]
    tree: tuple[int, int]
    slots: int


# Prompt and new tokens are those that `python -m bench compiled` predicts for.
_REAL = Sizes(SHAPES["llama-3.2-3b"], SHAPES["llama-3.2-1b"], SHAPES["qwen3-8b"], jnp.bfloat16, 128, 384, 32, 160, 7,
              (8, 32), (1024, 4096, 16384), 32000, (8, 256, 4), (16, 6), 8)  # fmt: skip
_TINY_SHAPE = llama(vocab=256, hidden=64, inner=128, layers=1, heads=4, groups=2, size=16)
_TINY = Sizes(_TINY_SHAPE, _TINY_SHAPE, dataclasses.replace(_TINY_SHAPE, qk_norm=True, tie_word_embeddings=False),
              jnp.bfloat16, 8, 64, 8, 56, 2, (2,), (16, 32), 64, (2, 16, 1), (4, 2), 1)  # fmt: skip


def sizes(rehearse: bool) -> Sizes:
    """Return the sizes of the drill, or those of its rehearsal."""
    return _TINY if rehearse else _REAL
