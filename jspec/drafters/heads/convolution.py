"""Decoder layers with convolutions over the rows of a block, before and after attention and MLP (DFlash2)."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax import Array

from convert.heads.block.config import BlockConfig, DFlash2Config
from jspec.models.attention import AttentionContext
from jspec.models.layers import Linear, RMSNorm
from jspec.models.llama import DecoderLayer


class Convolution(nnx.Module):
    """Two convolutions over the rows of a block, one before a sublayer and one after it.

    Output channel c of row i is ``sum_t (w[t, c] + d[i, t, g(c)]) x[i - t, c]``, where x is 0 before the block's first
    row. The weights w are trained. The weights d are projected from the sublayer's input at row i, and are the same for
    all channels in group g(c). See https://github.com/vllm-project/vllm/pull/52816, which added DFlash2 to vLLM.

    Args:
        hidden_size: E.

    Attributes:
        base_kernel: w of both convolutions, ``[E, T, 2]`` for T taps.
    """

    def __init__(self, config: DFlash2Config, hidden_size: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.base_kernel = nnx.Param(jnp.zeros((hidden_size, config.num_taps, 2), dtype).at[:, 0].set(1))
        groups = hidden_size // config.group_size
        self.kernel_projection = Linear(hidden_size, 2 * config.num_taps * groups, False, dtype, rngs)

    def before(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        """Return the sublayer's convolved input ``[B, R, E]``, and the convolution of its output."""
        projected = self.kernel_projection(x).reshape(*x.shape[:2], 2, self.config.num_taps, -1)
        first, second = (jnp.repeat(projected[:, :, i], self.config.group_size, axis=-1) for i in (0, 1))
        base = self.base_kernel[...].T
        return _convolve(x, base[0] + first), functools.partial(_convolve, kernel=base[1] + second)


def _convolve(x: Array, kernel: Array) -> Array:
    """Convolve ``x[B, R, E]`` over its rows, with the weights ``kernel[B, R, T, E]`` of each row and tap."""
    taps, rows = kernel.shape[2], x.shape[1]
    earlier = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    return sum((kernel[:, :, t] * earlier[:, taps - 1 - t :][:, :rows] for t in range(1, taps)), kernel[:, :, 0] * x)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions around its attention and its MLP."""

    def __init__(self, config: BlockConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(config.body, dtype, rngs)
        assert config.dflash2 is not None
        self.attention_conv = Convolution(config.dflash2, config.body.hidden_size, dtype, rngs)
        self.mlp_conv = Convolution(config.dflash2, config.body.hidden_size, dtype, rngs)

    def __call__(
        self, x: Array, normed: Array, context: AttentionContext, following: RMSNorm | None
    ) -> tuple[Array, Array, Array, Array]:
        """Run as `DecoderLayer` does, with the convolutions. ``x`` must hold all rows of the block, and no others."""
        rows, after = self.attention_conv.before(normed)
        mixed, keys, values = self.self_attn(rows, context)
        x = x + after(self.self_attn.o_proj(mixed))
        rows, after = self.mlp_conv.before(self.post_attention_layernorm(x))
        x = x + after(self.mlp.down_proj(self.mlp(rows)))
        return x, x if following is None else following(x), keys, values
