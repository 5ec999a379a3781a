"""What tells one family from another."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from convert.json_fields import Fields, integer
from convert.rope import parse_rope


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.

    All families share the table of names in keymap.py; which of its arrays a model has, the fields of `details` say.

    Attributes:
        model_type: how config.json names it.
        class_name: the class in transformers whose checkpoints are read.
        details: the fields of config.json -> those of `LlamaConfig` in which the family is not like the others.
        defaults: what transformers 5 takes for a field that config.json leaves out, where that is a constant of the
            family; null is not left out.
        fixed: fields of which one value is supported; leaving the field out (or null) means that value too.
    """

    model_type: str
    class_name: str
    details: Callable[[Fields], dict[str, Any]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def positions(raw: Fields) -> int:
    """`max_position_embeddings`, or what yarn stretches the original context to, where config.json says less."""
    longest, rope = integer(raw, "max_position_embeddings"), parse_rope(raw)
    return max(longest, int(rope.factor * rope.original_max_position_embeddings)) if rope.kind == "yarn" else longest


def within_window(raw: Fields) -> int:
    """The longest text in which each token sees all before it: `positions`, or `sliding_window` if less.

    Attention over a window is not built; up to its length it is full attention, and longer texts are refused by the
    limit of positions.
    """
    longest = positions(raw)
    return min(longest, integer(raw, "sliding_window", longest))
