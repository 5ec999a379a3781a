"""The sizes of the drill's models and measurements: realistic ones, and tiny ones for the rehearsal on CPU."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from bench.pairs import SHAPES, llama
from convert.config import LlamaConfig

ACCEPTANCE = 0.8  # the acceptance rate of every draft token, whatever the token is (`bench.synthetic`)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The shapes to measure, and the number of readings.

    Attributes:
        target, draft, large: the models. `large` is used for plain decoding.
        dtype: the dtype of weights, activations and caches.
        width: the number of tokens in a prompt.
        new_tokens: the maximum number of new tokens, which fixes the cache size.
        lengths: the new tokens of the two calls whose difference is timed.
        few: the same as `lengths` for slow decoders, with `few_repeats` readings.
        repeats: the number of readings for `lengths`.
        batches: the batch sizes other than 1.
        contexts: the numbers of tokens in the cache before a pass.
        draft_vocab: the number of tokens that an EAGLE head can draft.
        trained: the rows of a training batch, their length, and the number of steps that a head is unrolled.
        tree: the number of nodes in a draft tree, and its depth.
        slots: the number of engine slots. With one slot, the engine has the fewest programs.
    """

    target: LlamaConfig
    draft: LlamaConfig
    large: LlamaConfig
    dtype: Any
    width: int
    new_tokens: int
    lengths: tuple[int, int]
    repeats: int
    few: tuple[int, int]
    few_repeats: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    draft_vocab: int
    trained: tuple[int, int, int]
    tree: tuple[int, int]
    slots: int


_REAL = Sizes(
    target=SHAPES["llama-3.2-3b"],
    draft=SHAPES["llama-3.2-1b"],
    large=SHAPES["qwen3-8b"],
    dtype=jnp.bfloat16,
    width=128,  # with 384 new tokens, the defaults of `python -m bench compiled`
    new_tokens=384,
    lengths=(32, 160),
    repeats=7,
    few=(3, 15),  # multiples of 3, so that a fully accepted round of K = 2 is not cut short
    few_repeats=3,
    batches=(8, 32),
    contexts=(1024, 4096, 16384),
    draft_vocab=32000,
    trained=(8, 256, 4),
    tree=(16, 6),
    slots=8,
)
_TINY_SHAPE = llama(vocab=256, hidden=64, inner=128, layers=1, heads=4, groups=2, size=16)
_TINY = Sizes(
    target=_TINY_SHAPE,
    draft=_TINY_SHAPE,
    large=dataclasses.replace(_TINY_SHAPE, qk_norm=True, tie_word_embeddings=False),
    dtype=jnp.bfloat16,
    width=8,
    new_tokens=64,
    lengths=(8, 56),
    repeats=2,
    few=(3, 12),
    few_repeats=1,
    batches=(2,),
    contexts=(16, 32),
    draft_vocab=64,
    trained=(2, 16, 1),
    tree=(4, 2),
    slots=1,
)


def sizes(rehearse: bool) -> Sizes:
    """Return the sizes for the drill, or for its rehearsal."""
    return _TINY if rehearse else _REAL
