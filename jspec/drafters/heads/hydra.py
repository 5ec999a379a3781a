"""Hydra: Medusa-like heads, each of which also reads the tokens that the preceding heads have drafted."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from convert.config import LlamaConfig
from convert.json_fields import Fields
from jspec.core.tree import Level
from jspec.core.types import check_count, pytree
from jspec.drafters.base import Context
from jspec.drafters.heads.base import HeadsDrafter, LastState
from jspec.drafters.heads.medusa import ResBlock
from jspec.drafters.heads.own_files import InOwnFiles
from jspec.models.layers import Embed, Linear
from jspec.models.llama import Llama


class HydraHead(nnx.Module):
    """A head that reads z, a state concatenated with n embeddings.

    It computes ``R z + c + silu(W z + b)``, followed by residual blocks and an output head.

    Args:
        num_tokens: n.
        num_blocks: the number of layers, including the one that reads z.
        own_head: whether the head has its own output head, with a bias. Otherwise, it uses the target's output head.
    """

    def __init__(
        self, config: LlamaConfig, num_tokens: int, num_blocks: int, own_head: bool, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        size = config.hidden_size
        self.linear = Linear((num_tokens + 1) * size, size, True, dtype, rngs)
        self.residual = Linear((num_tokens + 1) * size, size, True, dtype, rngs)
        self.blocks = nnx.List([ResBlock(size, dtype, rngs) for _ in range(num_blocks - 1)])
        self.lm_head = Embed(config.vocab_size, size, dtype, rngs) if own_head else None
        self.bias = nnx.Param(jnp.zeros(config.vocab_size, dtype)) if own_head else None

    def __call__(self, z: Array, target: Llama) -> Array:
        """Return ``float32[B, S, V]`` for ``z[B, S, (n + 1) E]``.

        `z` starts with the state after the target's final norm.
        """
        assert self.linear.bias is not None
        z = z.astype(self.linear.bias[...].dtype)
        x = self.residual(z) + jax.nn.silu(self.linear(z))
        for block in self.blocks:
            x = block(x)
        if self.lm_head is None or self.bias is None:
            return target.head.logits(x.astype(target.dtype))
        return self.lm_head.logits(x) + self.bias[...].astype(jnp.float32)[None, None]


@pytree
class HydraDrafter(HeadsDrafter, InOwnFiles):
    """A drafter with H sequential heads: head i reads the target's last state and the i + 1 tokens after it.

    As in Ankner et al. 2024, "Hydra", section 3, the heads read the tokens through the target's own embeddings,
    starting with the last token of the sequence. The architecture is that of the authors' published heads. The first
    layer maps ``(i + 2) E`` to E, with a linear residual. It is followed by Medusa's blocks (tied to each other in the
    authors' code) and an output head with a bias. The prefix layer of Hydra++ is not supported. In a tree, every node
    reads the tokens of its own branch. If draft lengths vary, all heads still run.

    Attributes:
        heads: one `HydraHead` per depth.
    """

    heads: tuple[HydraHead, ...]
    unrolled = True
    KIND = "hydra"
    SIZES: ClassVar[dict[str, type]] = {"num_heads": int, "num_blocks": int, "own_head": bool}
    PARTS = ("num_heads", "num_blocks")

    @classmethod
    def untrained(
        cls, target: Llama, num_heads: int = 4, num_blocks: int = 1, own_head: bool = True, *, rngs: nnx.Rngs
    ) -> "HydraDrafter":
        """Return a drafter with random heads, to train for `target` or to fill with weights.

        `num_blocks` includes the first layer.
        """
        check_count("num_heads", num_heads)
        check_count("num_blocks", num_blocks)
        made = [HydraHead(target.config, i + 1, num_blocks, own_head, target.dtype, rngs) for i in range(num_heads)]
        return cls(tuple(made))

    @property
    def vocab_size(self) -> int | None:
        head = self.heads[0].lm_head
        return None if head is None else head.weight.shape[1]

    @property
    def hidden_size(self) -> int:
        return self.heads[0].linear.weight.shape[1]

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    def described(self) -> Fields:
        return {
            "num_heads": self.num_heads,
            "num_blocks": 1 + len(self.heads[0].blocks),
            "own_head": self.vocab_size is not None,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
        }

    def first(self, x: Array, context: Context, depth: int) -> tuple[Array, Array]:
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        logits, read = self._next(x, last, 0, context)
        return logits[:, 0], read

    def extend(
        self, carry: tuple[LastState, Array], tokens: Array, level: Level, context: Context
    ) -> tuple[Array, tuple[LastState, Array]]:
        state, read = carry
        assert isinstance(level.depth, int), "each head has its own shape"
        logits, read = self._next(level.of_parents(read), tokens, level.depth, context)
        return jnp.where(state.known[:, None, None], logits, -jnp.inf), (state, read)

    def _next(self, read: Array, tokens: Array, head: int, context: Context) -> tuple[Array, Array]:
        """Return the logits after ``tokens[B, S]``, and all inputs up to them, ``[B, S, (head + 2) E]``."""
        target = context.target.model
        read = jnp.concatenate([read, target.embed_tokens(tokens).astype(read.dtype)], axis=-1)
        return self.heads[head](read, target), read
