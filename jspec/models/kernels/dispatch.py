"""The choice of whether a program uses a kernel. The platform and the device count are known only at lowering."""

import contextlib
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Generator, Hashable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jspec.core.devices import is_before_ampere
from jspec.core.sharding import vary_like
from jspec.core.types import PyTree
from jspec.models.kernels import HEAD_SIZES, MAX_NORMS, MAX_QUERIES, MAX_ROWS, MAX_TOKENS, AttentionForm
from jspec.models.kernels.cpu import log_sum_exp as cpu_log_sum_exp
from jspec.models.kernels.cpu import masked_attention as cpu_attention
from jspec.models.kernels.cpu import native, product
from jspec.models.kernels.cpu.log_sum_exp import LogSumExpKernel
from jspec.models.kernels.cpu.masked_attention import AttentionKernel, MaskedCache
from jspec.models.kernels.cpu.product import ProductKernel

if TYPE_CHECKING:
    from jax.core import ShapedArray

_TRITON = "jax.experimental.pallas.triton"
Results = TypeVar("Results", bound=tuple[Array, ...])
_Options = tuple[tuple[str, object], ...]
_allow_kernels_in_exports = ContextVar("_allow_kernels_in_exports", default=False)


@contextlib.contextmanager
def allow_kernels_in_exports() -> Generator[None]:
    """Allow kernels in programs that are exported inside this context.

    By default, exported programs use no kernels, so they also run on other machines and with other versions of JAX.
    """
    token = _allow_kernels_in_exports.set(True)
    try:
        yield
    finally:
        _allow_kernels_in_exports.reset(token)


def attention(
    otherwise: Callable[..., tuple[Array, Array, Array]],
    qkv: Array,
    tables: tuple[Array, Array],
    keys: Array,
    values: Array,
    positions: Array,
    form: AttentionForm | tuple[int, int, int],
    norms: tuple[Array, ...] = (),
) -> tuple[Array, Array, Array]:
    """Run `decode_attention` if it supports the arguments and platform, else `otherwise`. See `_choose`.

    Args:
        norms: the weights of the norms of queries and keys, if there are any.
    """
    form = AttentionForm.of(form)
    heads, groups, size, *_ = form
    rows = qkv.shape[1] * heads // groups
    small = positions.shape[1] <= MAX_TOKENS and rows <= MAX_ROWS and size in HEAD_SIZES
    suits = small and all(array.dtype == jnp.bfloat16 for array in (qkv, keys, *norms))
    inputs = qkv, tables, keys, values, positions, *norms
    return _choose(_attention_p, suits, otherwise, inputs, form=form)


def project_add_norm(
    otherwise: Callable[..., tuple[Array, Array]], x: Array, inner: Array, weight: Array, gamma: Array, eps: float
) -> tuple[Array, Array]:
    """Run `jspec.models.kernels.add_norm.project_add_norm` if possible, else `otherwise`. See `_choose`."""
    suits = (
        math.prod(x.shape[:-1]) <= MAX_NORMS and x.dtype == inner.dtype == weight.dtype == gamma.dtype == jnp.bfloat16
    )
    return _choose(_norm_p, suits, otherwise, (x, inner, weight, gamma), eps=eps)


def masked_attention(
    otherwise: Callable[..., tuple[Array]], q: Array, caches: Sequence[MaskedCache], last: Array
) -> Array:
    """Return the softmax attention ``[B, H, S, D]`` of ``q[B, H, S, D]`` over the visible slots. See `_choose`.

    Args:
        last: ``int32[B, S]`` or ``int32[B, 1]``, the last slot of the first cache that each query may see.
    """
    shares_keys = q.shape[1] > caches[0].keys.shape[1]
    suits = all(array.dtype == jnp.float32 for cache in caches for array in (q, cache.keys, cache.values))
    suits = suits and (shares_keys or q.shape[2] <= MAX_QUERIES)
    return _choose(_masked_attention_p, suits, otherwise, (q, tuple(caches), last))[0]


def packed_product(
    otherwise: Callable[..., tuple[Array]], x: Array, tiles: Array, kernel: ProductKernel, out_size: int
) -> Array:
    """Return the product of ``x[M, in]`` and a `jspec.models.packed.PackedMatrix`. See `_choose`."""
    return _choose(_product_p, True, otherwise, (x, tiles), kernel=kernel, out_size=out_size)[0]


