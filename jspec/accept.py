"""Acceptance rules: from a draft and the target's laws to a verdict. Those in this file are exact.

A rule is exact if the text it leads to has the target's law whatever the draft. `jspec.lossy` has those that are not.
"""

import dataclasses
from typing import ClassVar, Protocol

import jax.numpy as jnp
from jax import Array

from jspec.keys import Purpose, of_sibling, stream, target_noise, uniform
from jspec.probs import at_tokens, residual, sample, sample_with_noise
from jspec.types import Draft, Verdict
from jspec.walk import at_parents, end_of, follow, is_guess, kept_in_turn, law_behind, length_of_prefix, traverse


class Rule(Protocol):
    """An acceptance rule: hashable, for it is part of the program.

    Attributes:
        exact: whether the text has the target's law whatever the draft.
        shares_noise: whether drafts are drawn with the noise that the target draws its own tokens with.
        branches: whether it can judge a tree; one that does not say so is given chains only.
    """

    exact: ClassVar[bool]
    shares_noise: ClassVar[bool]
    branches: ClassVar[bool]

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        """What becomes of a round's draft.

        Args:
            keys: the requests' typed keys ``[B]``.
            start: ``int32[B]``, the position of the first drafted token.
            draft: tokens ``[B, K]`` and their laws ``[B, K, V]``.
            target_probs: ``float32[B, K + 1, V]``, the target's law at ``start``, ``start + 1``, ...; of a tree the law
                behind every node.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Speculative sampling, token by token (Leviathan et al. 2023, section 2.3; Chen et al. 2023, algorithm 2).

    Of several children the eldest is judged first, the next by what the refusal has left of the target's law, and so
    on (Miao et al. 2024, SpecInfer, algorithm 2). That is exact whenever each was drawn from its law, given its elder
    siblings: by induction from the last, each step is speculative sampling from what is left.
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False
    branches: ClassVar[bool] = True

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        if draft.topology.is_chain:
            return accept_tokens(keys, start, draft, target_probs, target_probs[:, :-1])
        return accept_nodes(keys, start, draft, target_probs)


@dataclasses.dataclass(frozen=True)
class Block:
    """Block verification (Sun et al. 2024, algorithm 2): the draft is judged as a whole.

    How likely the first i drafts are to be kept depends on the product of their ratios p/q, so that a good token makes
    up for one that was drafted too often. In expectation it accepts at least as many as `Rejection` does.
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False
    branches: ClassVar[bool] = False

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        num_draft_tokens = draft.tokens.shape[1]
        # That a later draft was refused has a part in where the round ends, so its noise must not be used again.
        round_keys = stream(keys, start, Purpose.ACCEPT)
        uniforms = uniform(stream(round_keys, _positions(start, num_draft_tokens), Purpose.ACCEPT))
        weights = block_weights(draft, target_probs)
        kept = uniforms < block_chances(weights, draft, target_probs)
        num_accepted = (kept * jnp.arange(1, num_draft_tokens + 1)).max(axis=1, initial=0).astype(jnp.int32)
        weight = jnp.take_along_axis(weights, num_accepted[:, None], axis=1)
        law = next_probs(num_accepted, draft, target_probs, weight)
        return Verdict(num_accepted, sample(stream(keys, start + num_accepted, Purpose.TARGET), law))


