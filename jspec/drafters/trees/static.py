# pyright: reportUnnecessaryIsInstance=false
"""A static tree of draft tokens, from any drafter that returns the distribution of the next token."""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.core.probs import sample_with_noise
from jspec.core.sampling import token_probs, without_filters
from jspec.core.tree import Tree
from jspec.core.types import Draft, PyTree, Verdict
from jspec.drafters.base import Context, Drafter, DraftSource, as_tree, kind_of
from jspec.drafters.capabilities import WrapperDrafter
from jspec.drafters.chunked_prefill import prefill_chunk
from jspec.drafters.drafts import fit_vocabulary
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.drafters.standalone.model import as_drafter


@functools.partial(jax.tree_util.register_dataclass, data_fields=["draft"], meta_fields=["tree", "replacement"])
@dataclasses.dataclass(frozen=True)
class TreeDrafter(WrapperDrafter[tuple[PyTree, Array]]):
    """A fixed-shape tree drafter that draws each node's children from the distribution of `draft` at that node.

    Children are drawn one after another. Each is drawn without replacement: from the distribution without its earlier
    siblings' tokens, renormalised (Jeon et al. 2024, Recursive Speculative Decoding; Chen et al. 2024, Sequoia). If no
    probability remains, as in greedy decoding, the next child is the most likely of the other tokens, with a one-hot
    distribution. Under the rule "coupled", all siblings are drawn with the target's own noise, so they are the tokens
    that the target is most likely to draw.

    Attributes:
        draft: an `AutoregressiveDrafter`, or a model.
        tree: a static `jspec.Tree`, whose nodes are renumbered by depth.
        replacement: whether to draw children independently of each other (Miao et al. 2024, SpecInfer). This is not
            available under "coupled".
    """

    draft: DraftSource
    tree: Tree
    replacement: bool = False

    @property
    def inner(self) -> AutoregressiveDrafter[PyTree, PyTree]:
        return cast(AutoregressiveDrafter[PyTree, PyTree], self.draft)

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", as_branching(self.draft))
        object.__setattr__(self, "tree", as_tree(self.tree))
        if not isinstance(self.replacement, bool):
            raise TypeError(f"replacement must be True or False; got {self.replacement!r}.")

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> tuple[PyTree, Array]:
        """Return the state of `draft`, and the start of the last tree, ``int32[B]``."""
        return self.inner.init(tokens, num_slots, signals), jnp.zeros(len(tokens), jnp.int32)

    def read(
        self, state: tuple[PyTree, Array], tokens: Array, start: Array, count: Array, signals: PromptSignals
    ) -> tuple[PyTree, Array]:
        """Prefill the sequence's next piece with `draft`. See `jspec.drafters.chunked_prefill.prefill_chunk`."""
        return prefill_chunk(self.inner, state[0], tokens, start, count, signals), state[1]

    def propose(
        self, state: tuple[PyTree, Array], context: Context, num_draft_tokens: int
    ) -> tuple[Draft, tuple[PyTree, Array]]:
        """Draft level by level: read one level in a single pass of `draft`, then draw the next level."""
        tree = self.tree
        logits, carry = self.inner.begin(state[0], context, tree)
        tokens, probs = self._draw(logits[:, None], 0, None, context)
        for depth in range(1, tree.max_depth):
            newest = tokens[:, -np.count_nonzero(tree.offsets == depth) :]
            logits, carry = self.inner.extend(carry, newest, tree.level(depth), context)
            drawn = self._draw(logits, depth, tokens, context)
            tokens, probs = (jnp.concatenate(parts, axis=1) for parts in zip((tokens, probs), drawn, strict=True))
        return Draft(tokens, probs, tree), (self.inner.end(carry), context.lengths - 1)

    def commit(
        self, state: tuple[PyTree, Array], draft: Draft, verdict: Verdict, signals: TargetSignals
    ) -> tuple[PyTree, Array]:
        """Keep only the accepted path, and not the rest of the tree, in the state of `draft`."""
        inner, start = state
        inner = inner if verdict.path is None else self.inner.keep(inner, start, verdict.path)
        return self.inner.commit(inner, draft, verdict, signals), start

    def _draw(self, logits: Array, depth: int, tokens: Array | None, context: Context) -> tuple[Array, Array]:
        """Draw the next level ``[B, S']`` and its distributions, from ``logits[B, S, V]`` after the nodes at `depth`.

        Args:
            tokens: ``int32[B, n]``, the tree so far.
        """
        nodes = np.flatnonzero(self.tree.offsets == depth)
        children = self.tree.children[nodes]
        most = int((children > 0).sum(1).max())
        seen = None if tokens is None else self.tree.ancestors[nodes][:, 1 : tokens.shape[1] + 1]
        logits = fit_vocabulary(logits, context.vocab_size)
        probs_of = functools.partial(token_probs, logits, token_counts=context.token_counts, drafted=tokens, seen=seen)
        probs = probs_of(context.transforms)
        spare = probs_of(without_filters(context.transforms)) if most > 1 else None
        # Every node has its own noise, because traversal looks at cousins before it decides between their parents.
        noise = context.noise[:, depth][:, self.tree.rank_at_depth[children[:, :most]]]
        drawn = _siblings(noise, probs, spare, most, self.replacement)
        there = np.flatnonzero(children[:, :most] > 0)
        tokens, probs = (part.reshape(len(part), -1, *part.shape[3:])[:, there] for part in drawn)
        return tokens, probs


def as_branching(draft: object) -> AutoregressiveDrafter[PyTree, PyTree]:
    """Return `draft` as a drafter that can branch; raise TypeError if it cannot."""
    drafter = as_drafter(draft)
    if isinstance(drafter, Drafter) and not isinstance(drafter, AutoregressiveDrafter):
        raise TypeError(
            f"draft is of type {kind_of(drafter)}, which cannot branch, because it does not return the "
            "distribution after a token; use a jspec.drafters.AutoregressiveDrafter."
        )
    return cast(AutoregressiveDrafter[PyTree, PyTree], drafter)


def _siblings(noise: Array, probs: Array, spare: Array | None, count: int, replacement: bool) -> tuple[Array, Array]:
    """Draw the children of each node in a level, and return them with their distributions given earlier siblings.

    Args:
        noise: ``float32[B, S, count, 2, W]``.
        probs: ``float32[B, S, V]``, the distribution after each node.
        spare: the unfiltered distribution. Once `probs` has no mass left, the most likely remaining token under `spare`
            is drawn.

    Returns:
        ``int32[B, S, count]``, and ``float32[B, S, count, V]``.
    """
    if count == 1 or spare is None:
        return sample_with_noise(noise[:, :, 0], probs)[:, :, None], probs[:, :, None]
    index, left = jnp.arange(probs.shape[-1])[None, None], probs
    tokens: list[Array] = []
    child_probs: list[Array] = []
    for rank in range(count):
        mass = left.sum(-1, keepdims=True)
        top_token = jnp.argmax(spare, axis=-1)
        one_hot = jnp.where((index == top_token[..., None]) & (spare > 0), 1.0, 0.0)
        drawn = sample_with_noise(noise[:, :, rank], left)
        tokens.append(jnp.where(mass[..., 0] > 0, drawn, top_token))
        # The first child keeps the distribution unchanged: dividing by almost 1 would change its rounding.
        child_probs.append(jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1) if rank else left, one_hot))
        if not replacement:
            taken = index == tokens[-1][..., None]
            left, spare = jnp.where(taken, 0, left), jnp.where(taken, 0, spare)
    return jnp.stack(tokens, axis=2).astype(jnp.int32), jnp.stack(child_probs, axis=2)