def log_sum_exp(otherwise: Callable[..., tuple[Array, Array]], x: Array) -> tuple[Array, Array]:
    """Return ``max(x)`` and ``log(sum(exp(x - max(x))))`` of each row of ``x``, ``float32[N, V]``. See `_choose`."""
    return _choose(_log_sum_exp_p, True, otherwise, (x,))


def _choose(
    primitive: Primitive,
    suits: bool,
    otherwise: Callable[..., Results],
    arguments: tuple[PyTree, ...],
    **options: object,
) -> Results:
    """Run the kernel of `primitive` if `suits` is true and the program runs on one device that supports the kernel.

    Kernels for GPUs need an NVIDIA GPU of the Ampere generation or later, and Pallas' Triton backend, which has been
    deprecated since JAX 0.11. ``JSPEC_KERNELS=0`` in the environment turns off the kernels for GPUs. Kernels for CPUs
    need a C++ compiler (`jspec.models.kernels.cpu.native`). XLA cannot divide a kernel. With several devices, XLA would
    gather caches and weights on each device. Under `jax.shard_map` there is nothing to divide. Derivatives,
    `jax.vmap` and exported programs use `otherwise`, with two exceptions. `jax.vmap` over the rows of a packed product
    uses the kernel. Inside `allow_kernels_in_exports`, exported programs use kernels.

    Args:
        suits: whether the kernel supports the shapes and dtypes of the arguments.
        otherwise: a function that does the same for any shape and dtype. Different functions lead to different
            programs.
    """
    arguments = vary_like(arguments, arguments)  # a new cache would otherwise vary only after the first write
    if not suits:
        return otherwise(*arguments, **options)
    leaves, tree = cast(tuple[list[Array], Hashable], jax.tree.flatten(arguments))
    results = cast(list[Array], primitive.bind(*leaves, otherwise=otherwise, tree=tree, options=tuple(options.items())))
    return cast(Results, tuple(results))


def _elsewhere(*leaves: Array, otherwise: Callable[..., Results], tree: Hashable, options: _Options) -> Results:
    return otherwise(*jax.tree.unflatten(tree, leaves), **dict(options))


def _attend_on_gpu(
    qkv: Array,
    tables: tuple[Array, Array],
    keys: Array,
    values: Array,
    positions: Array,
    *norms: Array,
    form: AttentionForm,
) -> tuple[Array, Array, Array]:
    from jspec.models.kernels.decode_attention import decode_attention

    with jax.enable_x64(False):  # a kernel keeps the types that it was written for
        return decode_attention(qkv, tables, keys, values, positions, form, cast("tuple[Array, Array]", norms) or None)


def _norm_on_gpu(*arguments: Array, eps: float) -> tuple[Array, Array]:
    from jspec.models.kernels import add_norm as norm

    with jax.enable_x64(False):
        return norm.project_add_norm(*arguments, eps=eps)


def _attend_on_cpu(q: Array, caches: Sequence[MaskedCache], last: Array) -> tuple[Array]:
    return (cpu_attention.attend(q, caches),)


def _multiply_on_cpu(x: Array, tiles: Array, *, kernel: ProductKernel, out_size: int) -> tuple[Array]:
    return (product.multiply(kernel, x, tiles, out_size),)


def _primitive(
    name: str,
    platform: str,
    kernel: Callable[..., tuple[Array, ...]],
    is_available: Callable[..., bool],
    results: Callable[..., "tuple[ShapedArray, ...]"],
) -> Primitive:
    """Return a primitive with two implementations.

    Args:
        platform: the platform of `kernel`, "cuda" or "cpu".
        kernel: the implementation for that platform, with the same arguments as `otherwise`.
        is_available: a function that takes the options and returns whether the kernel can run on this machine.
        results: a function from the types of the flat arguments to the types of the results.
    """

    def lower(
        context: mlir.LoweringRuleContext,
        *leaves: object,
        otherwise: Callable[..., tuple[Array, ...]],
        options: _Options,
        **others: object,
    ) -> object:
        module = context.module_context
        suits = _allow_kernels_in_exports.get() or not module.lowering_parameters.for_export
        suits = suits and _on_one_device(module.axis_context)
        form = kernel if suits and is_available(**dict(options)) else otherwise
        return cast(object, mlir.lower_fun(_elsewhere)(context, *leaves, otherwise=form, options=options, **others))

    def types_of_results(*types: "ShapedArray", options: _Options, **_: object) -> "tuple[ShapedArray, ...]":
        return results(*types, **dict(options))

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(_elsewhere)  # outside `jax.jit`
    primitive.def_abstract_eval(types_of_results)
    mlir.register_lowering(primitive, mlir.lower_fun(_elsewhere))
    mlir.register_lowering(primitive, cast("mlir.LoweringRule", lower), platform=platform)
    ad.primitive_jvps[primitive] = _differentiate
    batching.primitive_batchers[primitive] = _batch
    return primitive


