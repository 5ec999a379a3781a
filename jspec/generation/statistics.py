"""One request's statistics."""

from collections.abc import Sequence
from typing import TypedDict

from jspec import theory
from jspec.core.types import BONUS, NO_DRAFT


class Statistics(TypedDict):
    """The result of `statistics`, which describes the fields."""

    tokens: int
    rounds: int
    drafted: int
    judged: int
    accepted: int
    accepted_at: list[int]
    acceptance_rate: float | None
    tokens_per_round: float
    predicted_tokens_per_round: float | None


def statistics(
    rounds: int, drafted: int, judged: int, accepted: int, accepted_at: list[int], origins: Sequence[int]
) -> Statistics:
    """Return one request's counts, as in `jspec.Stats`, and the tokens per round that these counts predict.

    ``acceptance_rate`` is the fraction of verified draft tokens (`judged`) that were accepted. Draft tokens after a
    rejection are not verified. ``predicted_tokens_per_round`` is equation 1 of Leviathan et al. 2023 at that rate. It
    is None if a round had fewer draft tokens than the equation assumes. The measured value is lower if the end of the
    text cuts off the last round. It also differs if acceptances come in streaks.
    """
    rate = accepted / judged if judged else None
    # A bonus token follows a fully accepted draft.
    whole = origins.count(BONUS) <= sum(accepted_at[-1:]) and NO_DRAFT not in origins
    predicted = float(theory.expected_tokens(rate, len(accepted_at))) if rate is not None and whole else None
    return {
        "tokens": len(origins),
        "rounds": rounds,
        "drafted": drafted,
        "judged": judged,
        "accepted": accepted,
        "accepted_at": accepted_at,
        "acceptance_rate": rate,
        "tokens_per_round": len(origins) / rounds,
        "predicted_tokens_per_round": predicted,
    }
