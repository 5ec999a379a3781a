# pyright: reportUnknownArgumentType=false
"""Decode attention as one Pallas kernel for NVIDIA GPUs, from the fused projection to the output projection's input.

Kernel launches dominate the time of a layer in decoding. XLA needs about ten launches to rotate, write the cache and
attend. In this kernel, each program handles one row, one group of heads and a share of the filled slots. The program
rotates its queries and processes its share block by block. Its softmax is rescaled whenever a larger score appears
(Milakov and Gimelshein 2018). The sums of several shares are combined afterwards (flash-decoding, Dao et al. 2023). The
new tokens are read directly from the projection, and the program with the last share writes them. No program depends on
another program's writes.
"""

import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from jspec.models.kernels import MAX_TOKENS, AttentionForm, Ref

_BLOCK = 8192  # elements in a block of keys or of values; three blocks of each fit into an L4's shared memory
# The number of slots per share that makes up for the launch that combines the shares (`python -m bench gpu --step
# constants`), and the assumed number of programs that keep a GPU busy.
_SHARE = 128
_PROGRAMS = 128
_MAX_SHARES = 32
_WARPS, _STAGES = 4, 3
_LOWEST = float(jnp.finfo(jnp.float32).min)


def decode_attention(
    qkv: Array,
    tables: tuple[Array, Array],
    keys: Array,
    values: Array,
    positions: Array,
    form: AttentionForm | tuple[int, int, int],
    norms: tuple[Array, Array] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Write this pass's keys and values, then attend. The KV cache is updated in place.

    If a row's tokens do not all fit into the cache, none of them are written.

    Args:
        qkv: ``[B, R, (H + 2 G) D]``, the projection's queries, keys and values. Rows beyond S are padding.
        tables: from `jspec.models.rope.rope_tables`, ``float32[B, 1, S, D / 2]``.
        keys: ``[B, G, D, T]``.
        values: ``[B, G, T, D]``. Slots that no query sees may hold anything.
        positions: ``int32[B, S]``, consecutive in each row. S is at most 16.
        form: the sizes, the norms' constant, and whether attention among the new tokens is causal.
        norms: the weights ``[D]`` of the norms of each head's queries and keys, if they are normed before they are
            rotated (Qwen3).
        interpret: whether to interpret the kernel, which is slow but runs on any platform.

    Returns:
        ``[B, R, H D]``, in which rows beyond S are arbitrary, and the updated keys and values.
    """
    form = AttentionForm.of(form)
    heads, groups, size, *_ = form
    batch, rows, _ = qkv.shape
    shares, gammas = _num_shares(batch * groups, keys.shape[3]), () if norms is None else ("gamma", "gamma")
    spec = _specs(positions.shape[1], rows, (heads, groups, size), keys.shape[3])

    def like(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(qkv).manual_axis_type)

    results = [
        like(keys.shape, keys.dtype),
        like(values.shape, values.dtype),
        like((shares, batch, rows, heads, size), jnp.float32 if shares > 1 else qkv.dtype),
    ]
    if shares > 1:
        results += [like((shares, batch, rows, heads), jnp.float32)] * 2
    keys, values, mixed, *weights = pl.pallas_call(
        functools.partial(_kernel, form=form, shares=shares),
        grid=(batch, groups, shares),
        in_specs=[spec[name] for name in ("positions", "table", "table", "qkv", "keys", "values", *gammas)],
        out_specs=[spec["keys"], spec["values"], spec["sums"], spec["weights"], spec["weights"]][: len(results)],
        out_shape=results,
        input_output_aliases={4: 0, 5: 1},
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name="decode_attention",
    )(positions.astype(jnp.int32), *tables, qkv.reshape(batch, rows, -1, size), keys, values, *(norms or ()))
    mixed = _combine(mixed, *weights).astype(qkv.dtype) if weights else mixed
    return mixed.reshape(batch, rows, heads * size), keys, values


def _num_shares(programs: int, slots: int) -> int:
    """Return the number of shares to split `slots` into, for `programs` programs per share."""
    return max(1, min(slots // _SHARE, _PROGRAMS // max(programs, 1), _MAX_SHARES))


def _specs(steps: int, rows: int, sizes: tuple[int, int, int], slots: int) -> dict[str, pl.BlockSpec]:
    """Return the part of each array that belongs to a program."""
    heads, groups, size = sizes
    ratio = heads // groups
    return {
        "positions": pl.BlockSpec((None, steps), lambda b, g, n: (b, 0)),
        "table": pl.BlockSpec((None, None, steps, size // 2), lambda b, g, n: (b, 0, 0, 0)),
        "qkv": pl.BlockSpec((None, rows, heads + 2 * groups, size), lambda b, g, n: (b, 0, 0, 0)),
        "keys": pl.BlockSpec((None, None, size, slots), lambda b, g, n: (b, g, 0, 0)),
        "values": pl.BlockSpec((None, None, slots, size), lambda b, g, n: (b, g, 0, 0)),
        "gamma": pl.BlockSpec((size,), lambda b, g, n: (0,)),
        "sums": pl.BlockSpec((None, None, rows, ratio, size), lambda b, g, n: (n, b, 0, g, 0)),
        "weights": pl.BlockSpec((None, None, rows, ratio), lambda b, g, n: (n, b, 0, g)),
    }


def _combine(sums: Array, highest: Array, weights: Array) -> Array:
    """Combine the softmax of shares ``[N, ...]`` one by one, as one XLA kernel. Reductions would be several."""
    top = functools.reduce(jnp.maximum, list(highest))
    scales = [jnp.exp(part - top) for part in highest]
    weight = functools.reduce(jnp.add, [scale * part for scale, part in zip(scales, weights, strict=True)])
    total = functools.reduce(jnp.add, [scale[..., None] * part for scale, part in zip(scales, sums, strict=True)])
    return total / weight[..., None]


class _Sums(NamedTuple):
    """Running sums over the tiles, per query row: weights times values, the highest score, and the sum of weights."""

    total: Array
    highest: Array
    weight: Array


def _kernel(
    positions_ref: Ref,
    cos_ref: Ref,
    sin_ref: Ref,
    qkv_ref: Ref,
    keys_ref: Ref,
    values_ref: Ref,
    *rest: Ref,
    form: AttentionForm,
    shares: int,
) -> None:
    """Run one program on the array parts that `_specs` assigns to it. The results come last in `rest`."""
    heads, groups, size, eps, causal = form
    gammas, results = rest[: -(5 if shares > 1 else 3)], rest[-(5 if shares > 1 else 3) :]
    new_keys_ref, new_values_ref, sums_ref, *weight_refs = results
    q_norm, k_norm = (_Norm(gamma, eps) for gamma in gammas) if gammas else (None, None)
    steps, ratio, slots = positions_ref.shape[0], heads // groups, keys_ref.shape[1]
    group, share, start = pl.program_id(1), pl.program_id(2), positions_ref[0]
    rows = jnp.arange(max(MAX_TOKENS, pl.next_power_of_2(qkv_ref.shape[0] * ratio)))
    row_steps, row_heads, real = rows // ratio, rows % ratio, rows < steps * ratio
    tables = cos_ref, sin_ref
    rotated = _rotated(qkv_ref, tables, row_steps, group * ratio + row_heads, real, q_norm)
    q = [part.astype(qkv_ref.dtype) for part in rotated]

    filled, block = jnp.minimum(start, slots), _BLOCK // size
    num_blocks = pl.cdiv(filled, block)
    each = pl.cdiv(num_blocks, shares)
    read = functools.partial(_read, q, keys_ref, values_ref, filled, block)
    empty = _Sums(jnp.zeros((rows.size, size)), jnp.full(rows.size, _LOWEST), jnp.zeros(rows.size))
    sums = cast(_Sums, lax.fori_loop(share * each, jnp.minimum((share + 1) * each, num_blocks), read, empty))

    def finish(sums: _Sums) -> _Sums:
        """Add and write the new tokens."""
        at = jnp.arange(MAX_TOKENS)
        k, v = _new_tokens(qkv_ref, tables, steps, (heads + group, heads + groups + group), k_norm)
        _write(new_keys_ref, new_values_ref, k, v, start, (at < steps) & (start >= 0) & (start + steps <= slots))
        return _add(q, k, v, at[None, :] <= row_steps[:, None] if causal else (at < steps)[None, :], sums)

    sums = cast(_Sums, lax.cond(share == shares - 1, finish, lambda sums: sums, sums)) if shares > 1 else finish(sums)
    total = sums.total if shares > 1 else sums.total / sums.weight[:, None]
    where = row_steps[:, None], row_heads[:, None], jnp.arange(size)[None, :]
    wanted = row_steps < qkv_ref.shape[0]
    triton.store(sums_ref.at[where], total.astype(sums_ref.dtype), mask=wanted[:, None])
    for ref, part in zip(weight_refs, (sums.highest, sums.weight), strict=False):
        triton.store(ref.at[row_steps, row_heads], part, mask=wanted)


def _tokens(ref: Ref, steps: Array, heads: Array, dims: Array, real: Array) -> Array:
    """Return ``[rows, dims]`` of the projection, with zeros in rows that are not `real`."""
    return triton.load(ref.at[steps[:, None], heads[:, None], dims[None, :]], mask=real[:, None], other=0)


def _halves(ref: Ref, steps: Array, heads: Array, real: Array) -> list[Array]:
    """Return the two halves of the dimensions of `_tokens`, in float32.

    A kernel can load parts of an array, but it cannot split one.
    """
    half = ref.shape[2] // 2
    return [_tokens(ref, steps, heads, part * half + jnp.arange(half), real).astype(jnp.float32) for part in (0, 1)]


class _Norm(NamedTuple):
    """A norm of each head, as `jspec.models.layers.RMSNorm` computes it."""

    gamma: Ref
    eps: float

    def __call__(self, halves: list[Array], dtype: DTypeLike) -> list[Array]:
        half = self.gamma.shape[0] // 2
        squares = sum(jnp.sum(part * part, axis=1) for part in halves) / self.gamma.shape[0]
        scale = lax.rsqrt(squares + self.eps)[:, None]
        gammas = [self.gamma[pl.ds(part * half, half)].astype(jnp.float32)[None, :] for part in (0, 1)]
        normed = [(part * scale).astype(dtype).astype(jnp.float32) for part in halves]
        return [(g * part).astype(dtype).astype(jnp.float32) for g, part in zip(gammas, normed, strict=True)]


def _rotated(
    ref: Ref, tables: tuple[Ref, Ref], steps: Array, heads: Array, real: Array, norm: _Norm | None
) -> tuple[Array, Array]:
    """Norm heads, rotate them as `jspec.models.rope.rotate` does, and return the two halves in float32."""
    where = steps[:, None], jnp.arange(ref.shape[2] // 2)[None, :]
    cos, sin = (triton.load(table.at[where], mask=real[:, None], other=0) for table in tables)
    halves = _halves(ref, steps, heads, real)
    first, second = halves if norm is None else norm(halves, ref.dtype)
    return first * cos - second * sin, second * cos + first * sin


def _new_tokens(
    ref: Ref, tables: tuple[Ref, Ref], count: int, key_and_value_head: tuple[Array, Array], norm: _Norm | None
) -> tuple[list[Array], Array]:
    """Return this pass's keys, as two halves ``[D / 2, MAX_TOKENS]``, and values ``[MAX_TOKENS, D]``.

    A non-finite value must affect only the queries that see its token, but 0 * NaN is NaN. The NaN is therefore stored
    in the token's key, where the mask removes it.
    """
    steps = jnp.arange(MAX_TOKENS)
    real, (keys, values) = steps < count, (jnp.full_like(steps, head) for head in key_and_value_head)
    rotated, halves = _rotated(ref, tables, steps, keys, real, norm), _halves(ref, steps, values, real)
    k = [jnp.where(_finite(v), k, jnp.nan).astype(ref.dtype).T for k, v in zip(rotated, halves, strict=True)]
    v = _tokens(ref, steps, values, jnp.arange(ref.shape[2]), real)
    return k, jnp.where(_finite(v), v, 0)


def _finite(x: Array) -> Array:
    return jnp.abs(x.astype(jnp.float32)) < jnp.inf


def _write(keys_ref: Ref, values_ref: Ref, k: list[Array], v: Array, start: Array, written: Array) -> None:
    """Write the tokens marked by `written`, starting at slot `start`."""
    window, half = pl.ds(start, MAX_TOKENS), keys_ref.shape[0] // 2
    for part in (0, 1):
        triton.store(keys_ref.at[pl.ds(part * half, half), window], k[part], mask=written[None, :])
    triton.store(values_ref.at[window, :], v, mask=written[:, None])


def _read(q: list[Array], keys_ref: Ref, values_ref: Ref, filled: Array, block: int, i: Array, sums: _Sums) -> _Sums:
    """Add the i-th block of the cache. All queries see the cache's first `filled` slots.

    Keys are masked only at the end of the cache, and only if no block ends there. A mask that starts at an arbitrary
    position would make the kernel load keys one by one. That also happens if the number of slots is not a multiple of
    8. A NaN among the keys disappears when its score is masked.
    """
    size, slots = keys_ref.shape
    window, at = pl.ds(i * block, block), i * block + jnp.arange(block)
    inside: dict[str, Any] = {"mask": (at < slots)[None, :], "other": 0} if slots % block else {}
    k = [triton.load(keys_ref.at[pl.ds(start, size // 2), window], **inside) for start in (0, size // 2)]
    v = triton.load(values_ref.at[window, :], mask=(at < filled)[:, None], other=0)
    return _add(q, k, v, (at < filled)[None, :], sums)


def _add(q: list[Array], k: list[Array], v: Array, seen: Array, sums: _Sums) -> _Sums:
    """Add a tile of N tokens: `k` as halves ``[D / 2, N]``, ``v[N, D]``, and the mask of what each row sees."""
    scores = sum(jnp.dot(a, b, preferred_element_type=jnp.float32) for a, b in zip(q, k, strict=True))
    scores = jnp.where(seen, scores / math.sqrt(v.shape[1]), _LOWEST)
    highest = jnp.maximum(sums.highest, jnp.max(scores, axis=1))
    kept, weights = jnp.exp(sums.highest - highest), jnp.exp(scores - highest[:, None])
    mixed = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return _Sums(kept[:, None] * sums.total + mixed, highest, kept * sums.weight + weights.sum(axis=1))
