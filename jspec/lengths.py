"""What draft lengths are made of, for those who write their own; docs/write-your-own.md has an example.

A length derives from `AtMost`, or has what `DraftLength` has.
"""

from jspec.draft_length import (
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
from jspec.keys import trial_keys

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
