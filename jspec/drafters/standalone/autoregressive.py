"""Token-by-token drafting: the base class of drafters whose distributions depend on the preceding tokens."""

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
from jspec.drafters.base import Context, State, Stateless
from jspec.drafters.declared import default
from jspec.drafters.drafts import fit_vocabulary

Carry = TypeVar("Carry")


@pytree
class _Estimates:
    """Estimates for the draft so far, computed from the drafter's `acceptance`.

    Attributes:
        expected: ``float32[B]``, the expected number of tokens of the round, including the target's own token.
        survival: ``float32[B]``, the probability that the whole draft is accepted.
    """

    expected: Array
    survival: Array


@pytree
class _Progress:
    """The state of a chain, which determines its next token.

    Attributes:
        token_counts: the token counts of sequence and draft, or None without penalties.
        continues: ``bool[B]``, whether the row drafts another token.
        estimates: the estimates for the draft so far; None if the policy does not need them.
    """

    token_counts: TokenCounts | None
    continues: Array
    estimates: _Estimates | None


@pytree
class _Drawn:
    """A token ``[B]``, its distribution ``[B, V]``, and the progress after it."""

    token: Array
    probs: Array
    progress: _Progress


_Carried = tuple[Carry, _Drawn]
_Loop = tuple[Array | int, _Carried[Carry], tuple[Array, Array]]


class AutoregressiveDrafter(Stateless[State], Generic[State, Carry]):
    """A base class for drafters whose `begin` and `extend` return the distribution of the next token.

    `propose` draws a chain from these distributions, and `jspec.TreeDrafter` draws a tree. `carry`, a pytree, is the
    drafter's memory within a draft. A drafter that also keeps a state between rounds defines its own `init`, `end` and
    `keep`. For a type checker, ``AutoregressiveDrafter[State, Carry]`` declares the types of the state and the carry;
    an empty state is ``tuple[()]``.
    """

    @default
    def unrolled(self) -> bool:
        """Whether a chain is drawn without a loop, so that `level.depth` is an int and the carry may grow with depth.

        Unrolling suits a small number of steps that differ from each other. All steps then run, whatever a row's draft
        length.
        """
        return False

    def begin(self, state: State, context: Context, tree: Tree) -> tuple[Array, Carry]:
        """Return the next token's logits ``[B, V]``, and a carry with space for a draft of shape `tree`.

        If all of a row's logits are -inf, the row drafts nothing.
        """
        raise NotImplementedError

    def extend(self, carry: Carry, tokens: Array, level: Level, context: Context) -> tuple[Array, Carry]:
        """Read a level's draft tokens ``int32[B, S]``; return the logits ``[B, S, V]`` after each, and the carry."""
        raise NotImplementedError

    def acceptance(self, carry: Carry, logits: Array) -> Array:
        """Return an estimate ``float32[B]`` of the probability that a chain's next token will be accepted.

        The token has not been drawn yet, so the estimate depends only on the tokens before it. It affects the length of
        the draft (`jspec.ByEstimatedAcceptance`), but never the output distribution. By default, it is the probability
        of the most likely token.

        Args:
            carry: the carry that `begin` or `extend` returned with `logits`.
            logits: ``[B, V]``, the token's logits before any transforms, without padding.
        """
        return jax.nn.softmax(logits.astype(jnp.float32)).max(-1)

    def end(self, carry: Carry) -> State:
        """Return the state after the draft."""
        return cast(State, ())  # a drafter whose state is not empty overrides `end`

    def keep(self, state: State, start: Array, path: Array) -> State:
        """Return the state with only the entries of an accepted path.

        `jspec.models.kv_cache.keep` does the same for a cache.

        Args:
            state: the result of `end`.
            start: ``int32[B]``, the position of node 0.
            path: ``int32[B, K]``, the path's node at each depth. Nodes are numbered in the order in which `extend` has
                read them.
        """
        return state

    def propose(self, state: State, context: Context, num_draft_tokens: int) -> tuple[Draft, State]:
        """Draw a draft. Each token comes from the distribution of its logits after the sampling transforms."""

        def advance(carried: _Carried[Carry], k: Array | int) -> tuple[_Carried[Carry], tuple[Array, Array]]:
            carry, last = carried
            logits, carry = self.extend(carry, last.token[:, None], Level(k), context)
            drawn = self._draw(carry, logits[:, 0], last.progress, k, context)
            return (carry, drawn), (drawn.token, drawn.probs)

        logits, carry = self.begin(state, context, Tree.chain(num_draft_tokens))
        first = self._draw(carry, logits, _before_draft(logits, context), 0, context)
        loop = _unrolled if self.unrolled else lax.scan if context.budget is None else _scan_while_continued
        (carry, _), later = loop(advance, vary_like((carry, first), context.lengths), jnp.arange(1, num_draft_tokens))
        heads = first.token, first.probs
        tokens, probs = (jnp.concatenate([head[None], tail]) for head, tail in zip(heads, later, strict=True))
        return Draft(tokens.swapaxes(0, 1), probs.swapaxes(0, 1)), self.end(carry)

    def _draw(self, carry: Carry, logits: Array, progress: _Progress, k: Array | int, context: Context) -> _Drawn:
        """Draw draft token k. Rows whose draft ends before it get an all-zero distribution."""
        logits, continues = fit_vocabulary(logits, context.vocab_size), progress.continues
        estimates = progress.estimates
        if estimates is not None and context.draft_length is not None:
            survival = estimates.survival * self.acceptance(carry, logits)
            continues &= context.draft_length.is_worthwhile(context.length_state, k, estimates.expected, survival)
            estimates = _Estimates(estimates.expected + survival, survival)
        token_counts = progress.token_counts
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
        return _Drawn(token, probs, _Progress(token_counts, continues, estimates))


