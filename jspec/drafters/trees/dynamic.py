"""A dynamic tree of draft tokens, built anew in each round from the tokens that are most likely to be accepted."""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.core.probs import foreseen
from jspec.core.sampling import token_probs, without_filters
from jspec.core.tree import Branches, DynamicTree, Level, Tree
from jspec.core.types import Draft, PyTree, Verdict, check_counts, pytree
from jspec.drafters.base import Context, DraftSource
from jspec.drafters.capabilities import WrapperDrafter
from jspec.drafters.chunked_prefill import prefill_chunk
from jspec.drafters.drafts import fit_vocabulary
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.drafters.trees.static import as_branching
from jspec.models.kv_cache import whole_tiles

# How strongly the search expects the target to draw the same token as the draft. Both draw with the same noise, from
# distributions that differ slightly. The value is not tuned; `python -m bench trees` measures trees with it.
_SHARPNESS = 2.0

_State = tuple[PyTree, Array, Array]


@pytree
class _Pool:
    """All nodes that the search has examined; each array is ``[B, M]``.

    Attributes:
        scores: the sum of log-probabilities along the branch down to each node.
        tokens: the draft tokens.
        parents: the index of each node's parent in the pool; -1 if the parent is the last committed token.
        slots: each node's number in the order in which `draft` has read the nodes; 0 for a node that it has not read.
    """

    scores: Array
    tokens: Array
    parents: Array
    slots: Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["draft"], meta_fields=["num_nodes", "max_depth", "width"]
)
@dataclasses.dataclass(frozen=True)
class DynamicTreeDrafter(WrapperDrafter[_State]):
    """A drafter that builds a new tree for each row in each round: the `num_nodes` most likely nodes under `draft`.

    The search goes level by level. Among the children of `width` nodes, the `width` most likely are read next (Li et
    al. 2024, EAGLE-2; Wang et al. 2024, OPT-Tree). The search knows the noise with which the target will draw, so it
    can predict the drawn token at any temperature. Therefore only the rule "coupled" can verify the tree. In greedy
    decoding, "most likely" means most likely under the draft's own distribution.

    Attributes:
        draft: an `AutoregressiveDrafter`, or a model.
        num_nodes: N, the number of draft tokens that the target verifies in one pass.
        max_depth: the largest number of draft tokens that one round can accept.
        width: the number of nodes per level that `draft` reads, in one pass per level.
    """

    draft: DraftSource
    num_nodes: int
    max_depth: int
    width: int = 8

    @property
    def inner(self) -> AutoregressiveDrafter[PyTree, PyTree]:
        return cast(AutoregressiveDrafter[PyTree, PyTree], self.draft)

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", as_branching(self.draft))
        check_counts(num_nodes=self.num_nodes, max_depth=self.max_depth, width=self.width)
        most = self.width + self.width**2 * (self.max_depth - 1)
        if self.num_nodes > most:
            raise ValueError(
                f"num_nodes={self.num_nodes} is more than the {most} nodes that a search with width={self.width} "
                f"and max_depth={self.max_depth} visits; use fewer nodes, or a wider search."
            )
        if self.num_nodes < self.max_depth:
            raise ValueError(
                f"max_depth={self.max_depth} cannot be reached with num_nodes={self.num_nodes}; use at "
                "least as many nodes as levels."
            )

    @property
    def tree(self) -> DynamicTree:
        """The size and depth of every tree."""
        return DynamicTree(None, int(self.num_nodes), int(self.max_depth))

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> _State:
        """Return the state of `draft`, the start of the last tree ``int32[B]``, and the slot of each tree node."""
        batch, more = len(tokens), max(0, self.width * (self.max_depth - 1) - self.num_nodes)
        slots = jnp.zeros((batch, self.num_nodes + 1), jnp.int32)
        return (
            self.inner.init(tokens, whole_tiles(num_slots + more), signals),
            jnp.zeros(batch, jnp.int32),
            slots,
        )

    def read(self, state: _State, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> _State:
        """Prefill the sequence's next piece with `draft`. See `jspec.drafters.chunked_prefill.prefill_chunk`."""
        return prefill_chunk(self.inner, state[0], tokens, start, count, signals), *state[1:]

    def propose(self, state: _State, context: Context, num_draft_tokens: int) -> tuple[Draft, _State]:
        """Search, then draft the `num_nodes` most likely nodes that the search found."""
        batch, width = context.lengths.size, self.width
        room = cast(Tree, DynamicTree(None, width * self.max_depth, self.max_depth))  # `begin` reads its size and depth
        logits, carry = self.inner.begin(state[0], context, room)
        logits, scores = logits[:, None], jnp.zeros((batch, 1), jnp.float32)
        seen, read, beams = jnp.ones((batch, 1, 1), bool), jnp.zeros((batch, 0), jnp.int32), jnp.full((batch, 1), -1)
        pools: list[_Pool] = []
        size = 0
        for depth in range(self.max_depth):
            log_probs = self._log_probs(logits, depth, read, seen[..., 1:], context)
            count = min(width, log_probs.shape[-1])
            values, tokens = lax.top_k(scores[..., None] + log_probs, count)
            found, tokens = values.reshape(batch, -1), tokens.reshape(batch, -1).astype(jnp.int32)
            scores, best = lax.top_k(found, min(width, found.shape[1]))
            # Avoid a scatter over rows, which is a loop on TPUs. The last level is not read.
            numbers = 1 + read.shape[1] + jnp.arange(best.shape[1])
            chosen = (best[..., None] == jnp.arange(found.shape[1])[None, None]) & (depth + 1 < self.max_depth)
            slots = jnp.where(chosen, numbers[None, :, None], 0).sum(1, dtype=jnp.int32)
            pools.append(_Pool(found, tokens, jnp.repeat(beams, count, axis=1), slots))
            if depth + 1 == self.max_depth:
                break
            newest, parents, beams, size = _at(tokens, best), best // count, size + best, size + found.shape[1]
            own = jnp.broadcast_to(jnp.eye(best.shape[1], dtype=bool), (batch, best.shape[1], best.shape[1]))
            seen = jnp.concatenate([jnp.take_along_axis(seen, parents[..., None], axis=1), own], axis=2)
            read = jnp.concatenate([read, newest], axis=1)
            branches = Branches(jnp.full(best.shape, depth + 1), seen)
            logits, carry = self.inner.extend(carry, newest, Level(depth + 1, parents, branches), context)
        draft, slots = self._top_nodes(jax.tree.map(_joined, *pools))
        return draft, (self.inner.end(carry), context.lengths - 1, slots)

    def commit(self, state: _State, draft: Draft, verdict: Verdict, signals: TargetSignals) -> _State:
        """Keep only the accepted path, and not the rest of the search, in the state of `draft`."""
        inner, start, slots = state
        assert verdict.path is not None, "rules that do not support trees are rejected"
        # A node that was not read is the last one on its path, and will be read later.
        inner = self.inner.keep(inner, start, _at(slots, verdict.path))
        return self.inner.commit(inner, draft, verdict, signals), start, slots

    def _log_probs(self, logits: Array, depth: int, read: Array, seen: Array, context: Context) -> Array:
        """Return the log-probability ``[B, S, V]`` that the target draws each token after each node of a level."""
        logits = fit_vocabulary(logits, context.vocab_size)
        probs_of = functools.partial(token_probs, logits, token_counts=context.token_counts, drafted=read, seen=seen)
        drawn = foreseen(context.noise[:, None, depth, 0], probs_of(context.transforms), _SHARPNESS)
        greedy = context.transforms.temperature[:, None, None] == 0
        return jnp.where(greedy, jnp.log(probs_of(without_filters(context.transforms))), drawn)

    def _top_nodes(self, pool: _Pool) -> tuple[Draft, Array]:
        """Return the best nodes as a draft, parents first, and the slots of these nodes, ``int32[B, N + 1]``."""
        batch, missing = len(pool.scores), max(0, self.num_nodes - pool.scores.shape[1])
        padding = _Pool(
            *(
                jnp.full((batch, missing), value, leaf.dtype)
                for value, leaf in zip((-jnp.inf, 0, -1, 0), jax.tree.leaves(pool), strict=True)
            )
        )
        pool = jax.tree.map(_joined, pool, padding)
        # A parent is at least as likely as its child and comes before it, so the parent is chosen first if they tie.
        chosen = jnp.sort(lax.top_k(pool.scores, self.num_nodes)[1], axis=1)
        kept: _Pool = jax.tree.map(functools.partial(_at, index=chosen), pool)
        valid = kept.scores > -jnp.inf
        above = (chosen[:, None, :] == kept.parents[..., None]) & valid[..., None]
        parents = jnp.where(above.any(-1), jnp.argmax(above, axis=-1) + 1, 0).astype(jnp.int32)
        draft = Draft(jnp.where(valid, kept.tokens, 0), None, dataclasses.replace(self.tree, parents=parents), valid)
        return draft, jnp.pad(kept.slots, ((0, 0), (1, 0)))


def _joined(*parts: Array) -> Array:
    """Concatenate several arrays ``[B, M]`` into one, ``[B, sum of M]``."""
    return jnp.concatenate(parts, axis=1)


def _at(rows: Array, index: Array) -> Array:
    """Return ``rows[b, index[b]]``."""
    return jnp.take_along_axis(rows, index, axis=1)
