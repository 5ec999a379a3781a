"""How far to draft: by what rounds of each length have cost, and what drafts were worth lately."""

import itertools
from collections.abc import Mapping, Sequence

_PRIOR = 4  # drafts that a request is taken to have had, as good as all others'
_MEMORY = 0.99  # by call
_MARGIN = 1.02  # by how much another length must be better
_PERIOD, _TRIAL = 128, 4  # calls: after so many another length is tried, for so many; at first sooner


class Choice:
    """Chooses among numbers of tokens to draft, ascending.

    Each is tried at first, and sometimes a neighbour of the one that is best. It looks at rounds that have been played,
    never at the noise of one to come, so what it chooses leaves the law of texts alone.

    Args:
        is_tree: whether drafts are trees, of which only what they brought is known, not what others would.
    """

    def __init__(self, is_tree: bool = False):
        self._is_tree = is_tree
        self._accepted, self._judged, self._rounds = 1.0, 2.0, 2.0  # of all requests
        self._best: int | None = None
        self._steps = itertools.cycle((1, -1))
        self._calls, self._period, self._trial = 0, 2 * _TRIAL, 0

    def saw(self, accepted: int, judged: int, rounds: int) -> None:
        """What a call has brought, of all rows: drafts, and rounds that had some."""
        if rounds:
            new = zip((accepted, judged, rounds), (self._accepted, self._judged, self._rounds), strict=True)
            self._accepted, self._judged, self._rounds = (n + _MEMORY * old for n, old in new)

    def next(self, lengths: Sequence[int], cost: Mapping[int, float], rows: Sequence[tuple[int, int, int]]) -> int:
        """Of the next call.

        Args:
            lengths: those that it may have.
            cost: seconds a round, of those that have been measured.
            rows: of each that writes the drafts accepted and judged lately, and in how many rounds.
        """
        unknown = [k for k in lengths if k not in cost]
        if unknown or len(lengths) == 1:
            return unknown[0] if unknown else lengths[0]
        worth = {k: sum(self._gain(row, k) for row in rows) / cost[k] for k in lengths}
        best = max(lengths, key=worth.__getitem__)
        if self._best not in worth or worth[best] > _MARGIN * worth[self._best]:
            self._best = best
        self._calls += 1
        if self._calls == self._period:
            place = lengths.index(self._best) + next(self._steps)
            self._trial = lengths[place] if 0 <= place < len(lengths) else self._best
        if self._calls == self._period + _TRIAL:
            self._calls, self._period = 0, min(2 * self._period, _PERIOD)
        return self._trial if self._calls >= self._period and self._trial in lengths else self._best

    def _gain(self, row: tuple[int, int, int], k: int) -> float:
        """Tokens a round is expected to bring, of a request with such drafts lately."""
        if not k:
            return 1.0
        accepted, judged, rounds = row
        if self._is_tree:
            return 1 + (accepted + _PRIOR * self._accepted / self._rounds) / (rounds + _PRIOR)
        rate = min((accepted + _PRIOR * self._accepted / self._judged) / (judged + _PRIOR), 0.999)
        return (1 - rate ** (k + 1)) / (1 - rate)
