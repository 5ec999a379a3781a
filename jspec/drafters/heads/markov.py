"""Markov heads: cheap corrections of a block drafter's logits by the tokens before them (DSpark, arXiv 2607.05147)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from convert.heads.block.config import MarkovConfig
from jspec.models.layers import Embed, Linear


class Markov(nnx.Module):
    """A Markov head. It adds ``W2 z`` to a row's logits, where z depends on the vector ``W1[x]`` of the token before.

    - "vanilla": z is this vector.
    - "gated": z is this vector times a gate, which reads the row's state and the vector.
    - "rnn": z is the output of a gated recurrent unit, which reads its own state, the vector and the row's state.

    Args:
        config: the kind and the rank r.
        vocab_size: V, the number of tokens that may come before.
        draft_vocab_size: D, the number of logits.
        hidden_size: E, the size of a row's state.
    """

    def __init__(
        self,
        config: MarkovConfig,
        vocab_size: int,
        draft_vocab_size: int,
        hidden_size: int,
        dtype: jnp.dtype,
        *,
        rngs: nnx.Rngs,
    ):
        self.config, rank = config, config.rank
        self.markov_w1 = Embed(vocab_size, rank, dtype, rngs)
        self.markov_w2 = Embed(draft_vocab_size, rank, dtype, rngs)
        gated, recurrent = config.kind == "gated", config.kind == "rnn"
        self.gate_proj = Linear(hidden_size + rank, rank, True, dtype, rngs) if gated else None
        self.joint_proj = Linear(hidden_size + 2 * rank, 3 * rank, True, dtype, rngs) if recurrent else None

    def initial(self, batch: int) -> Array:
        """Return the state before a block's first token: ``[B, 1, r]`` for "rnn", and ``[B, 1, 0]`` otherwise."""
        return jnp.zeros((batch, 1, 0 if self.joint_proj is None else self.config.rank), jnp.float32)

    def __call__(self, state: Array, tokens: Array, hidden: Array) -> tuple[Array, Array]:
        """Read the tokens before some rows.

        Args:
            state: ``[B, S, r]``, the states before the tokens.
            tokens: ``int32[B, S]``.
            hidden: ``[B, S, E]``, the rows' states.

        Returns:
            The corrections ``float32[B, S, D]``, and the states after the tokens.
        """
        vector = self.markov_w1(tokens).astype(hidden.dtype)
        if self.gate_proj is not None:
            vector = vector * jax.nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, vector], axis=-1)))
        if self.joint_proj is not None:
            joint = self.joint_proj(jnp.concatenate([state.astype(hidden.dtype), vector, hidden], axis=-1))
            gate, candidate, output = jnp.split(joint.astype(jnp.float32), 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state = gate * state + (1 - gate) * jnp.tanh(candidate)
            vector = jnp.tanh(output).astype(hidden.dtype)
        return self.markov_w2.logits(vector), state
