"""The description of a model family: its differences from the other families."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from convert.json_fields import Fields, integer
from convert.rope import parse_rope


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.

    All families share the table of names in keymap.py. The fields of `details` decide which of its arrays a model has.

    Attributes:
        model_type: the name in config.json.
        class_name: the class in transformers whose checkpoints are read.
        details: maps the fields of config.json to the fields of `LlamaConfig` in which the family differs from others.
        defaults: the values that transformers 5 uses for fields that config.json leaves out, if they are constants of
            the family; null does not count as left out.
        fixed: the fields with a single supported value. A field that is left out (or null) has that value too.
    """

    model_type: str
    class_name: str
    details: Callable[[Fields], dict[str, Any]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def positions(raw: Fields) -> int:
    """Return `max_position_embeddings`, or the context after yarn's stretching if config.json gives less."""
    longest, rope = integer(raw, "max_position_embeddings"), parse_rope(raw)
    return max(longest, int(rope.factor * rope.original_max_position_embeddings)) if rope.kind == "yarn" else longest


def within_window(raw: Fields) -> int:
    """Return the longest text in which each token attends to all before it: `positions`, or `sliding_window` if less.

    Sliding-window attention is not implemented. Up to the window's length it equals full attention, and the limit of
    positions rejects longer texts.
    """
    longest = positions(raw)
    return min(longest, integer(raw, "sliding_window", longest))
