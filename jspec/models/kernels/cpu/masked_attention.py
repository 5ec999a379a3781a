"""Native attention over KV caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec.models.kernels.cpu.native import Float32Kernel


class MaskedCache(NamedTuple):
    """One layer of a KV cache, and a mask of the slots that each query sees.

    Attributes:
        keys: ``[C, G, D, T]``.
        values: ``[C, G, T, D]``.
        rows: ``int32[B]``, the cache row of each batch row. None if they are the same. See
            `jspec.models.kv_cache.KVCache`.
        mask: ``bool[B, S, T]``, the visible slots.
    """

    keys: Array
    values: Array
    rows: Array | None
    mask: Array


@dataclass(frozen=True)
class AttentionKernel(Float32Kernel):
    """The native kernel for attention in float32."""

    source: ClassVar[str] = "masked_attention"


def attend(q: Array, caches: Sequence[MaskedCache]) -> Array:
    """Return the softmax attention of ``q``, ``float32[B, H, S, D]``, over the visible slots. For CPU programs only.

    The result of a query that sees no slot is zero.
    """
    batch, heads, steps, size = q.shape
    call = jax.ffi.ffi_call(AttentionKernel().target, jax.ShapeDtypeStruct(q.shape, q.dtype))
    inputs: list[Array] = []
    for cache in caches:
        count, groups, _, slots = cache.keys.shape
        assert cache.keys.shape[2] == size and cache.values.shape == (count, groups, slots, size) and not heads % groups
        assert cache.mask.shape == (batch, steps, slots) and (cache.rows is None or cache.rows.shape == (batch,))
        rows = jnp.arange(batch, dtype=jnp.int32) if cache.rows is None else cache.rows.astype(jnp.int32)
        inputs += [cache.keys, cache.values, rows, cache.mask]
    return call(q, *inputs)
