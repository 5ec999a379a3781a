"""Candidate selectors, which choose among the most likely tokens of each row, given the token before it (DFlash2)."""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from convert.heads.block.config import DFlash2Config
from jspec.models.layers import Embed, Linear
from jspec.models.products import einsum


class CandidateSelector(nnx.Module):
    """A selector that keeps C candidate tokens per row, and scores them given the token before.

    Candidate c after token p scores ``u[c] + (A[p] * P h) . B[c]``, where u and h are the logits and the state of the
    candidate's row. The draft token's distribution is the softmax of the scores, so all other tokens have probability
    0. See https://github.com/vllm-project/vllm/pull/52816, which added DFlash2 to vLLM.

    Args:
        vocab_size: V.
        hidden_size: E, the size of a row's state.
    """

    def __init__(self, config: DFlash2Config, vocab_size: int, hidden_size: int, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        self.config = config
        self.predecessor_codebook = Embed(vocab_size, config.rank, dtype, rngs)
        self.successor_codebook = Embed(vocab_size, config.rank, dtype, rngs)
        self.hidden_projection = Linear(hidden_size, config.rank, False, dtype, rngs)

    def candidates(self, logits: Array) -> tuple[Array, Array]:
        """Return the logits ``float32[B, R, C]`` and the ids ``int32[B, R, C]`` of each row's candidates."""
        values, ids = lax.top_k(logits, self.config.num_candidates)
        values, cap = values * self.config.logit_scale, self.config.logit_cap
        return values if cap is None else cap * jnp.tanh(values / cap), ids

    def __call__(self, values: Array, ids: Array, tokens: Array, hidden: Array) -> Array:
        """Score candidates, given the tokens before them.

        Args:
            values: ``[B, S, C]``, the candidates' logits.
            ids: ``int32[B, S, C]``, the candidates.
            tokens: ``int32[B, S]``, the tokens before them.
            hidden: ``[B, S, E]``, the rows' states.

        Returns:
            Logits ``float32[B, S, V]``, which are -inf for all tokens except the candidates.
        """
        vector = self.predecessor_codebook(tokens).astype(hidden.dtype) * self.hidden_projection(hidden)
        followers = self.successor_codebook(ids.reshape(len(ids), -1)).astype(hidden.dtype).reshape(*ids.shape, -1)
        scores = values + einsum("bsr,bscr->bsc", vector, followers, jnp.float32)
        nothing = jnp.full((*tokens.shape, self.successor_codebook.num_tokens), -jnp.inf, jnp.float32)
        return jnp.put_along_axis(nothing, ids, scores, axis=-1, inplace=False)
