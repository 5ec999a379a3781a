"""Building blocks for writing your own draft-length policies. See docs/write-your-own.md for an example.

A draft-length policy derives from `AtMost`, or has the attributes and methods of `DraftLength`.
"""

from jspec.core.keys import trial_keys
from jspec.drafters.draft_length import (
    AtMost,
    ByAcceptance,
    ByConfidence,
    ByEstimatedAcceptance,
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
    "ByEstimatedAcceptance",
    "DraftLength",
    "Fixed",
    "Heuristic",
    "UpTo",
    "WhileConfident",
    "compiled_lengths",
    "trial_keys",
]
