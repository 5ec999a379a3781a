"""What draft lengths are made of, for those who write their own; docs/write-your-own.md has an example.

A length derives from `AtMost`, or has what `DraftLength` has.
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
