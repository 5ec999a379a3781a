"""The policy that chooses the number of draft tokens, from round costs and recent acceptance rates at each position."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

RECENT = 32  # the number of last rounds from which a request's acceptance rate is estimated
_PRIOR = 4  # weight of the acceptance rate across all requests, in rounds of one request
# Prior acceptance rate, and its weight in rounds. With these values, the policy tries unseen positions, and soon drops
# bad ones.
_UNSEEN, _FEW = 0.9, 2
_MEMORY = 0.99  # decay of the statistics, per call
_MARGIN = 1.02  # factor by which another length must be better to replace the best one
_TRIAL, _PERIOD = 4, 256  # in calls: how long another length is tried, and the longest interval between trials

Rounds = Sequence[Sequence[int]]  # two lists with one entry per round: accepted tokens, intended draft length


class LengthPolicy:
    """A policy that chooses the number of draft tokens.

    For each position, the policy estimates how often a draft token is accepted if all tokens before it were accepted.
    These estimates also hold for a mix of easy and hard requests, for trees, and for drafters that stop early or
    rarely draft. A single rate for all positions would be too high in these cases.

    The policy tries every length at first, and later occasionally tries a neighbour of the best length. It uses past
    rounds only, never the noise of a future round, so its choices do not change the output distribution.
    """

    def __init__(self, max_draft_tokens: int):
        self._reached, self._accepted = np.zeros(max_draft_tokens), np.zeros(max_draft_tokens)  # across all requests
        self._best: int | None = None
        self._steps = itertools.cycle((1, -1))
        self._calls, self._period, self._trial = 0, 2 * _TRIAL, 0  # the interval grows to `_PERIOD`

    @property
    def max_draft_tokens(self) -> int:
        """The largest number of draft tokens."""
        return len(self._reached)

    def record(self, accepted: Sequence[int], num_draft_tokens: int) -> None:
        """Record how many draft tokens were accepted in each round, out of an intended `num_draft_tokens`."""
        self.record_counts(*_count_by_position((accepted, [num_draft_tokens] * len(accepted)), len(self._reached)))

    def record_counts(self, reached: np.ndarray, new: np.ndarray) -> None:
        """Record in how many rounds each draft position was verified, and in how many it was accepted."""
        self._reached = np.where(reached > 0, _MEMORY, 1) * self._reached + reached
        self._accepted = np.where(reached > 0, _MEMORY, 1) * self._accepted + new

    def next(self, lengths: Sequence[int], cost: Mapping[int, float], rows: Sequence[Rounds]) -> int:
        """Return the number of draft tokens for the next call.

        Args:
            lengths: the draft lengths to choose from, ascending.
            cost: seconds per round, for each length whose cost has been measured.
            rows: the last `RECENT` rounds of each decoding request.
        """
        unmeasured = [k for k in lengths if k not in cost]
        if unmeasured or len(lengths) == 1:
            return unmeasured[0] if unmeasured else lengths[0]
        tokens = self._tokens(rows)
        worth = {k: tokens[k] / cost[k] for k in lengths}
        best = max(lengths, key=worth.__getitem__)
        if self._best not in worth or worth[best] > _MARGIN * worth[self._best]:
            self._best = best
        self._calls += 1
        if self._calls == self._period:
            index = lengths.index(self._best) + next(self._steps)
            self._trial = lengths[index] if 0 <= index < len(lengths) else self._best
        if self._calls >= self._period + _TRIAL:
            self._calls, self._period = 0, min(2 * self._period, _PERIOD)
        return self._trial if self._calls >= self._period and self._trial in lengths else self._best

    def _tokens(self, rows: Sequence[Rounds]) -> np.ndarray:
        """Return the expected number of new tokens in a round that drafts 0, 1, ... tokens."""
        rates, rate = np.empty(len(self._reached)), _UNSEEN
        for position, (reached, accepted) in enumerate(zip(self._reached, self._accepted, strict=True)):
            rates[position] = rate = (accepted + _FEW * rate) / (reached + _FEW)
        recent: Rounds = [[*itertools.chain(*part)] for part in zip(*rows, strict=True)] or ([], [])
        reached, accepted = _count_by_position(recent, len(rates))
        prior = _PRIOR * max(len(rows), 1)
        rates = (accepted + prior * rates) / (reached + prior)
        return np.cumsum([1, *np.cumprod(rates)])


def _count_by_position(rounds: Rounds, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many rounds verified each position of a draft, and how many accepted it."""
    accepted, lengths = (np.asarray(part, np.int32)[:, None] for part in rounds)
    position = np.arange(num_positions)
    is_drafted = lengths > position
    return (is_drafted & (accepted >= position)).sum(0), (is_drafted & (accepted > position)).sum(0)
