"""Medusa: additional heads draft the tokens after the next one, all from a single hidden state of the target."""

from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from convert.config import LlamaConfig
from convert.heads.medusa_config import MedusaConfig, MedusaOrigin
from jspec.core.types import check_count, pytree
from jspec.drafters.heads import medusa_weights
from jspec.drafters.heads.base import ParallelHeadsDrafter
from jspec.models.layers import Embed, Linear
from jspec.models.llama import Llama


class ResBlock(nnx.Module):
    """A block ``x + silu(W x + b)``, in the dtype of b."""

    def __init__(self, size: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.linear = Linear(size, size, True, dtype, rngs)

    def __call__(self, x: Array) -> Array:
        assert self.linear.bias is not None
        x = x.astype(self.linear.bias[...].dtype)
        return x + jax.nn.silu(self.linear(x))


class MedusaHead(nnx.Module):
    """A head with residual blocks and its own output head.

    Attributes:
        origin: a description of the files that all heads were loaded from; None if they were not loaded.
    """

    def __init__(self, config: LlamaConfig | MedusaConfig, num_blocks: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.origin: MedusaOrigin | None = None
        self.blocks = nnx.List([ResBlock(config.hidden_size, dtype, rngs) for _ in range(num_blocks)])
        self.lm_head = Embed(config.vocab_size, config.hidden_size, dtype, rngs)

    def __call__(self, x: Array) -> Array:
        """Return ``float32[B, S, V]`` for the target's states after its final norm, ``[B, S, E]``."""
        for block in self.blocks:
            x = block(x)
        return self.lm_head.logits(x)


@pytree
class MedusaDrafter(ParallelHeadsDrafter):
    """A drafter with H heads on the target's last state: head i drafts the token i + 1 positions after the next one.

    The heads compute ``logits_i = U_i(x + silu(W_i x + b_i))``, in which x is the state after the target's final norm
    (Cai et al. 2024, "Medusa", section 2.1.1). A head does not see the tokens that the other heads have drawn. Heads
    that were trained together with their target (Medusa-2) draft for the target with the weights from that training.

    Attributes:
        heads: one `MedusaHead` per depth.
    """

    heads: tuple[MedusaHead, ...]

    @classmethod
    def untrained(cls, target: Llama, num_heads: int = 4, num_blocks: int = 1, *, rngs: nnx.Rngs) -> "MedusaDrafter":
        """Return a drafter with random heads, to train for `target` or to fill with weights."""
        check_count("num_heads", num_heads)
        made = [MedusaHead(target.config, num_blocks, target.dtype, rngs) for _ in range(num_heads)]
        return cls(tuple(made))

    @classmethod
    def load(cls, path: str | Path, target: Llama | None = None, dtype: DTypeLike | None = None) -> Self:
        """Load heads from config.json and safetensors, in the layout of Medusa or vLLM.

        If a checkpoint also holds the target (Medusa-2), this function reads the heads, and `jspec.load` reads the
        target.

        Args:
            path: a local directory, or a Hugging Face repo id.
            target: the `jspec.Llama` that the heads were trained for. If given, sizes are checked immediately.
            dtype: the dtype of the weights. Same as in `jspec.load`.

        Raises:
            convert.CheckpointError: the files are not those of Medusa heads, or are damaged, or are pickles. The
                message says what was found and expected.
            ValueError: the heads were made for a target with different sizes.
        """

        def make(config: MedusaConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> MedusaHead:
            return MedusaHead(config, config.num_blocks, dtype, rngs)

        heads, origin = medusa_weights.load(make, path, target, dtype)
        for head in heads:
            head.origin = origin
        return cls(heads)

    def save(self, path: str | Path, format: str = "vllm") -> Path:
        """Write config.json and the heads to a new directory.

        Heads that were loaded from the same layout are written back unchanged.

        Args:
            format: "vllm", or "medusa" for the weight names that were published with the paper.

        Raises:
            convert.CheckpointError: `path` exists or cannot be written, or the format is unknown.
        """
        sizes = MedusaConfig(self.hidden_size, self.vocab_size, self.num_heads, len(self.heads[0].blocks))
        return medusa_weights.save(self.heads, sizes, self.heads[0].origin, path, format)

    @property
    def vocab_size(self) -> int:
        return self.heads[0].lm_head.weight[...].shape[1]

    @property
    def hidden_size(self) -> int:
        return self.heads[0].lm_head.weight[...].shape[0]

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    def logits(self, x: Array, target: Llama, depth: int) -> Array:
        return jnp.stack([head(x) for head in self.heads[:depth]], axis=2)
