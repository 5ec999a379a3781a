"""Grouped-query attention over a fixed-shape KV cache, limited to the part that has been written."""

import functools
import math
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from convert.config import LlamaConfig
from jspec.core.tree import Branches
from jspec.core.types import pytree
from jspec.models.fused_projection import split_outputs
from jspec.models.kernels import AttentionForm, dispatch
from jspec.models.kernels.cpu.masked_attention import MaskedCache
from jspec.models.kv_cache import own_rows, visible, visible_branches, write
from jspec.models.layers import Linear, RMSNorm, rms_norm
from jspec.models.products import einsum
from jspec.models.rope import rotate

_LEAST = 256  # slots; reading fewer slots would save less time than the choice takes

Past = tuple[Array, Array, Array | None, Array]


@pytree
class AttentionContext:
    """What the tokens of one pass attend to in one layer, and where they are stored.

    Attributes:
        keys: ``[B, G, D, T]``, this layer's part of the cache.
        values: ``[B, G, T, D]``, this layer's part of the cache.
        slots: ``int32[B, S]``, consecutive in each row. Numbering starts with the slots of `past`, if any.
        tables: from `jspec.models.rope.rope_tables`.
        past: a read-only cache whose positions come before those of `keys` and `values`: its keys, values and rows,
            and ``int32[B]``, the number of its slots in use.
        branches: the tree structure of the tokens, if they are not a simple sequence.
        cache_rows: the batch's rows in `keys` and `values`. See `jspec.models.kv_cache.KVCache`.
        window: the number of positions that a token attends to, ending at its own; None for all. `past` has no window.
    """

    keys: Array
    values: Array
    slots: Array
    tables: tuple[Array, Array]
    past: Past | None = None
    branches: Branches | None = None
    cache_rows: Array | None = None
    window: int | None = None


def whole_block(size: int) -> Branches:
    """Return the structure of consecutive tokens that all attend to each other."""
    return Branches(np.arange(size), np.ones((size, size), bool))


def is_whole(branches: Branches) -> bool:
    """Return whether `branches` is known to be a `whole_block` when the program is traced."""
    return isinstance(branches.visible, np.ndarray) and branches.read == 0 and bool(branches.visible.all())


class Attention(nnx.Module):
    """Grouped-query attention over a preallocated KV cache. The q, k and v projections share one matrix."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.sizes = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        heads, groups, size = self.sizes
        bias = config.attention_bias
        self.qkv_proj = Linear(config.hidden_size, (heads + 2 * groups) * size, bias or config.qkv_bias, dtype, rngs)
        self.q_norm = RMSNorm(size, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.o_proj = Linear(heads * size, config.hidden_size, bias, dtype, rngs)

    def __call__(self, x: Array, context: AttentionContext) -> tuple[Array, Array, Array]:
        """Write this pass's keys and values, then attend.

        Args:
            x: ``[B, R, E]``. Rows beyond S are padding, and their results are arbitrary.
            context: the cache, and the tokens' places in it.

        Returns:
            The input of `o_proj`, ``[B, R, H D]``, and the updated keys and values.
        """
        qkv = self.qkv_proj(x)
        branches, inputs = context.branches, (qkv, context.tables, context.keys, context.values, context.slots)
        whole = branches is not None and is_whole(branches)
        others = context.past, context.cache_rows, context.window
        is_sharded = self.qkv_proj.num_shards > 1
        if is_sharded or any(part is not None for part in others) or not (branches is None or whole):
            return _write_and_attend(*self.split(qkv), context)  # the kernel supports none of these
        if self.q_norm is None or self.k_norm is None:
            return dispatch.attention(_attend_projected, *inputs, AttentionForm(*self.sizes, causal=not whole))
        form = AttentionForm(*self.sizes, self.q_norm.eps, not whole)
        return dispatch.attention(_attend_normed, *inputs, form, (self.q_norm.weight[...], self.k_norm.weight[...]))

    def store(self, x: Array, context: AttentionContext) -> tuple[Array, Array]:
        """Write keys and values without attending. Return the updated keys and values.

        Args:
            x: ``[B, S, E]``, the inputs of the projections.
            context: the cache, and the inputs' places in it.
        """
        return _write(*self.keys_and_values(x), context.slots[:, 0], context)

    def keys_and_values(self, x: Array) -> tuple[Array, Array]:
        """Return the unrotated keys and the values ``[B, G, S, D]`` of ``x[B, S, E]``, without computing queries."""
        heads, groups, size = self.sizes
        if self.qkv_proj.num_shards > 1:
            _, k, v = _split(self.qkv_proj(x), self.sizes, self.qkv_proj.num_shards)
        else:
            _, k, v = _split(self.qkv_proj.outputs_from(x, heads * size), (0, groups, size))
        return k if self.k_norm is None else self.k_norm(k), v

    def split(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Return unrotated queries ``[B, H, R, D]``, keys and values ``[B, G, R, D]`` from `qkv_proj`'s output."""
        q, k, v = _split(qkv, self.sizes, self.qkv_proj.num_shards)
        return (q, k, v) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k), v)


