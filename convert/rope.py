"""The rotary embedding's fields, in the spelling of transformers 5 and in the earlier one."""

import dataclasses
from typing import Any

from convert.errors import CheckpointError
from convert.fields import Fields, integer, number

_USED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_USED["llama3"]}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `kind` is default, linear or llama3; a field it does not use keeps its default.

    `theta` is the base of the frequencies, `original_max_position_embeddings` counts tokens, factors are
    ratios.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def _kind(section: Fields) -> str:
    names = [section[key] for key in ("rope_type", "type") if key in section]
    if any(name != names[0] for name in names):
        raise CheckpointError(f"rope_type and type disagree ({names}); keep the one the model was trained with.")
    if not names and set(section) - {"rope_theta"}:
        raise CheckpointError(f"the rope section {section} names no rope_type; add the model's own.")
    kind = names[0] if names else "default"
    if not isinstance(kind, str) or kind not in _USED:
        raise CheckpointError(f"rope_type {kind!r} is not supported; expected one of {', '.join(_USED)}.")
    return kind


def _section(section: Any, theta: float) -> RopeConfig:
    if not isinstance(section, dict):
        raise CheckpointError(f"the rope section is {section!r}; expected an object or null.")
    kind = _kind(section)
    if unknown := sorted(set(section) - _KNOWN):
        raise CheckpointError(f"the rope section has unsupported {unknown}; choose a checkpoint without it.")
    if section.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"partial_rotary_factor is {section['partial_rotary_factor']!r}; only 1.0 is supported.")
    used: Fields = {key: number(section, key) for key in _USED[kind]}
    if kind == "llama3":
        used["original_max_position_embeddings"] = integer(section, "original_max_position_embeddings")
        if used["high_freq_factor"] <= used["low_freq_factor"]:
            raise CheckpointError("high_freq_factor must exceed low_freq_factor; restore the model's own values.")
    return RopeConfig(theta=theta, kind=kind, **used)


def parse_rope(raw: Fields) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before), or both if they agree.

    Raises:
        CheckpointError: a kind other than default, linear and llama3, or fields that are missing or at odds.
    """
    sections = [raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None]
    places = [place for place in [raw, *sections] if isinstance(place, dict)]
    thetas = {number(place, "rope_theta") for place in places if place.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise CheckpointError(f"rope_theta is given as {sorted(thetas)}; keep the model's own value.")
    theta = thetas.pop() if thetas else RopeConfig.theta
    parsed = {_section(section, theta) for section in sections or [{}]}
    if len(parsed) > 1:
        raise CheckpointError("rope_parameters and rope_scaling disagree; keep the model's own.")
    return parsed.pop()
