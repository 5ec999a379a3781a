"""A description of a model family and its differences from the other families."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Required, TypedDict

from convert.json_fields import Fields, integer
from convert.json_file import Json
from convert.rope import parse_rope


class Details(TypedDict, total=False):
    """The fields of `LlamaConfig` in which families differ. A missing flag is false."""

    max_position_embeddings: Required[int]
    attention_bias: bool
    mlp_bias: bool
    qkv_bias: bool
    qk_norm: bool


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.

    All families share the name table in keymap.py. The fields from `details` determine which of its arrays a model has.

    Attributes:
        model_type: the name in config.json.
        class_name: the transformers class whose checkpoints are supported.
        details: maps the fields of config.json to the fields of `LlamaConfig` in which the family differs from others.
        defaults: the values that transformers 5 uses for fields missing from config.json, if they are constant across
            the family. A null field does not count as missing.
        fixed: the fields with a single supported value. A missing (or null) field has that value too.
    """

    model_type: str
    class_name: str
    details: Callable[[Fields], Details]
    defaults: Mapping[str, Json] = dataclasses.field(default_factory=dict[str, Json])
    fixed: Mapping[str, Json] = dataclasses.field(default_factory=dict[str, Json])


def positions(raw: Fields) -> int:
    """Return `max_position_embeddings`, or yarn's extended context length if that is longer."""
    longest, rope = integer(raw, "max_position_embeddings"), parse_rope(raw)
    return max(longest, int(rope.factor * rope.original_max_position_embeddings)) if rope.kind == "yarn" else longest


def within_window(raw: Fields) -> int:
    """Return the longest sequence in which each token attends to all earlier tokens.

    This is the smaller of `positions` and `sliding_window`. Sliding-window attention is not implemented, but it equals
    full attention up to the window length. The position limit rejects longer sequences.
    """
    longest = positions(raw)
    return min(longest, integer(raw, "sliding_window", longest))