def _split(qkv: Array, sizes: tuple[int, int, int], num_shards: int = 1) -> list[Array]:
    """Return queries ``[B, H, R, D]``, keys and values ``[B, G, R, D]`` from ``[B, R, (H + 2 G) D]``."""
    heads, groups, size = sizes
    if num_shards > 1:
        parts = split_outputs(qkv, (heads * size, groups * size, groups * size), num_shards)
        return [part.reshape(*qkv.shape[:2], -1, size).swapaxes(1, 2) for part in parts]
    qkv = qkv.reshape(*qkv.shape[:2], heads + 2 * groups, size).swapaxes(1, 2)
    return jnp.split(qkv, (heads, heads + groups), axis=1)


def _attend_projected(
    qkv: Array,
    tables: tuple[Array, Array],
    keys: Array,
    values: Array,
    slots: Array,
    form: AttentionForm | tuple[int, int, int],
) -> tuple[Array, Array, Array]:
    """Compute the same as `jspec.models.kernels.decode_attention.decode_attention`, for any shape and dtype."""
    form = AttentionForm.of(form)
    branches = None if form.causal else whole_block(slots.shape[1])
    q, k, v = _split(qkv, (form.heads, form.groups, form.size))
    return _write_and_attend(q, k, v, AttentionContext(keys, values, slots, tables, branches=branches))


def _attend_normed(
    qkv: Array,
    tables: tuple[Array, Array],
    keys: Array,
    values: Array,
    slots: Array,
    *norms: Array,
    form: AttentionForm,
) -> tuple[Array, Array, Array]:
    """Compute the same as `_attend_projected` from queries and keys that are normed first."""
    q, k, v = _split(qkv, (form.heads, form.groups, form.size))
    q, k = (rms_norm(part, weight, form.eps) for part, weight in zip((q, k), norms, strict=True))
    branches = None if form.causal else whole_block(slots.shape[1])
    return _write_and_attend(q, k, v, AttentionContext(keys, values, slots, tables, branches=branches))


def _write_and_attend(q: Array, k: Array, v: Array, context: AttentionContext) -> tuple[Array, Array, Array]:
    """Run the part of `Attention` between its projections: from ``[B, heads, R, D]`` to the results of `Attention`."""
    slots, tables, past, cache_rows = context.slots, context.tables, context.past, context.cache_rows
    (batch, tokens), rows = slots.shape, q.shape[2]
    q, k, v = (part[:, :, :tokens] for part in (q, k, v))
    slots = slots if past is None else slots - past[3][:, None]
    keys, values = _write(k, v, slots[:, 0], context)
    mask = _mask(slots, context.branches, keys.shape[3])
    if context.window is not None:
        mask &= ~visible(slots - context.window, keys.shape[3])
    caches, last = [MaskedCache(keys, values, cache_rows, mask)], slots
    if past is not None:
        last, size = past[3][:, None] - 1, past[0].shape[3]
        seen = jnp.broadcast_to(visible(last, size), (batch, tokens, size))
        caches.insert(0, MaskedCache(*past[:3], seen))
    attended = dispatch.masked_attention(_attend_filled, rotate(q, tables), caches, last)
    mixed = attended.swapaxes(1, 2).reshape(batch, tokens, -1)
    return jnp.pad(mixed, ((0, 0), (0, rows - tokens), (0, 0))), keys, values


