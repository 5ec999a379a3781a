"""The choice of the number of draft tokens, from the cost of rounds and the recent acceptance rate at each position."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

RECENT = 32  # the number of a request's last rounds that estimate its acceptance rate
_PRIOR = 4  # weight of the acceptance rate across all requests, in rounds of one request
_UNSEEN, _FEW = 0.9, 2  # prior acceptance rate, and its weight in rounds: tries unseen positions, soon drops bad ones
_MEMORY = 0.99  # decay of the statistics, per call
_MARGIN = 1.02  # factor by which another length must be better to replace the best one
_TRIAL, _PERIOD = 4, 256  # in calls: how long another length is tried, and the longest interval between trials

Rounds = Sequence[Sequence[int]]  # two lists, by round: accepted draft tokens, and the intended draft length


class Choice:
    """A policy that chooses the number of draft tokens.

    For each position, the policy estimates how often a draft token is accepted if all tokens before it were accepted.
    These estimates also hold for a mix of easy and hard requests, for trees, and for drafters that stop early or
    seldom draft. A single rate for all positions would be too high in these cases.

    The policy tries each length at first, and later sometimes a neighbour of the best length. It uses past rounds
    only, never the noise of a future round, so its choices do not change the output distribution.
    """

    def __init__(self, most: int):
        self._reached, self._accepted = np.zeros(most), np.zeros(most)  # across all requests
        self._best: int | None = None
        self._steps = itertools.cycle((1, -1))
        self._calls, self._period, self._trial = 0, 2 * _TRIAL, 0  # the interval grows to `_PERIOD`

    def saw(self, accepted: Sequence[int], num_draft_tokens: int) -> None:
        """Record how many draft tokens each row's rounds accepted, out of an intended `num_draft_tokens`."""
        reached, new = _by_place((accepted, [num_draft_tokens] * len(accepted)), len(self._reached))
        self._reached = np.where(reached > 0, _MEMORY, 1) * self._reached + reached
        self._accepted = np.where(reached > 0, _MEMORY, 1) * self._accepted + new

    def next(self, lengths: Sequence[int], cost: Mapping[int, float], rows: Sequence[Rounds]) -> int:
        """Return the number of draft tokens for the next call.

        Args:
            lengths: the possible numbers, ascending.
            cost: seconds per round, for each number that has been measured.
            rows: the last `RECENT` rounds of each decoding request.
        """
        unknown = [k for k in lengths if k not in cost]
        if unknown or len(lengths) == 1:
            return unknown[0] if unknown else lengths[0]
        tokens = self._tokens(rows)
        worth = {k: tokens[k] / cost[k] for k in lengths}
        best = max(lengths, key=worth.__getitem__)
        if self._best not in worth or worth[best] > _MARGIN * worth[self._best]:
            self._best = best
        self._calls += 1
        if self._calls == self._period:
            place = lengths.index(self._best) + next(self._steps)
            self._trial = lengths[place] if 0 <= place < len(lengths) else self._best
        if self._calls >= self._period + _TRIAL:
            self._calls, self._period = 0, min(2 * self._period, _PERIOD)
        return self._trial if self._calls >= self._period and self._trial in lengths else self._best

    def _tokens(self, rows: Sequence[Rounds]) -> np.ndarray:
        """Return the expected number of new tokens in a round that drafts 0, 1, ... tokens."""
        rates, rate = np.empty(len(self._reached)), _UNSEEN
        for place, (reached, accepted) in enumerate(zip(self._reached, self._accepted, strict=True)):
            rates[place] = rate = (accepted + _FEW * rate) / (reached + _FEW)
        recent = [[*itertools.chain(*part)] for part in zip(*rows, strict=True)] or ([], [])
        reached, accepted = _by_place(recent, len(rates))
        prior = _PRIOR * max(len(rows), 1)
        rates = (accepted + prior * rates) / (reached + prior)
        return np.cumsum([1, *np.cumprod(rates)])


def _by_place(rounds: Rounds, places: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many rounds verified each position of a draft, and how many accepted it."""
    accepted, lengths = (np.asarray(part, np.int32)[:, None] for part in rounds)
    place = np.arange(places)
    could = lengths > place
    return (could & (accepted >= place)).sum(0), (could & (accepted > place)).sum(0)
