"""Helpers for the tuning tests and others."""

import numpy as np

from jspec.core.types import ACCEPTED, BONUS, CORRECTED, NO_DRAFT, Output, Stats


def made(rows, k):
    """Return an `Output` for `rows`, each a list of rounds: the number of accepted draft tokens, and the end.

    The end is "c" for a correction, "b" for a bonus, "n" for a token without a draft, or "-" if nothing follows (cut
    off by the limit).
    """
    after = {"c": [CORRECTED], "b": [BONUS], "n": [NO_DRAFT], "-": []}
    texts = [[o for n, end in rounds for o in [ACCEPTED] * n + after[end]] for rounds in rows]
    origins = np.zeros((len(rows), max(map(len, texts)) + 2), np.int8)
    for row, text in zip(origins, texts, strict=True):
        row[: len(text)] = text
    accepted_at = np.array([[sum(n > depth for n, _ in rounds) for depth in range(k)] for rounds in rows])
    judged_at = np.array(
        [[sum(n + (end == "c") > depth for n, end in rounds) for depth in range(k)] for rounds in rows]
    )
    lengths, rounds = np.array([len(t) for t in texts]), np.array([len(r) for r in rows])
    stats = Stats(
        rounds, rounds * k, accepted_at.sum(1), accepted_at, judged_at, np.zeros(len(rows), bool), np.zeros(len(rows))
    )
    return Output(origins * 0, lengths, origins * 0.0, origins * 0.0, origins, stats)
