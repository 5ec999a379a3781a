"""How far to draft: by what rounds of each length have cost, and what drafts were worth lately, place by place."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

RECENT = 32  # rounds of a request, by which its drafts are judged
_PRIOR = 4  # rounds that a request is taken to have had, with drafts as good as all others'
_UNSEEN, _FEW = 0.9, 2  # a rate of what nobody has seen, in so many rounds: some are needed to know, bad ones soon tell
_MEMORY = 0.99  # by call
_MARGIN = 1.02  # by how much another length must be better
_TRIAL, _PERIOD = 4, 256  # calls: another length is tried for so many, after so many at most; at first sooner

Rounds = Sequence[Sequence[int]]  # two: of each, drafts accepted, and how many tokens it was to draft


class Choice:
    """Chooses among numbers of tokens to draft, ascending.

    A draft's token at some place counts if all before it were accepted; how often it then is, place by place, is all
    that is asked. So texts of which some are easy and some hard are judged right, and so are trees, drafters that stop
    early and those that seldom guess, of which one rate for all places would expect too much.

    Each length is tried at first, and sometimes a neighbour of the one that is best. It looks at rounds that have been
    played, never at the noise of one to come, so what it chooses leaves the law of texts alone.
    """

    def __init__(self, most: int):
        self._reached, self._accepted = np.zeros(most), np.zeros(most)  # of all requests
        self._best: int | None = None
        self._steps = itertools.cycle((1, -1))
        self._calls, self._period, self._trial = 0, 2 * _TRIAL, 0

    def saw(self, accepted: Sequence[int], num_draft_tokens: int) -> None:
        """How many drafts a call has accepted, of each round of all rows in which it was to draft so many."""
        reached, new = _by_place((accepted, [num_draft_tokens] * len(accepted)), len(self._reached))
        self._reached = np.where(reached > 0, _MEMORY, 1) * self._reached + reached
        self._accepted = np.where(reached > 0, _MEMORY, 1) * self._accepted + new

    def next(self, lengths: Sequence[int], cost: Mapping[int, float], rows: Sequence[Rounds]) -> int:
        """Of the next call.

        Args:
            lengths: those that it may have.
            cost: seconds a round, of those that have been measured.
            rows: of each that writes its last `RECENT` rounds.
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
        """Of a round that drafts 0, 1, ... tokens, how many it is expected to bring."""
        rates, rate = np.empty(len(self._reached)), _UNSEEN
        for place, (reached, accepted) in enumerate(zip(self._reached, self._accepted, strict=True)):
            rates[place] = rate = (accepted + _FEW * rate) / (reached + _FEW)
        recent = [[*itertools.chain(*part)] for part in zip(*rows, strict=True)] or ([], [])
        reached, accepted = _by_place(recent, len(rates))
        prior = _PRIOR * max(len(rows), 1)
        rates = (accepted + prior * rates) / (reached + prior)
        return np.cumsum([1, *np.cumprod(rates)])


def _by_place(rounds: Rounds, places: int) -> tuple[np.ndarray, np.ndarray]:
    """How many rounds came to judge each place of a draft, and how many accepted it."""
    accepted, lengths = (np.asarray(part, np.int32)[:, None] for part in rounds)
    place = np.arange(places)
    could = lengths > place
    return (could & (accepted >= place)).sum(0), (could & (accepted > place)).sum(0)