def _write(k: Array, v: Array, start: Array, context: AttentionContext) -> tuple[Array, Array]:
    """Write unrotated keys and values ``[B, G, S, D]`` from slot ``start[b]`` on. Return the updated caches."""
    # A token whose value is not finite must affect only the queries that see it, but 0 * NaN is NaN. So the NaN is
    # stored in its key, where the mask removes it.
    finite = jnp.isfinite(v)
    k = jnp.where(finite, rotate(k, context.tables), jnp.nan)
    keys = write(context.keys, k.swapaxes(2, 3), start, 3, context.cache_rows)
    return keys, write(context.values, jnp.where(finite, v, 0), start, 2, context.cache_rows)


def _mask(slots: Array, branches: Branches | None, num_slots: int) -> Array:
    """Return ``bool[B, S, T]``, the slots that a query at ``slots[B, S]`` sees."""
    if branches is None:
        return visible(slots, num_slots)
    return visible_branches(slots[:, 0] - branches.read, branches, num_slots)


def _attend_filled(q: Array, caches: Sequence[MaskedCache], last: Array) -> tuple[Array]:
    """Run `_attend` for queries that see no slots of the first cache after their `last` slot.

    CPUs read the shortest sufficient prefix of the slots. Each candidate length is about twice the previous length.
    GPUs read all slots, because choosing a length would make them wait for the host.
    """
    lengths = _prefixes(caches[0].keys.shape[3])
    if len(lengths) == 1:
        return (_attend(q, caches),)

    def of_prefix(length: int, q: Array, caches: Sequence[MaskedCache]) -> Array:
        (keys, values, rows, mask), *others = caches
        return _attend(q, [MaskedCache(keys[..., :length], values[:, :, :length], rows, mask[..., :length]), *others])

    def chosen(q: Array, caches: Sequence[MaskedCache], last: Array) -> Array:
        which = jnp.searchsorted(np.array(lengths[:-1]), jnp.max(last) + 1)
        return cast(Array, lax.switch(which, [functools.partial(of_prefix, length) for length in lengths], q, caches))

    def whole(q: Array, caches: Sequence[MaskedCache], _: Array) -> Array:
        return _attend(q, caches)

    return (cast(Array, lax.platform_dependent(q, caches, last, cpu=chosen, default=whole)),)


def _prefixes(slots: int) -> list[int]:
    """Return the candidate prefix lengths in ascending order. The last one is `slots`."""
    lengths = [_LEAST]
    while lengths[-1] * 3 < slots * 2:  # a length close to `slots` is left out
        lengths.append(lengths[-1] * 2)
    return [*lengths[:-1], slots]


def _attend(q: Array, caches: Sequence[MaskedCache]) -> Array:
    """Return the softmax attention ``[B, H, S, D]`` of ``q[B, H, S, D]`` over the visible slots of all caches."""
    batch, heads, steps, size = q.shape
    groups = caches[0].keys.shape[1]
    q = q.reshape(batch, groups, heads // groups, steps, size)

    def score(keys: Array, mask: Array) -> Array:
        scores = einsum("bgrsd,bgdt->bgrst", q, keys, jnp.float32) / math.sqrt(size)
        return jnp.where(mask[:, None, None], scores, cast(float, jnp.finfo(jnp.float32).min))

    scores = [score(own_rows(cache.keys, cache.rows), cache.mask) for cache in caches]
    ends = np.cumsum([part.shape[-1] for part in scores])
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q.dtype)
    # Keep float32 until the sum. XLA's CPU kernels also support only a float32 result. See `jspec.models.products`.
    mixed = [
        einsum("bgrst,bgtd->bgrsd", weight, own_rows(cache.values, cache.rows), jnp.float32)
        for weight, cache in zip(jnp.split(weights, ends[:-1], axis=-1), caches, strict=True)
    ]
    return sum(mixed[1:], mixed[0]).astype(q.dtype).reshape(batch, heads, steps, size)
