"""Validation of sequence lengths against the models' numbers of positions."""

import numpy as np
from jax.typing import ArrayLike

from jspec.core.transfers import values_if_known
from jspec.drafters.base import declared
from jspec.models.language_model import LanguageModel


def check_positions(
    target: LanguageModel, drafter: object, lengths: ArrayLike, max_new_tokens: int, max_tokens: object
) -> None:
    """Raise if a row may exceed a model's number of positions. An unknown value counts as 1, the minimum."""
    counts, limits = values_if_known(lengths), values_if_known(max_tokens)
    known = np.ones(1, np.int64) if counts is None else counts.astype(np.int64)
    wanted = np.ones(1, np.int64) if limits is None else limits.astype(np.int64)
    samples = max(1, wanted.size // known.size)
    known, wanted = np.broadcast_arrays(np.repeat(known, samples), wanted)
    new = [min(limit, max_new_tokens) if limit > 0 else max_new_tokens for limit in wanted.tolist()]  # of any size
    longest, row = max((length + more, row) for row, (length, more) in enumerate(zip(known.tolist(), new, strict=True)))
    positions = {"target": target.config.max_position_embeddings, "draft": declared(drafter).max_positions}
    for name, limit in positions.items():
        if limit is not None and longest > limit:
            prompt = (
                "A prompt of at least 1 token" if counts is None else f"Prompt {row // samples} of {known[row]} tokens"
            )
            limited = "max_new_tokens" if new[row] == max_new_tokens else "max_tokens"
            raise ValueError(
                f"{prompt} and {limited}={new[row]} need {longest} positions, but the {name} model has {limit}; "
                f"shorten the prompt or reduce {limited} (the limit is the model's max_position_embeddings, or its "
                "sliding window if that is shorter)."
            )
