"""The parts of a Llama other than attention: projections, norm and gated MLP. Norms are computed in float32."""

import functools
import math
from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from convert.config import LlamaConfig
from jspec.models.kernels import dispatch as choice
from jspec.models.packed import PackedMatrix, multiply, select, take, widen

Module = TypeVar("Module", bound=nnx.Module)


def einsum(formula: str, a: Array, b: Array, dtype: DTypeLike | None = None) -> Array:
    """Run `jnp.einsum` with a result of `dtype`, at full float32 precision (not the default on GPUs and TPUs)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=dtype)


def _project(weight: Array, scale: nnx.Param[Array] | Array | None, x: Array, dtype: DTypeLike | None = None) -> Array:
    """Return the product ``[B, S, out]`` of ``x[B, S, in]`` and ``weight[in, out]``, in `dtype` or the dtype of x.

    An int8 weight has a ``scale[out]``. The scale multiplies the product and not the weight, so that XLA can read int8
    in the product itself. The product is float32 until it is scaled, because an unscaled sum can overflow float16.

    Float32 weights are stored as ``[in, out]`` and are the first operand of the product. XLA's CPU kernels then read
    them at almost full memory bandwidth, for one row or a few rows. In half precision, CPUs do not support that order.
    On other devices, the order does not matter.
    """
    if scale is not None:
        product = _project(weight.astype(x.dtype), None, x, jnp.float32)
        return (product * lax.broadcast_to_rank(scale[...], product.ndim)).astype(dtype or x.dtype)
    product = functools.partial(_product, dtype=dtype)
    if math.prod(x.shape[:-1]) != 1:
        return product(weight, x)
    of_two = functools.partial(_of_two_rows, product)
    if weight.dtype == jnp.bfloat16:
        return of_two(weight, x)
    return cast(Array, lax.platform_dependent(weight, x, cuda=of_two, default=product))


def _product(weight: Array, x: Array, dtype: DTypeLike | None) -> Array:
    if weight.dtype == jnp.float32:
        rows = einsum("io,ri->or", weight, x.reshape(-1, x.shape[-1]), dtype)
        return rows.T.reshape(*x.shape[:-1], -1)
    product = functools.partial(einsum, "bsi,io->bso", dtype=dtype)
    if weight.dtype == x.dtype == jnp.bfloat16:
        return cast(
            Array, lax.platform_dependent(x, weight, cpu=functools.partial(_product_of_halves, dtype), default=product)
        )
    return product(x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product_of_halves(dtype: DTypeLike | None, x: Array, weight: Array) -> Array:
    """Multiply bfloat16 arrays; XLA's CPU kernels support only a float32 result."""
    return einsum("bsi,io->bso", x, weight, jnp.float32).astype(dtype or x.dtype)


def _gradients_of_halves(dtype: DTypeLike | None, known: tuple[Array, Array], given: Array) -> tuple[Array, Array]:
    """Compute the gradients as bfloat16 products. By default, they would be float32 products."""
    x, weight = known
    given = given.astype(x.dtype)
    of_x = einsum("bso,io->bsi", given, weight, jnp.float32)
    of_weight = einsum("bsi,bso->io", x, given, jnp.float32)
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


