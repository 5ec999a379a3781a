"""The building blocks of draft lengths, for writing your own; docs/write-your-own.md has an example.

A length derives from `AtMost`, or has the attributes and methods of `DraftLength`.
"""

from jspec.core.keys import trial_keys
from jspec.drafters.draft_length import (
    AtMost,
    ByAcceptance,
    ByConfidence,
    DraftLength,
    Fixed,
    Heuristic,
    UpTo,
    WhileConfident,
    compiled_lengths,
)

__all__ = [
    "AtMost",
    "ByAcceptance",
    "ByConfidence",
    "DraftLength",
    "Fixed",
    "Heuristic",
    "UpTo",
    "WhileConfident",
    "compiled_lengths",
    "trial_keys",
]
