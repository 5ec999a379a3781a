"""Blockwise parallel decoding: an additional layer computes several states for the target's own head."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from convert.config import LlamaConfig
from convert.json_fields import Fields
from jspec.core.types import check_count, pytree
from jspec.drafters.heads.base import ParallelHeadsDrafter
from jspec.drafters.heads.own_files import InOwnFiles
from jspec.models.layers import Linear
from jspec.models.llama import Llama


class BlockwiseLayer(nnx.Module):
    """A layer ``x + W2 relu(W1 x + b1) + b2`` with H * E outputs, each of which depends on all inner units.

    Args:
        num_heads: H.
        inner_size: the size between the two matrices. The authors use H times the target's own inner size.
    """

    def __init__(self, config: LlamaConfig, num_heads: int, inner_size: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.up = Linear(config.hidden_size, inner_size, True, dtype, rngs)
        self.down = Linear(inner_size, num_heads * config.hidden_size, True, dtype, rngs)

    def __call__(self, x: Array) -> Array:
        """Return ``[B, S, H, E]`` for the target's states after its final norm, ``[B, S, E]``."""
        assert self.up.bias is not None
        x = x.astype(self.up.bias[...].dtype)
        made = self.down(jax.nn.relu(self.up(x)))
        return x[:, :, None] + made.reshape(*x.shape[:2], -1, x.shape[-1])


@pytree
class BlockwiseDrafter(ParallelHeadsDrafter, InOwnFiles):
    """A drafter with one feed-forward layer on the target's last state, and the target's own output head.

    In the notation of Stern et al. 2018, "Blockwise Parallel Decoding", section 6, the target is p_1, which draws the
    next token. Head i is p_{i + 2}, which drafts the token i + 1 positions after that. As with every jspec drafter, any
    rule can verify the drafts. The pass that verifies a draft also computes the states for the next one (section 4,
    which halves the number of passes of section 3).

    Attributes:
        layer: a `BlockwiseLayer`.
    """

    layer: BlockwiseLayer
    vocab_size = None
    KIND = "blockwise"
    SIZES: ClassVar[dict[str, type]] = {"num_heads": int, "inner_size": int}

    @classmethod
    def untrained(
        cls, target: Llama, num_heads: int = 4, inner_size: int | None = None, *, rngs: nnx.Rngs
    ) -> "BlockwiseDrafter":
        """Return a drafter with a random layer, to train for `target` or to fill with weights.

        If `inner_size` is None, the inner size from the paper is used.
        """
        check_count("num_heads", num_heads)
        inner = num_heads * target.config.intermediate_size if inner_size is None else inner_size
        return cls(BlockwiseLayer(target.config, num_heads, inner, target.dtype, rngs))

    @property
    def hidden_size(self) -> int:
        return self.layer.up.weight.shape[0]

    @property
    def num_heads(self) -> int:
        return self.layer.down.weight.shape[1] // self.hidden_size

    def described(self) -> Fields:
        inner = self.layer.up.weight.shape[1]
        return {"num_heads": self.num_heads, "inner_size": inner, "hidden_size": self.hidden_size}

    def logits(self, x: Array, target: Llama, depth: int) -> Array:
        states = self.layer(x)[:, :, :depth].astype(target.dtype)
        logits = target.head.logits(states.reshape(len(x), -1, x.shape[-1]))
        return logits.reshape(*states.shape[:3], -1)