def _before_draft(logits: Array, context: Context) -> _Progress:
    """Return the progress before the first draft token, whose logits are ``[B, V]``."""
    estimates = None
    if context.draft_length is not None and context.draft_length.needs_acceptance:
        certain = jnp.ones(context.lengths.size, jnp.float32)
        estimates = _Estimates(certain, certain)
    return _Progress(context.token_counts, _should_draft(logits, context), estimates)


def _should_draft(logits: Array, context: Context) -> Array:
    """Return ``bool[B]``: whether each row drafts at all.

    The decision depends only on the row's distribution and not on a drawn token, so no draft is ever discarded.
    """
    if context.draft_length is None or not context.draft_length.may_skip:
        return jnp.ones(context.lengths.size, bool)
    confidence = jax.nn.softmax(fit_vocabulary(logits, context.vocab_size).astype(jnp.float32)).max(-1)
    return context.draft_length.should_draft(context.length_state, confidence)


def _zeros(count: int, like: Array) -> Array:
    return jnp.zeros((count, *like.shape), like.dtype)


def _unrolled(
    advance: Callable[[_Carried[Carry], Array | int], tuple[_Carried[Carry], tuple[Array, Array]]],
    carried: _Carried[Carry],
    ks: Array,
) -> tuple[_Carried[Carry], tuple[Array, Array]]:
    """Do the same as `lax.scan` over 1, 2, ..., without a loop."""
    first, drawn = carried[1], list[tuple[Array, Array]]()
    for k in range(1, ks.size + 1):
        carried, one = advance(carried, k)
        drawn.append(one)
    if not drawn:
        return carried, (_zeros(0, first.token), _zeros(0, first.probs))
    return carried, (jnp.stack([token for token, _ in drawn]), jnp.stack([probs for _, probs in drawn]))


def _scan_while_continued(
    advance: Callable[[_Carried[Carry], Array | int], tuple[_Carried[Carry], tuple[Array, Array]]],
    carried: _Carried[Carry],
    ks: Array,
) -> tuple[_Carried[Carry], tuple[Array, Array]]:
    """Do the same as `lax.scan` over 1, 2, ..., but stop when no row continues. The outputs of later steps are 0."""
    first = carried[1]
    outputs = _zeros(ks.size, first.token), _zeros(ks.size, first.probs)
    if ks.size == 0:  # nothing can be stored in an empty array, not even in a loop that never runs
        return carried, outputs

    def body(loop: _Loop[Carry]) -> _Loop[Carry]:
        i, carried, (all_tokens, all_probs) = loop
        carried, (token, probs) = advance(carried, i + 1)
        return i + 1, carried, (all_tokens.at[i].set(token), all_probs.at[i].set(probs))

    def unfinished(loop: _Loop[Carry]) -> Array:
        return (loop[0] < ks.size) & jnp.any(loop[1][1].progress.continues)

    _, carried, outputs = lax.while_loop(unfinished, body, (0, carried, vary_like(outputs, first)))
    return carried, outputs
