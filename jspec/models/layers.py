"""The parts of a Llama other than attention: projections, norm and gated MLP. Norms are computed in float32."""

from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import ArrayLike

from convert.config import LlamaConfig
from jspec.models.fused_projection import split_outputs
from jspec.models.kernels import dispatch
from jspec.models.matrix_parts import MatrixPart, multiply, select, take, widen
from jspec.models.products import project

Module = TypeVar("Module", bound=nnx.Module)


class Linear(nnx.Module):
    """A linear layer ``y = x W + b``, with W stored as ``[in, out]``, the transpose of Hugging Face's layout.

    If `parts` is not None, it holds W instead, and there is no `weight`. See `jspec.models.matrix_parts`.

    Attributes:
        num_shards: the number of shards whose columns are interleaved. See `jspec.models.fused_projection`.
    """

    def __init__(self, in_size: int, out_size: int, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(_normal(rngs, (in_size, out_size), dtype))
        self.parts: nnx.List[MatrixPart] | None = None
        self.bias = nnx.Param(jnp.zeros(out_size, dtype)) if bias else None
        self.num_shards = 1

    def __call__(self, x: Array) -> Array:
        y = project(self.weight[...], x) if self.parts is None else multiply(self.parts, x).astype(x.dtype)
        return y if self.bias is None else y + lax.broadcast_to_rank(self.bias[...], y.ndim)

    def outputs_from(self, x: Array, start: int) -> Array:
        """Return only the outputs from index `start` onward. A packed matrix is still multiplied whole."""
        if self.parts is not None:
            return self(x)[..., start:]
        y = project(self.weight[...][:, start:], x)
        return y if self.bias is None else y + lax.broadcast_to_rank(self.bias[...][start:], y.ndim)


class Embed(nnx.Module):
    """A token embedding, an output head, or both if the two are tied.

    The weight is stored as ``[E, V]``, the layout that suits the head, which reads the whole weight at every pass.
    Looking up a few columns costs little in comparison. If `parts` is not None, it holds the matrix instead, and there
    is no `weight`. See `jspec.models.matrix_parts`.
    """

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(_normal(rngs, (hidden_size, vocab_size), dtype))
        self.parts: nnx.List[MatrixPart] | None = None

    def __call__(self, tokens: Array) -> Array:
        """Return the embeddings ``[B, S, E]`` of `tokens`, in float32 if the matrix is packed or quantised."""
        if self.parts is not None:
            return take(self.parts, tokens)
        return jnp.moveaxis(jnp.take(self.weight[...], tokens, axis=1, mode="clip"), 0, -1)

    def wide(self, tokens: ArrayLike | None = None) -> Array:
        """Return the matrix as ``float32[E, V]``, or as ``float32[E, D]`` for ``tokens[D]``."""
        if self.parts is not None:
            return (widen(self.parts) if tokens is None else take(self.parts, tokens)).T
        return self._columns(tokens).astype(jnp.float32)

    def _columns(self, tokens: ArrayLike | None) -> Array:
        """Return the weight for all tokens, or only for `tokens` if given."""
        return self.weight[...] if tokens is None else jnp.take(self.weight[...], tokens, axis=1)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the matrix."""
        return self.weight.shape[1] if self.parts is None else sum(part.out_size for part in self.parts)

    def select(self, tokens: ArrayLike) -> "Embed":
        """Return an output head for only the distinct ``tokens[D]``, stored in the same format as this matrix."""
        head = copy_tree(self)
        if self.parts is None:
            head.weight.set_value(self._columns(tokens))
        else:
            head.parts = nnx.data(nnx.List(select(self.parts, tokens)))
        return head

    def logits(self, x: Array, tokens: ArrayLike | None = None) -> Array:
        """Return logits ``float32[B, S, V]`` for hidden states ``[B, S, E]``; ``[B, S, D]`` for ``tokens[D]``."""
        if self.parts is not None:
            return multiply(self.parts if tokens is None else select(self.parts, tokens), x)
        return project(self._columns(tokens), x, jnp.float32)


class RMSNorm(nnx.Module):
    """A root mean square norm, computed in float32.

    The normalised value is rounded to the dtype of x before it is multiplied by the weight, as in transformers.
    `nnx.RMSNorm` rounds after the multiplication.
    """

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight[...], self.eps)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return the RMS norm of `x`, scaled by `weight`. See `RMSNorm`."""
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
        gate_up = self.gate_up_proj(x)
        gate, up = split_outputs(gate_up, (gate_up.shape[-1] // 2,) * 2, self.gate_up_proj.num_shards)
        return jax.nn.silu(gate) * up


def add_and_norm(x: Array, inner: Array, linear: Linear, norm: RMSNorm | None) -> tuple[Array, Array]:
    """Return x plus a block's output ``linear(inner)``, and that sum's norm (the sum itself if `norm` is None)."""
    if norm is None:
        x = x + linear(inner)
        return x, x
    if linear.parts is None and linear.bias is None:
        weights = linear.weight[...], norm.weight[...]
        return dispatch.project_add_norm(_project_add_norm, x, inner, *weights, norm.eps)
    x = x + linear(inner)
    return x, norm(x)


def _project_add_norm(x: Array, inner: Array, weight: Array, gamma: Array, eps: float) -> tuple[Array, Array]:
    """Compute the same as `jspec.models.kernels.add_norm.project_add_norm`, for any shape and dtype."""
    x = x + project(weight, inner)
    return x, rms_norm(x, gamma, eps)


def copy_tree(module: Module) -> Module:
    """Return a copy of `module` that shares its arrays, so that attributes of the copy can be replaced."""

    def same(leaf: Array) -> Array:
        return leaf

    return cast(Module, jax.tree.map(same, module))


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Return random weights with the standard deviation of Llama's initial weights."""
    return (0.02 * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
