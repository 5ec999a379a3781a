"""Shared by the tests of tune and others."""

import numpy as np

from jspec.core.types import ACCEPTED, BONUS, CORRECTED, NO_DRAFT, Output, Stats


def made(rows, k):
    """An `Output` of `rows`, each a list of rounds; a round is its number of accepted drafts, then "c", "b", "n" or "-"
    where a correction, a bonus, a token without a draft or (cut off by the limit) nothing follows."""
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