def _halves_and_product(dtype: DTypeLike | None, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product_of_halves(dtype, x, weight), (x, weight)


_product_of_halves.defvjp(_halves_and_product, _gradients_of_halves)


def _of_two_rows(product: Callable[[Array, Array], Array], weight: Array, x: Array) -> Array:
    """Return ``product(weight, x)`` for an x with one row, computed with a second row of zeros.

    On GPUs, XLA turns a single-row product into a sum over a matrix, which it may first write to memory. That matrix is
    the product of a small weight and the row, or a whole output head in float32. On CPUs, that sum is slower in
    bfloat16.
    """
    return product(weight, jnp.pad(x, ((0, 0), (0, 1), (0, 0))))[:, :1]


class Linear(nnx.Module):
    """A linear layer ``y = x W + b``, with W stored as ``[in, out]``, the transpose of Hugging Face's layout.

    Fused projections are stored side by side. `scale` is the scale of an int8 weight, ``float32[out]``. See
    `jspec.models.quantize`. If `packed` is not None, its matrices hold consecutive outputs, and there is no
    `weight`.
    """

    def __init__(self, in_size: int, out_size: int, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(_normal(rngs, (in_size, out_size), dtype))
        self.scale: nnx.Param[Array] | None = None
        self.packed: nnx.List[PackedMatrix] | None = None
        self.bias = nnx.Param(jnp.zeros(out_size, dtype)) if bias else None

    def __call__(self, x: Array) -> Array:
        if self.packed is None:
            y = _project(self.weight[...], self.scale, x)
        else:
            y = multiply(self.packed, x).astype(x.dtype)
        return y if self.bias is None else y + lax.broadcast_to_rank(self.bias[...], y.ndim)


class Embed(nnx.Module):
    """A token embedding, an output head, or both if the two are tied.

    The weight is stored as ``[E, V]``, the layout that suits the head, which reads the whole weight at every pass.
    Looking up a few columns costs little in comparison. `scale` is the scale of an int8 weight, ``float32[V]``. See
    `jspec.models.quantize`. If `packed` is not None, its matrices hold consecutive tokens, and there is no
    `weight`.
    """

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(_normal(rngs, (hidden_size, vocab_size), dtype))
        self.scale: nnx.Param[Array] | None = None
        self.packed: nnx.List[PackedMatrix] | None = None

    def __call__(self, tokens: Array) -> Array:
        """Return the embeddings ``[B, S, E]`` of `tokens`, in float32 if the weight is int8 or packed."""
        if self.packed is not None:
            return take(self.packed, tokens)
        columns = jnp.moveaxis(jnp.take(self.weight[...], tokens, axis=1, mode="clip"), 0, -1)
        if self.scale is None:
            return columns
        return columns.astype(jnp.float32) * jnp.take(self.scale[...], tokens, mode="clip")[..., None]

    def wide(self, tokens: ArrayLike | None = None) -> Array:
        """Return the weight as ``float32[E, V]``, or as ``float32[E, D]`` for ``tokens[D]``, from any stored form."""
        if self.packed is not None:
            return (widen(self.packed) if tokens is None else take(self.packed, tokens)).T
        weight, scale = self._of(tokens)
        return weight.astype(jnp.float32) if scale is None else weight.astype(jnp.float32) * scale

    def _of(self, tokens: ArrayLike | None) -> tuple[Array, Array | None]:
        """Return the weight and scale for all tokens, or only for `tokens` if given."""
        parts = self.weight[...], None if self.scale is None else self.scale[...]
        if tokens is None:
            return parts
        return jnp.take(parts[0], tokens, axis=1), None if parts[1] is None else jnp.take(parts[1], tokens)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the matrix."""
        return self.weight.shape[1] if self.packed is None else sum(part.out_size for part in self.packed)

    def select(self, tokens: ArrayLike) -> "Embed":
        """Return an output head for only the distinct ``tokens[D]``, stored in the same format as this matrix."""
        head = copy_tree(self)
        if self.packed is not None:
            head.packed = nnx.data(nnx.List(select(self.packed, tokens)))
            return head
        weight, scale = self._of(tokens)
        head.weight.set_value(weight)
        if head.scale is not None and scale is not None:
            head.scale.set_value(scale)
        return head

    def logits(self, x: Array, tokens: ArrayLike | None = None) -> Array:
        """Return logits ``float32[B, S, V]`` for hidden states ``[B, S, E]``; ``[B, S, D]`` for ``tokens[D]``."""
        if self.packed is not None:
            return multiply(self.packed if tokens is None else select(self.packed, tokens), x)
        return _project(*self._of(tokens), x, jnp.float32)


class RMSNorm(nnx.Module):
    """A root mean square norm, computed in float32.

    The normalised value is rounded to the dtype of x before it is multiplied by the weight, as in transformers.
    `nnx.RMSNorm` rounds after the multiplication.
    """

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return _rms_norm(x, self.weight[...], self.eps)


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return lax.broadcast_to_rank(weight, x.ndim) * wide.astype(x.dtype)


class MLP(nnx.Module):
    """A SwiGLU feed-forward block. A call returns the input of `down_proj`. Gate and up share one matrix."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias, dtype, rngs)
        self.down_proj = Linear(inner, hidden, bias, dtype, rngs)

    def __call__(self, x: Array) -> Array:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return jax.nn.silu(gate) * up


def add_and_norm(x: Array, inner: Array, linear: Linear, norm: RMSNorm | None) -> tuple[Array, Array]:
    """Return x plus a block's output ``linear(inner)``, and that sum's norm (the sum itself if `norm` is None)."""
    if norm is None:
        x = x + linear(inner)
        return x, x
    if linear.packed is None and linear.scale is None and linear.bias is None:
        weights = linear.weight[...], norm.weight[...]
        return choice.project_add_norm(_project_add_norm, x, inner, *weights, norm.eps)
    x = x + linear(inner)
    return x, norm(x)


def _project_add_norm(x: Array, inner: Array, weight: Array, gamma: Array, eps: float) -> tuple[Array, Array]:
    """Compute the same as `jspec.models.kernels.add_norm.project_add_norm`, for any shape and dtype."""
    x = x + _project(weight, None, inner)
    return x, _rms_norm(x, gamma, eps)


def copy_tree(module: Module) -> Module:
    """Return a copy of `module` that shares its arrays, so that attributes of the copy can be replaced."""

    def same(leaf: Array) -> Array:
        return leaf

    return cast(Module, jax.tree.map(same, module))


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Return random weights with the standard deviation of Llama's initial weights."""
    return (0.02 * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
