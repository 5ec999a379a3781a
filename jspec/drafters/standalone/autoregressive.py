# pyright: strict, reportUnknownMemberType=false
"""Drafting token after token: what all drafters share whose law for a token depends on the tokens before it."""

from collections.abc import Callable
from typing import Generic, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.core.probs import at_tokens
from jspec.core.sampling import TokenCounts, add_tokens, token_probs
from jspec.core.sharding import vary_like
from jspec.core.tree import Level, Tree
from jspec.core.types import Draft, pytree
from jspec.drafters.base import Context, State, Stateless, fit_vocabulary

Carry = TypeVar("Carry")


@pytree
class _Drawn:
    """A token ``[B]`` and its law ``[B, V]``, the counts that include it, and whether a row goes on after it."""

    token: Array
    probs: Array
    token_counts: TokenCounts | None
    continues: Array


_Carried = tuple[Carry, _Drawn]
_Loop = tuple[Array | int, _Carried[Carry], tuple[Array, Array]]


class AutoregressiveDrafter(Stateless, Generic[State, Carry]):
    """A drafter that says what law the next token has: `begin` and `extend`; `propose` draws a chain from those.

    `jspec.TreeDrafter` draws a tree from them. `carry`, a pytree, is what it remembers within a draft. One that
    remembers more, from round to round, has an `init`, an `end` and a `keep` of its own. For a type checker
    ``AutoregressiveDrafter[State, Carry]`` says of which types they are; a state of nothing is ``tuple[()]``.

    Attributes:
        unrolled: whether a chain is drawn without a loop, so that `level.depth` is an int and the carry may grow with
            it; for few steps that differ. All of them are run then, whatever the row's draft length.
    """

    unrolled = False

    def begin(self, state: State, context: Context, tree: Tree) -> tuple[Array, Carry]:
        """Logits ``[B, V]`` of the tokens that follow the text, and the carry, with room for a draft that is `tree`.

        Logits of -inf alone stand for "no guess".
        """
        raise NotImplementedError

    def extend(self, carry: Carry, tokens: Array, level: Level, context: Context) -> tuple[Array, Carry]:
        """Read the drafted ``int32[B, S]`` of one level; logits ``[B, S, V]`` of what follows each, and the carry."""
        raise NotImplementedError

    def end(self, carry: Carry) -> State:
        """The state after the draft."""
        return cast(State, ())  # one with another state has its own `end`

    def keep(self, state: State, start: Array, path: Array) -> State:
        """The state with what belongs to an accepted path only, as `jspec.models.kv_cache.keep` does it with a cache.

        Args:
            state: from `end`.
            start: ``int32[B]``, the position of node 0.
            path: ``int32[B, K]``, by depth the numbers of its nodes in the order in which `extend` has read them.
        """
        return state

    def propose(self, state: State, context: Context, num_draft_tokens: int) -> tuple[Draft, State]:
        """Draw a draft, each token from the law its logits have after the sampling transforms."""

        def advance(carried: _Carried[Carry], k: Array | int) -> tuple[_Carried[Carry], tuple[Array, Array]]:
            carry, last = carried
            logits, carry = self.extend(carry, last.token[:, None], Level(k), context)
            drawn = _draw(logits[:, 0], last.token_counts, last.continues, k, context)
            return (carry, drawn), (drawn.token, drawn.probs)

        logits, carry = self.begin(state, context, Tree.chain(num_draft_tokens))
        first = _draw(logits, context.token_counts, _starts(logits, context), 0, context)
        loop = _unrolled if self.unrolled else lax.scan if context.budget is None else _scan_while_continued
        (carry, _), later = loop(advance, vary_like((carry, first), context.lengths), jnp.arange(1, num_draft_tokens))
        heads = first.token, first.probs
        tokens, laws = (jnp.concatenate([head[None], tail]) for head, tail in zip(heads, later, strict=True))
        return Draft(tokens.swapaxes(0, 1), laws.swapaxes(0, 1)), self.end(carry)


def _starts(logits: Array, context: Context) -> Array:
    """The rows that draft at all. Their laws decide and nothing that is drawn, so that no draft is discarded."""
    starts = getattr(context.draft_length, "starts", None)
    if starts is None:
        return jnp.ones(context.lengths.size, bool)
    confidence = jax.nn.softmax(fit_vocabulary(logits, context.vocab_size).astype(jnp.float32)).max(-1)
    return starts(context.length_state, confidence)


def _draw(
    logits: Array, token_counts: TokenCounts | None, continues: Array, k: Array | int, context: Context
) -> _Drawn:
    """Draft token k; without a law in rows whose draft ends before it."""
    logits = fit_vocabulary(logits, context.vocab_size)
    probs = token_probs(logits[:, None], context.transforms, token_counts)[:, 0]
    token = context.draw(k, probs)
    if context.budget is not None:
        probs = jnp.where((continues & (k < context.budget))[:, None], probs, 0)
        continues &= k + 1 < context.budget
    if context.draft_length is not None and context.draft_length.needs_confidence:
        confidence = at_tokens(jax.nn.softmax(logits.astype(jnp.float32)), token)
        continues &= context.draft_length.continues(context.length_state, confidence)
    if token_counts is not None:
        token_counts = add_tokens(token_counts, token[:, None], jnp.ones((token.size, 1), bool))
    return _Drawn(token, probs, token_counts, continues)


def _zeros(count: int, like: Array) -> Array:
    return jnp.zeros((count, *like.shape), like.dtype)


def _unrolled(
    advance: Callable[[_Carried[Carry], Array | int], tuple[_Carried[Carry], tuple[Array, Array]]],
    carried: _Carried[Carry],
    ks: Array,
) -> tuple[_Carried[Carry], tuple[Array, Array]]:
    """`lax.scan` over 1, 2, ..., without a loop."""
    first, drawn = carried[1], list[tuple[Array, Array]]()
    for k in range(1, ks.size + 1):
        carried, one = advance(carried, k)
        drawn.append(one)
    if not drawn:
        return carried, (_zeros(0, first.token), _zeros(0, first.probs))
    return carried, (jnp.stack([token for token, _ in drawn]), jnp.stack([law for _, law in drawn]))


def _scan_while_continued(
    advance: Callable[[_Carried[Carry], Array | int], tuple[_Carried[Carry], tuple[Array, Array]]],
    carried: _Carried[Carry],
    ks: Array,
) -> tuple[_Carried[Carry], tuple[Array, Array]]:
    """`lax.scan` over 1, 2, ..., but it ends when no row goes on; what it does not reach is 0."""
    first = carried[1]
    outputs = _zeros(ks.size, first.token), _zeros(ks.size, first.probs)
    if ks.size == 0:  # nothing can be stored in an empty array, not even in a loop that never runs
        return carried, outputs

    def body(loop: _Loop[Carry]) -> _Loop[Carry]:
        i, carried, (tokens, laws) = loop
        carried, (token, law) = advance(carried, i + 1)
        return i + 1, carried, (tokens.at[i].set(token), laws.at[i].set(law))

    def unfinished(loop: _Loop[Carry]) -> Array:
        return (loop[0] < ks.size) & jnp.any(loop[1][1].continues)

    _, carried, outputs = lax.while_loop(unfinished, body, (0, carried, vary_like(outputs, first)))
    return carried, outputs
