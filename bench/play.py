"""Decode the same prompts with drafts of any shape: timed calls, acceptance by rank, and round costs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import jspec
from bench.drafters import in_batches, joined
from bench.subject import Request, Subject
from jspec.core.keys import trial_keys
from jspec.core.origins import KEPT
from jspec.tuning import tune_chain as tuning
from jspec.tuning import tune_tree as tree_tuning
from jspec.tuning.tune_chain import acceptance_rates


@dataclasses.dataclass(frozen=True)
class Play:
    """The prompts and options that all settings share.

    Attributes:
        request: all prompts, which are decoded in batches of `batch`.
        ends: the EOS token ids.
    """

    subject: Subject
    request: Request
    batch: int
    new_tokens: int
    temperature: float
    ends: tuple[int, ...] = ()

    def plain(self, limit: int = 0) -> Callable[[], list[jspec.Output]]:
        """Return a call that decodes without a draft, up to `limit` new tokens if that is not 0."""
        return self._call(jspec.generate, (self.subject.target,), limit)

    def drafted(self, drafter: Any, limit: int = 0, **options: Any) -> Callable[[], list[jspec.Output]]:
        """Return a call that drafts with `drafter`."""
        return self._call(jspec.speculative_generate, (self.subject.target, drafter), limit, **options)

    def _call(self, decode: Any, models: tuple, limit: int, **options: Any) -> Callable[[], list[jspec.Output]]:
        options |= {"max_new_tokens": self.new_tokens, "eos_ids": self.ends, "batch": self.batch}
        return in_batches(decode, models, self.request, self.temperature, limit, **options)

    def run(self, setting: tuning.Setting, limit: int, trial: int, accept: Any) -> jspec.Output:
        """Decode the first batch, with the signature that `jspec.tuning.tune_chain` expects."""
        tokens, lengths, keys = (part[: self.batch] for part in self.request)
        one = dataclasses.replace(self, request=(tokens, lengths, trial_keys(keys, trial)), ends=())
        if setting == 0:
            return one.plain(limit)()[0]
        options = (
            {"drafter": branching(self.subject.draft, setting)}
            if isinstance(setting, jspec.Tree)
            else (chain(self.subject.draft, setting))
        )
        return one.drafted(limit=limit, accept=accept, **options)()[0]


def branching(draft: Any, tree: jspec.Tree, replacement: bool = False) -> Any:
    """Return `draft` as a drafter for `tree`. Token recycling uses only the tree's number of nodes."""
    if isinstance(draft, jspec.NGramDrafter):
        return dataclasses.replace(draft, tree=tree)
    if isinstance(draft, jspec.TokenRecyclingDrafter):
        return jspec.TokenRecyclingDrafter(tree.size)
    return jspec.TreeDrafter(draft, tree, replacement)


def chain(draft: Any, length: int) -> dict[str, Any]:
    """Return the options of `Play.drafted` that make `draft` draft a chain of `length` tokens."""
    if isinstance(draft, jspec.NGramDrafter):
        return {"drafter": draft, "num_draft_tokens": length}
    return {"drafter": branching(draft, jspec.Tree.chain(length))}


def fans(play: Play, accept: Any, children: int, replacement: bool) -> np.ndarray:
    """Return how often one of 1, 2, ... `children` candidates for one token is accepted.

    A missing candidate counts as rejected. For token recycling, the number of candidates is the maximum in any of its
    trees.
    """
    draft = play.subject.draft
    if isinstance(draft, jspec.TokenRecyclingDrafter):
        out = joined(play.drafted(draft, accept=accept, record=True)())
        return np.cumsum(by_rank(out, draft.tree, draft.num_top_tokens))
    trees = [jspec.Tree.branching((count,)) for count in range(1, children + 1)]
    outs = [joined(play.drafted(branching(draft, tree, replacement), accept=accept)()) for tree in trees]
    return np.array([float(acceptance_rates([out])[0]) for out in outs])


def by_rank(out: Any, tree: jspec.Tree, ranks: int) -> np.ndarray:
    """Return the share of rounds in which each child of node 0 was kept, by rank, from recorded drafts of `tree`.

    Returns:
        ``float64[ranks]``, with 0 for ranks that `tree` does not have.
    """
    first = tree.children[0][tree.children[0] > 0]
    kept = (np.asarray(out.record.fates)[:, :, first - 1] == KEPT).sum((0, 1))
    return np.pad(kept / int(np.sum(out.stats.rounds)), (0, ranks - first.size))


def costs(play: Play, accept: Any, depth: int, children: int) -> tuple[float, tree_tuning.Costs]:
    """Return the seconds per token of plain decoding and the cost of rounds, as measured by `jspec tune`.

    The cost of rounds is measured with chains and with single nodes that have many children.
    """
    run = functools.partial(play.run, accept=accept)
    chains = tuning.measure(run, play.new_tokens, depth)
    return chains.plain_seconds, tree_tuning.fans(run, chains, play.new_tokens, children)[1]


def whole_over_rest(out: Any, batch: int) -> float:
    """Return the number of all rounds, divided by the number of rounds after the first round of every batch."""
    rounds = np.asarray(out.stats.rounds)
    played = [int(rounds[i : i + batch].max()) for i in range(0, rounds.size, batch)]
    return sum(played) / max(1, sum(played) - len(played))


def rounds_alone(times: dict[str, np.ndarray], name: str, shares: dict[str, float]) -> np.ndarray:
    """Return the speed-up over plain decoding, turn by turn, without prefill.

    Args:
        times: the times of the calls and of their starts, which prefill the prompts and run one round.
        shares: the `whole_over_rest` of every call.
    """
    plain, drafted = ((times[one] - times[f"{one}, start"]) * shares[one] for one in ("plain", name))
    return plain / drafted


def with_starts(calls: dict[str, Callable[..., Any]]) -> dict[str, Callable[[], Any]]:
    """Return each call and its start: the same call, limited to one new token, which runs a prefill and one round."""
    made: dict[str, Callable[[], Any]] = {name: call() for name, call in calls.items()}
    return made | {f"{name}, start": call(limit=1) for name, call in calls.items()}
