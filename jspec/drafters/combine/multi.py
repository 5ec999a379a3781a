# pyright: reportUnnecessaryIsInstance=false
"""A combination of several drafters in one tree, with one chain per drafter after the last committed token."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Self, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from convert.heads import files as head_files
from convert.json_fields import integer
from jspec.acceptance.path import at_path, tokens_along
from jspec.acceptance.walk import is_guess, length_of_prefix
from jspec.core.row_ops import prefix_mask
from jspec.core.tree import Tree
from jspec.core.types import Draft, PyTree, Verdict, check_count
from jspec.drafters.base import Context, Drafter, DraftSource, declared, kind_of
from jspec.drafters.capabilities import features_of, features_of_all, least, num_top_tokens_of
from jspec.drafters.chunked_prefill import prefill_chunk
from jspec.drafters.drafts import as_draft, mask_draft, shared_vocabulary
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.model import ModelDrafter, as_part
from jspec.models.llama import Llama

_States = tuple[PyTree, ...]

_KIND = "several"  # in config.json


@functools.partial(jax.tree_util.register_dataclass, data_fields=["drafts"], meta_fields=["num_draft_tokens"])
@dataclasses.dataclass(frozen=True)
class MultiDrafter(Drafter[_States]):
    """A drafter that drafts one chain with each of several drafters or models. One pass verifies all chains as a tree.

    This is SpecInfer's merge-based speculation (Miao et al. 2024, section 3), without the merge. Two chains that start
    with the same token remain two branches, each verified against the distribution that it was drawn from. If the first
    branch is rejected, the second is verified against the residual of the target's distribution. Therefore, put the
    best drafter first.

    If branches start with the same tokens, the rules "rejection" and "traversal" follow only the first branch, and may
    stop at its first wrong token. In greedy decoding branches often start with the same tokens. Under the rule
    "coupled", all drafters draw with the target's noise, and the rule follows the branch that continues longest.

    Attributes:
        drafts: chain drafters (including heads) or models. All share the target's vocabulary.
        num_draft_tokens: K, the number of tokens that each drafter drafts.
    """

    drafts: Sequence[DraftSource]
    num_draft_tokens: int = 4

    def __post_init__(self) -> None:
        several = isinstance(self.drafts, Sequence)
        if not several or len(self.drafts) < 2:
            got = f"a sequence of length {len(self.drafts)}" if several else type(self.drafts).__name__
            raise ValueError(
                f"drafts must be a sequence of at least two drafters or models, such as [a, b]; got {got}."
            )
        drafts = tuple(as_part(f"drafts[{i}]", draft, forwards_signals=True) for i, draft in enumerate(self.drafts))
        object.__setattr__(self, "drafts", drafts)
        check_count("num_draft_tokens", self.num_draft_tokens)

    @classmethod
    def load(cls, path: str | Path, target: Llama | None = None, dtype: DTypeLike | None = None) -> Self:
        """Load drafters that were written by `save`. `dtype` is the same as in `jspec.load`; `target` is not used.

        Raises:
            convert.CheckpointError: the files have another format, or are damaged.
        """
        raw = head_files.read_own(path := Path(path), _KIND)
        drafts = [ModelDrafter.load(path / str(i), target, dtype) for i in range(integer(raw, "num_drafts"))]
        return cls(drafts, integer(raw, "num_draft_tokens"))

    def save(self, path: str | Path) -> Path:
        """Write the models to a new directory, each into its own Hugging Face subdirectory (`ModelDrafter.save`).

        Raises:
            convert.CheckpointError: `path` exists or cannot be written.
            TypeError: one of the drafters is not a model.
        """
        fields = {"num_drafts": len(self.drafts), "num_draft_tokens": self.num_draft_tokens}
        models: list[ModelDrafter] = []
        for draft in self.parts:
            if not isinstance(draft, ModelDrafter):
                raise TypeError(
                    "A MultiDrafter can be saved only if all its drafters are models, but one is of type "
                    f"{kind_of(draft)}; save that drafter by itself."
                )
            models.append(draft)
        with head_files.new_own(Path(path), _KIND, fields) as directory:
            for i, draft in enumerate(models):
                draft.save(directory / str(i))
        return Path(path)

    @property
    def tree(self) -> Tree:
        """The chains of all drafters, side by side, with nodes numbered by depth."""
        count = len(self.drafts)
        return Tree((0,) * count + tuple(range(1, count * (self.num_draft_tokens - 1) + 1)))

    @property
    def vocab_size(self) -> int | None:
        return shared_vocabulary(type(self).__name__, *(part.vocab_size for part in self.parts))

    @property
    def max_positions(self) -> int | None:
        """The smallest of all drafters' limits."""
        return least(declared(part).max_positions for part in self.parts)

    @property
    def features(self) -> tuple[int, ...]:
        return features_of_all(*self.parts)

    @property
    def num_top_tokens(self) -> int:
        return max(map(num_top_tokens_of, self.parts))

    @property
    def parts(self) -> tuple[Drafter[PyTree], ...]:
        return cast(tuple[Drafter[PyTree], ...], tuple(self.drafts))

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> _States:
        return tuple(
            part.init(tokens, num_slots, signals.for_part(self.features, features_of(part))) for part in self.parts
        )

    def read(self, state: _States, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> _States:
        """Prefill the sequence's next piece with all drafters. See `jspec.drafters.chunked_prefill.prefill_chunk`."""
        return tuple(
            prefill_chunk(part, own, tokens, start, count, signals.for_part(self.features, features_of(part)))
            for part, own in zip(self.parts, state, strict=True)
        )

    def propose(self, state: _States, context: Context, num_draft_tokens: int) -> tuple[Draft, _States]:
        """Draft with one drafter after another, each with its own noise.

        All drafters except one may lack the tokens that a round commits, because they never read these tokens.
        """
        length = self.num_draft_tokens
        context = dataclasses.replace(context, unread=context.unread + length - 1)
        drafts: list[Draft] = []
        states: list[PyTree] = []
        for i, (part, own) in enumerate(zip(self.parts, state, strict=True)):
            mine = dataclasses.replace(context, noise=context.noise[:, :, i : i + 1])
            draft, own = part.propose(own, mine, length)
            drafts, states = [*drafts, as_draft(part, draft, mine, length)], [*states, own]
        tokens, valid = _beside([one.tokens for one in drafts]), _beside([is_guess(one) for one in drafts])
        known = [one.probs for one in drafts if one.probs is not None]
        probs = _beside(known) if len(known) == len(drafts) else None
        return Draft(tokens, probs, self.tree, valid), tuple(states)

    def commit(self, state: _States, draft: Draft, verdict: Verdict, signals: TargetSignals) -> _States:
        """Pass each drafter its own chain.

        The chain's tokens count as accepted up to the first one that differs from the accepted path.

        A drafter that reads the target's hidden states needs them for the whole sequence. Such a drafter receives the
        accepted path instead, whichever drafter proposed it.
        """
        assert verdict.path is not None, "rules that do not support trees are rejected"
        text, before = tokens_along(draft, verdict), prefix_mask(verdict.num_accepted, self.num_draft_tokens)
        nodes = jnp.maximum(verdict.path - 1, 0)[..., None]
        probs = None if draft.probs is None else jnp.take_along_axis(draft.probs, nodes, axis=1)
        path = mask_draft(Draft(text[:, :-1], probs, valid=before), before, text[:, :-1])
        states: list[PyTree] = []
        for i, (part, own) in enumerate(zip(self.parts, state, strict=True)):
            mine = signals.for_part(self.features, features_of(part), part.num_top_tokens)
            if features_of(part):
                chain, accepted, next_token = path, verdict.num_accepted, verdict.next_token
                judged = functools.partial(at_path, verdict=verdict)
            else:
                chain = _chain(draft, i, len(self.drafts))
                accepted = length_of_prefix(is_guess(chain) & (chain.tokens == path.tokens) & before)
                next_token = jnp.take_along_axis(text, accepted[:, None], axis=1)[:, 0]
                judged = functools.partial(_judged, which=i, count=len(self.drafts))
            states.append(part.commit(own, chain, Verdict(accepted, next_token), mine.map(judged)))
        return tuple(states)


def _chain(draft: Draft, which: int, count: int) -> Draft:
    """Return chain number `which` of a draft that has `count` chains side by side."""

    def part(leaf: Array) -> Array:
        return leaf[:, which::count]

    return jax.tree.map(part, dataclasses.replace(draft, tree=None))


def _judged(values: Array, which: int, count: int) -> Array:
    """Select the values at node 0 and chain number `which` from all nodes' values, ``values[B, N + 1, ...]``."""
    return jnp.concatenate([values[:, :1], values[:, 1 + which :: count]], axis=1)


def _beside(chains: Sequence[Array]) -> Array:
    """Interleave n arrays ``[B, K, ...]`` into ``[B, K * n, ...]``: all entries at the first depth come first."""
    stacked = jnp.stack(chains, axis=2)
    return stacked.reshape(len(stacked), -1, *stacked.shape[3:])