@dataclasses.dataclass(frozen=True)
class Coupled:
    """The target draws its tokens as in plain decoding; drafts, drawn with the same noise, are kept where they agree.

    So the text is the one that `jspec.generate` gives for the same key, token for token, whatever the draft, its tree
    and K, but for rounding in the logits: a Gumbel coupling (Daliri, Musco and Suresh 2025). Of a chain it accepts less
    than `Rejection`, whose coupling is optimal: with one number a token at least ``(1 - d) / (1 + d)``, d being the
    total variation distance of p and q, and here, where a token takes two draws, it may be less
    (`jspec.probs.sample_with_noise`).
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        noise = target_noise(keys, _positions(start, draft.topology.max_depth + 1), target_probs.shape[2])
        return accept_coupled(noise, draft, target_probs)


@dataclasses.dataclass(frozen=True)
class Traversal:
    """Traversal verification (Weng et al. 2025, algorithm 3): a tree is judged as a whole, from its leaves to its root.

    Of a chain it is `Block`; of a tree, where that helps a whole branch, it keeps branches that `Rejection` gives up at
    their first nodes.
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False
    branches: ClassVar[bool] = True

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        tree = draft.static_tree
        if tree.is_chain:
            return Block().accept(keys, start, draft, target_probs)
        # As in `Block`; and cousins are judged beside each other, so that every node of a depth has noise of its own.
        round_keys = stream(keys, start, Purpose.ACCEPT)
        depths, rank = tree.offsets[1:], tree.rank_at_depth[1:]
        by_rank = [stream(of_sibling(round_keys, r), _positions(start, tree.max_depth), Purpose.ACCEPT)
                   for r in range(rank.max() + 1)]  # fmt: skip
        uniforms = jnp.stack([uniform(keys) for keys in by_rank], axis=1)[:, rank, depths - 1]
        end, law = traverse(uniforms, draft, target_probs)
        num_accepted, path = jnp.asarray(tree.offsets)[end], jnp.asarray(tree.paths)[end]
        return Verdict(num_accepted, sample(stream(keys, start + num_accepted, Purpose.TARGET), law), path=path)


RULES: dict[str, Rule] = {
    "rejection": Rejection(),
    "block": Block(),
    "coupled": Coupled(),
    "traversal": Traversal(),
}


def accept_tokens(keys: Array, start: Array, draft: Draft, target_probs: Array, bound: Array) -> Verdict:
    """Accept token after token, x with probability ``min(1, bound(x) / q(x))``, until the first failure.

    The token after is drawn from what the accepted mass ``min(q, bound)`` has left of p. With p as the bound it is
    speculative sampling; a larger bound, somewhere, is a lossy rule.

    Args:
        keys, start, draft, target_probs: as for `Rule.accept`.
        bound: ``float32[B, K, V]``.
    """
    uniforms = uniform(stream(keys, _positions(start, draft.tokens.shape[1]), Purpose.ACCEPT))
    num_accepted = count_accepted(uniforms, draft, bound)
    accepted = Draft(draft.tokens, jnp.minimum(draft.probs, bound))
    law = next_probs(num_accepted, accepted, target_probs)
    return Verdict(num_accepted, sample(stream(keys, start + num_accepted, Purpose.TARGET), law))


