"""The type of one request's statistics."""

from typing import TypedDict


class Statistics(TypedDict):
    """The result of `jspec.generation.complete.statistics`, which describes the fields."""

    tokens: int
    rounds: int
    drafted: int
    judged: int
    accepted: int
    accepted_at: list[int]
    acceptance_rate: float | None
    tokens_per_round: float
    predicted_tokens_per_round: float | None
