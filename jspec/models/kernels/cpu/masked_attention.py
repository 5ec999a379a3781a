"""Native attention over KV caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec.models.kernels.cpu.native import Kernel


class VisibleCache(NamedTuple):
    """One layer of a KV cache, and the slots that queries see.

    Attributes:
        keys: ``[C, G, D, T]``.
        values: ``[C, G, T, D]``.
        rows: ``int32[B]``, the batch's rows. None if all rows belong to the batch. See `jspec.models.kv_cache.KVCache`.
        mask: ``bool[B, S, T]``, the visible slots.
    """

    keys: Array
    values: Array
    rows: Array | None
    mask: Array


@dataclass(frozen=True)
class AttentionKernel(Kernel):
    """The native kernel for attention in float32."""

    source: ClassVar[str] = "masked_attention"

    @property
    def name(self) -> str:
        return "float32"


def attend(q: Array, caches: Sequence[VisibleCache]) -> Array:
    """Return the softmax attention of ``q``, ``float32[B, H, S, D]``, over the visible slots. For CPU programs only."""
    call = jax.ffi.ffi_call(AttentionKernel().target, jax.ShapeDtypeStruct(q.shape, q.dtype))
    inputs: list[Array] = []
    for cache in caches:
        rows = jnp.arange(q.shape[0], dtype=jnp.int32) if cache.rows is None else cache.rows
        inputs += [cache.keys, cache.values, rows, cache.mask]
    return call(q, *inputs)