def _is_triton_available(**_: object) -> bool:
    wanted = not is_before_ampere() and os.environ.get("JSPEC_KERNELS") != "0"
    return wanted and importlib.util.find_spec(_TRITON) is not None


def _is_native_attention_available() -> bool:
    return native.register(AttentionKernel())


def _is_native_log_sum_exp_available() -> bool:
    return native.register(LogSumExpKernel())


def _is_native_product_available(kernel: ProductKernel, out_size: int) -> bool:
    return native.register(kernel)


def _on_one_device(axes: object) -> bool:
    """Return whether XLA leaves the lowered program whole instead of partitioning it across devices."""
    if isinstance(axes, mlir.SPMDAxisContext):  # jax.shard_map
        return axes.manual_axes == frozenset(axes.mesh.axis_names)
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


def _differentiate(
    primals: Sequence[Array], tangents: "Sequence[Array | ad.Zero]", **options: object
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    tangents = tuple(map(cast("Callable[[Array | ad.Zero], Array]", ad.instantiate_zeros), tangents))
    return jax.jvp(functools.partial(_elsewhere, **options), tuple(primals), tangents)


def _batch(
    arguments: Sequence[Array], axes: Sequence[int | None], **options: object
) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    found = jax.vmap(functools.partial(_elsewhere, **options), axes)(*arguments)
    return found, (0,) * len(found)


def _batch_product(
    arguments: Sequence[Array], axes: Sequence[int | None], **options: object
) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    """Multiply all rows of a batch by one packed matrix in a single product, so that the matrix is not widened."""
    x, tiles = arguments
    if axes[0] is None or axes[1] is not None:
        return _batch(arguments, axes, **options)
    x = jnp.moveaxis(x, axes[0], 0)
    (product,) = cast(list[Array], _product_p.bind(x.reshape(-1, x.shape[-1]), tiles, **options))
    return (product.reshape(*x.shape[:-1], -1),), (0,)


def _attended(
    qkv: "ShapedArray",
    cos: "ShapedArray",
    sin: "ShapedArray",
    keys: "ShapedArray",
    values: "ShapedArray",
    *others: "ShapedArray",
    form: AttentionForm,
) -> "tuple[ShapedArray, ...]":
    return qkv.update(shape=(*qkv.shape[:2], form.heads * form.size)), keys, values


def _normed(
    x: "ShapedArray", inner: "ShapedArray", weight: "ShapedArray", gamma: "ShapedArray", *, eps: float
) -> "tuple[ShapedArray, ...]":
    return x, x


def _masked_attended(q: "ShapedArray", *_: "ShapedArray") -> "tuple[ShapedArray, ...]":
    return (q,)


def _multiplied(
    x: "ShapedArray", tiles: "ShapedArray", *, kernel: ProductKernel, out_size: int
) -> "tuple[ShapedArray, ...]":
    return (x.update(shape=(x.shape[0], out_size)),)


def _summed(x: "ShapedArray") -> "tuple[ShapedArray, ...]":
    return x.update(shape=x.shape[:1]), x.update(shape=x.shape[:1])


_attention_p = _primitive("attention", "cuda", _attend_on_gpu, _is_triton_available, _attended)
_norm_p = _primitive("project_add_norm", "cuda", _norm_on_gpu, _is_triton_available, _normed)
_masked_attention_p = _primitive(
    "masked_attention", "cpu", _attend_on_cpu, _is_native_attention_available, _masked_attended
)
_log_sum_exp_p = _primitive(
    "log_sum_exp", "cpu", cpu_log_sum_exp.log_sum_exp, _is_native_log_sum_exp_available, _summed
)
_product_p = _primitive("packed_product", "cpu", _multiply_on_cpu, _is_native_product_available, _multiplied)
batching.primitive_batchers[_product_p] = _batch_product
