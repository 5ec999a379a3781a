"""PaSS: the target reads vectors at the positions after the sequence, and predicts the tokens at these positions."""

import functools
import numbers
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from convert.json_fields import Fields
from jspec.acceptance.walk import end_of
from jspec.core.tree import Level, Tree
from jspec.core.types import Draft, Verdict, check_count, pytree
from jspec.drafters.base import Context
from jspec.drafters.chunked_prefill import NoPrefill
from jspec.drafters.heads.base import at_depth
from jspec.drafters.heads.own_files import InOwnFiles
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.models.llama import Llama


@pytree
class _Ahead:
    """The target's states at the vectors after the last token that it has read.

    Attributes:
        hidden: ``float32[B, M, E]``, before the final norm.
        known: ``bool[B]``; True from the first commit on.
    """

    hidden: Array
    known: Array


@pytree
class _Guesses(AutoregressiveDrafter[_Ahead, tuple[_Ahead, Array]]):
    """A chain drafter that draws the tokens that the target predicts at the vectors' positions."""

    vocab_size = None

    def begin(self, state: _Ahead, context: Context, tree: Tree) -> tuple[Array, tuple[_Ahead, Array]]:
        model = context.target.model
        logits = model.logits(state.hidden.astype(model.dtype))
        return jnp.where(state.known[:, None], logits[:, 0], -jnp.inf), (state, logits)

    def extend(
        self, carry: tuple[_Ahead, Array], tokens: Array, level: Level, context: Context
    ) -> tuple[Array, tuple[_Ahead, Array]]:
        return at_depth(carry[1], level, tokens), carry

    def end(self, carry: tuple[_Ahead, Array]) -> _Ahead:
        return carry[0]


@pytree
class PassDrafter(InOwnFiles, NoPrefill[_Ahead]):
    """A drafter that uses the target's own predictions for the M positions after the next token.

    The target reads trained vectors at these positions. Only these look-ahead embeddings are trained (Monea et al.
    2023, "PaSS: Parallel Speculative Sampling"). The paper drafts in one pass and verifies in another; here a single
    pass does both. The target reads the M vectors after the last token and after each of the M draft tokens, so the
    next draft is ready whatever is accepted. A pass has M + (M + 1) M tokens besides the last token, and M of them can
    be accepted. The first round after the prompt drafts nothing. A draft token does not depend on earlier draft tokens.

    Attributes:
        embeddings: ``[M, E]``.
    """

    embeddings: Array
    vocab_size = None
    KIND = "pass"
    SIZES: ClassVar[dict[str, type]] = {"num_vectors": int}

    @classmethod
    def untrained(cls, target: Llama, num_vectors: int = 2, *, rngs: nnx.Rngs) -> "PassDrafter":
        """Return a drafter whose vectors are initialised to the mean of all embeddings plus a little noise."""
        check_count("num_vectors", num_vectors)
        weight = target.embed_tokens.wide()
        noise = 0.1 * weight.std() * jax.random.normal(rngs.params(), (num_vectors, len(weight)))
        return cls((weight.mean(axis=1) + noise).astype(target.dtype))

    @classmethod
    def of_token(cls, target: Llama, token_id: int, count: int) -> "PassDrafter":
        """Return a drafter whose `count` vectors all equal the target's embedding of one token, such as padding.

        It needs no training.

        Raises:
            ValueError: the target has no such token.
        """
        check_count("count", count)
        size = target.config.vocab_size
        if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral) or not 0 <= token_id < size:
            raise ValueError(f"token_id must be one of the target's tokens, 0 to {size - 1}; got {token_id!r}.")
        return cls(target.embed_tokens(jnp.full((1, count), token_id))[0].astype(target.dtype))

    def described(self) -> Fields:
        return {"num_vectors": len(self.embeddings), "hidden_size": self.embeddings.shape[1]}

    @property
    def tree(self) -> Tree:
        """A chain of M draft tokens, then a chain of vectors after the last token and after each of the M nodes."""
        return _layout(len(self.embeddings))[0]

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> _Ahead:
        """Return an empty state: the prompt has no vectors."""
        hidden = jnp.zeros((len(tokens), *self.embeddings.shape), jnp.float32)
        return _Ahead(hidden, jnp.zeros(len(tokens), bool))

    def read(self, state: _Ahead, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> _Ahead:
        """Forget the states in rows that read at least one token, because the text has moved past the vectors."""
        return _Ahead(state.hidden, state.known & (count == 0))

    def propose(self, state: _Ahead, context: Context, num_draft_tokens: int) -> tuple[Draft, _Ahead]:
        """Draw draft tokens from the distributions at their positions, and add the vectors for the next round."""
        count = len(self.embeddings)
        tree, nodes = _layout(count)
        guesses, state = _Guesses().propose(state, context, count)
        vectors = jnp.tile(context.vocab_size + jnp.arange(count, dtype=jnp.int32), (len(context.lengths), len(nodes)))
        tokens = jnp.concatenate([guesses.tokens, vectors], axis=1)
        return Draft(tokens, jnp.pad(guesses.probs, ((0, 0), (0, nodes.size), (0, 0))), tree), state

    def commit(self, state: _Ahead, draft: Draft, verdict: Verdict, signals: TargetSignals) -> _Ahead:
        """Return the target's states at the vectors after the last accepted token."""
        assert verdict.path is not None, "rules that do not support trees are rejected"
        vectors = jnp.asarray(_layout(len(self.embeddings))[1])[end_of(verdict.num_accepted, verdict.path)]
        ahead = jnp.take_along_axis(signals.hidden, vectors[..., None], axis=1)
        return _Ahead(ahead.astype(jnp.float32), jnp.ones_like(state.known))


@functools.cache
def _layout(count: int) -> tuple[Tree, np.ndarray]:
    """Return the tree of a round, and the nodes of the vectors after each node of its chain, ``int[M + 1, M]``."""
    nodes = np.arange(count + 1, (count + 1) ** 2).reshape(count + 1, count)
    above = np.concatenate([np.arange(count + 1)[:, None], nodes[:, :-1]], axis=1)
    return Tree((*range(count), *above.ravel().tolist())), nodes
