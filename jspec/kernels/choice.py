"""Which programs get a kernel: only where one is lowered is it known for what platform and for how many devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jspec.kernels import HEAD_SIZES, MAX_ROWS, MAX_TOKENS
from jspec.sharding import vary_like


def attention(
    otherwise: Callable[..., tuple[Array, Array, Array]],
    qkv: Array,
    tables: tuple[Array, Array],
    keys: Array,
    values: Array,
    positions: Array,
    sizes: tuple[int, int, int],
) -> tuple[Array, Array, Array]:
    """`jspec.kernels.attention.decode_attention` where it can run; elsewhere `otherwise`, and a program as without it.

    It runs in bfloat16, on one NVIDIA GPU of the Ampere generation or later. XLA cannot divide a kernel, and would
    gather the caches on each of several devices; under `jax.shard_map` there is nothing to divide. `jax.vmap` and
    derivatives have `otherwise` everywhere.

    Args:
        otherwise: does the same with arguments of any shape and dtype; programs are told apart by it.
    """
    arguments = qkv, *tables, keys, values, positions
    arguments = vary_like(arguments, arguments)  # as a new cache will once it is written
    if not _suits(qkv, keys, sizes):
        return _elsewhere(*arguments, otherwise=otherwise, sizes=sizes)
    return tuple(_attention_p.bind(*arguments, otherwise=otherwise, sizes=sizes))


def _suits(qkv: Array, keys: Array, sizes: tuple[int, int, int]) -> bool:
    """Whether the kernel is made for such arguments."""
    heads, groups, size = sizes
    steps, rows = qkv.shape[1], qkv.shape[1] * heads // groups
    small = steps <= MAX_TOKENS and rows <= MAX_ROWS and size in HEAD_SIZES
    return small and qkv.dtype == keys.dtype == jnp.bfloat16


def _elsewhere(qkv: Any, cos: Any, sin: Any, *others: Any, otherwise: Callable, sizes: Any) -> Any:
    return otherwise(qkv, (cos, sin), *others, sizes)


def _on_gpu(qkv: Any, cos: Any, sin: Any, *others: Any, otherwise: Callable, sizes: Any) -> Any:
    from jspec.kernels.attention import decode_attention

    keys, values, positions = others
    return decode_attention(qkv, (cos, sin), keys, values, positions, sizes)


def _lower_for_cuda(context: mlir.LoweringRuleContext, *arguments: Any, **options: Any) -> Any:
    alone = _on_one_device(context.module_context.axis_context)
    return mlir.lower_fun(_on_gpu if alone and _has_triton() else _elsewhere)(context, *arguments, **options)


def _on_one_device(axes: Any) -> bool:
    """Whether XLA divides nothing of what is lowered."""
    if isinstance(axes, mlir.SPMDAxisContext):  # jax.shard_map
        return axes.manual_axes == frozenset(axes.mesh.axis_names)
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


def _has_triton() -> bool:
    """Whether XLA has it for the GPUs that are here; if none is, the program is for others."""
    try:
        found = jax.local_devices(backend="cuda")
    except RuntimeError:
        return True
    return all(float(device.compute_capability) >= 8 for device in found)


def _results(qkv: Any, cos: Any, sin: Any, keys: Any, values: Any, *others: Any, sizes: Any, **options: Any) -> Any:
    heads, _, size = sizes
    return qkv.update(shape=(*qkv.shape[:2], heads * size)), keys, values


def _differentiate(primals: Any, tangents: Any, **options: Any) -> Any:
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(_elsewhere, **options), tuple(primals), tangents)


def _batch(arguments: Any, axes: Any, **options: Any) -> Any:
    return jax.vmap(functools.partial(_elsewhere, **options), axes)(*arguments), (0, 0, 0)


_attention_p = Primitive("attention")
_attention_p.multiple_results = True
_attention_p.def_impl(jax.jit(_attention_p.bind, static_argnames=("otherwise", "sizes")))
_attention_p.def_abstract_eval(_results)
mlir.register_lowering(_attention_p, mlir.lower_fun(_elsewhere))
mlir.register_lowering(_attention_p, _lower_for_cuda, platform="cuda")
ad.primitive_jvps[_attention_p] = _differentiate
batching.primitive_batchers[_attention_p] = _batch