def accept_nodes(keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
    """`accept_tokens` of a tree, with p as the bound: children in turn, then the token behind the path."""
    tree = draft.topology
    positions = _positions(start, tree.max_depth)
    ranks = [of_sibling(keys, rank) for rank in range(tree.max_children)]
    uniforms = [uniform(stream(own, positions, Purpose.ACCEPT)) for own in ranks]
    num_accepted, path = follow(kept_in_turn(uniforms, draft, target_probs), tree)
    law = law_behind(end_of(num_accepted, path), draft, target_probs)
    return Verdict(num_accepted, sample(stream(keys, start + num_accepted, Purpose.TARGET), law), path=path)


def accept_coupled(noise: Array, draft: Draft, target_probs: Array) -> Verdict:
    """Keep the drafts that are the tokens which ``noise[B, max_depth + 1, 2, W]`` draws from the target's laws."""
    tree = draft.topology
    if not tree.is_chain:
        depths = jnp.broadcast_to(tree.offsets, (len(noise), tree.size + 1))
        noise = jnp.take_along_axis(noise, depths[..., None, None], axis=1)
    # `residual` of no draft is what plain decoding draws from: p, normalised, and nothing where p is not finite.
    drawn = sample_with_noise(noise, residual(target_probs, jnp.zeros_like(target_probs)))
    # A law without mass draws token 0, which may not be written; and a draft's token may not come from its law.
    kept = is_guess(draft) & (draft.tokens == at_parents(drawn, tree))
    kept &= at_tokens(at_parents(target_probs, tree), draft.tokens) > 0
    if draft.probs is not None:
        kept &= at_tokens(draft.probs, draft.tokens) < jnp.inf
    if tree.is_chain:
        end = length_of_prefix(kept)
        return Verdict(end, jnp.take_along_axis(drawn, end[:, None], axis=1)[:, 0])
    num_accepted, path = follow(kept, tree)
    end = end_of(num_accepted, path)
    return Verdict(num_accepted, jnp.take_along_axis(drawn, end[:, None], axis=1)[:, 0], path=path)


def count_accepted(uniforms: Array, draft: Draft, bound: Array) -> Array:
    """How many drafted tokens are accepted: x with probability ``min(1, bound(x) / q(x))``, until the first failure.

    Leviathan et al. 2023, algorithm 1. Written ``u q < p``: strict, so that a token with p = 0 is never accepted even
    at u = 0, and without a division. A token with q = 0 or NaN was not drawn from q; it is refused.

    Args:
        uniforms: ``[B, K]`` in [0, 1).
        draft: tokens ``[B, K]`` and their laws ``[B, K, V]``.
        bound: ``[B, K, V]``, p for an exact rule.

    Returns:
        ``int32[B]`` in 0..K.
    """
    q = at_tokens(draft.probs, draft.tokens)
    return length_of_prefix((q > 0) & (uniforms * q < at_tokens(bound, draft.tokens)))


def next_probs(num_accepted: Array, draft: Draft, target_probs: Array, weight: Array | None = None) -> Array:
    """The law of the token after the accepted prefix, ``[B, V]``.

    After a rejection, what is left of p, times ``weight[B, 1]`` if given, when q is taken off it; after K acceptances p
    itself, which is what is left when nothing is taken off.
    """
    draft_probs = jnp.pad(draft.probs, ((0, 0), (0, 1), (0, 0)))
    at = num_accepted[:, None, None]
    p = jnp.take_along_axis(target_probs, at, axis=1)[:, 0]
    q = jnp.take_along_axis(draft_probs, at, axis=1)[:, 0]
    return residual(p if weight is None else weight * p, q)


def block_weights(draft: Draft, target_probs: Array) -> Array:
    """How much of the first i drafts' mass the target can take, ``[B, K + 1]``: ``w_i = min(1, w_{i-1} p/q)``, w_0 = 1.

    After Sun et al. 2024, algorithm 2. 0 behind a token that was not drawn from q.
    """
    p = at_tokens(target_probs[:, :-1], draft.tokens)
    q = at_tokens(draft.probs, draft.tokens)
    weights = [jnp.ones_like(target_probs[:, 0, 0])]
    for k in range(draft.tokens.shape[1]):
        mass = weights[-1] * p[:, k]
        weights.append(jnp.where(q[:, k] > 0, jnp.where(mass >= q[:, k], 1, mass / q[:, k]), 0))
    return jnp.stack(weights, axis=1)


def block_chances(weights: Array, draft: Draft, target_probs: Array) -> Array:
    """The chance that at least the first i drafts are kept, given that no more are, ``[B, K]`` for i = 1 .. K.

    ``l / (l + 1 - w_i)`` with ``l = sum_x max(w_i p(x) - q(x), 0)`` at the position behind them, and w_K for all K
    (Sun et al. 2024, algorithm 2).
    """
    weight, q = weights[:, 1:-1], draft.probs[:, 1:]
    mass = weight[..., None] * target_probs[:, 1:-1]
    left = jnp.where(q > 0, jnp.maximum(mass - q, 0), mass).sum(-1)
    # Where the target has no law the text ends; its missing mass counts as left.
    left = jnp.where(mass.sum(-1) > 0, left, weight)
    chances = jnp.where(weight >= 1, 1, left / (left + 1 - weight))
    return jnp.concatenate([chances, weights[:, 1:][:, -1:]], axis=1)  # the last is empty where K = 0


def _positions(start: Array, count: int) -> Array:
    """``int32[B, count]`` from ``start[B]`` on."""
    return start[:, None] + jnp.arange(count)
