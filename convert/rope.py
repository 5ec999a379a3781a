"""Parse the rotary embedding's fields, in the formats of transformers 5 and of earlier versions."""

import dataclasses
import math
from typing import Any

from convert.errors import CheckpointError
from convert.json_fields import Fields, flag, integer, number
from convert.json_file import Json

_ORIGINAL = "original_max_position_embeddings"
_USED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor",),
}
_YARN = {"attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"}
KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_USED["llama3"], *_YARN}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding. A field that `kind` does not use keeps its default.

    `kind` is default, linear, llama3 or yarn. `theta` is the base of the frequencies,
    `original_max_position_embeddings` is a number of tokens, and factors are ratios. For yarn (Peng et al. 2023),
    `attention_factor` multiplies cosines and sines. Frequencies between `beta_fast` and `beta_slow` turns in the
    original context are blended; `truncate` rounds the ends of that range to whole dimensions.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def _kind(section: Fields) -> str:
    names = [section[key] for key in ("rope_type", "type") if key in section]
    if not names and set(section) - {"rope_theta"}:
        raise CheckpointError(f"the rope section {section} names no rope_type; add the model's own.")
    kind = names[0] if names else "default"
    if not isinstance(kind, str) or kind not in _USED:
        raise CheckpointError(f"rope_type {kind!r} is not supported; expected one of {', '.join(_USED)}.")
    return kind


def _section(section: Json, theta: float, raw: Fields) -> RopeConfig:
    if not isinstance(section, dict):
        raise CheckpointError(f"the rope section is {section!r}; expected an object or null.")
    kind = _kind(section)
    if by_layer := sorted(key for key in set(section) - KNOWN if isinstance(section[key], dict)):
        raise CheckpointError(f"the rope section has unsupported {by_layer}; choose a checkpoint without it.")
    if section.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"partial_rotary_factor is {section['partial_rotary_factor']!r}; only 1.0 is supported.")
    if kind == "yarn" and "factor" in section and section["factor"] is None:
        section = section | {"factor": integer(raw, "max_position_embeddings") / _original_length(section, raw)}
    used: dict[str, Any] = {key: number(section, key) for key in _USED[kind]}  # arguments of RopeConfig
    if kind == "llama3":
        used[_ORIGINAL] = _original_length(section, raw)
        if used["high_freq_factor"] <= used["low_freq_factor"]:
            raise CheckpointError("high_freq_factor must exceed low_freq_factor; restore the model's own values.")
    if kind == "yarn":
        used |= _yarn(section, theta, raw)
    return RopeConfig(theta=theta, kind=kind, **used)


def _yarn(section: Fields, theta: float, raw: Fields) -> dict[str, float]:
    """Return the fields of yarn except `factor`, with the defaults of transformers."""
    defaults = {"beta_fast": RopeConfig.beta_fast, "beta_slow": RopeConfig.beta_slow}
    given: Fields = {key: section.get(key) or None for key in defaults}  # 0 also counts as missing
    betas = {key: number(given, key, default) for key, default in defaults.items()}
    if betas["beta_fast"] < betas["beta_slow"]:
        raise CheckpointError("beta_fast must not be less than beta_slow; restore the model's own values.")
    if theta <= 1:
        raise CheckpointError(f"rope_theta is {theta}; yarn needs a value above 1, as in the model's own config.json.")
    return betas | {
        _ORIGINAL: _original_length(section, raw),
        "attention_factor": number(section, "attention_factor", attention_factor(section)),
        "truncate": flag(section, "truncate", RopeConfig.truncate if "truncate" not in section else False),
    }


def _original_length(section: Fields, raw: Fields) -> int:
    """Return the original length from the top level, which transformers reads first, or else from the section.

    Return `max_position_embeddings` if neither has it.
    """
    lengths = {integer(place, _ORIGINAL) for place in (section, raw) if place.get(_ORIGINAL) is not None}
    if len(lengths) > 1:
        raise CheckpointError(f"{_ORIGINAL} is given as {sorted(lengths)}; keep the model's own value.")
    return lengths.pop() if lengths else integer(raw, "max_position_embeddings")


def attention_factor(section: Fields) -> float:
    """Return yarn's default factor: 1 + 0.1 ln(factor), or a quotient of such terms if both mscales are given."""
    above_one = 0.1 * math.log(max(number(section, "factor"), 1))
    scales = [number(section, key) for key in ("mscale", "mscale_all_dim") if section.get(key)]
    if len(scales) < 2:  # a single scale has no effect
        return 1 + above_one
    return (1 + above_one * scales[0]) / (1 + above_one * scales[1])


def parse_rope(raw: Fields) -> RopeConfig:
    """Parse `rope_scaling` if present and not empty, as in transformers, else `rope_parameters` or `rope_theta` alone.

    Raises:
        CheckpointError: the kind is not one that `RopeConfig` lists, or fields are missing or contradict each other.
    """
    sections = given_sections(raw)
    return _section(sections[0] if sections else {}, _theta(raw, sections), raw)


def given_sections(raw: Fields) -> list[Json]:
    """Return the sections that are present and not empty. The first one is used, as in transformers."""
    return [raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)]


def _theta(raw: Fields, sections: list[Json]) -> float:
    """Return the value given for `rope_theta`, or the default.

    Raises:
        CheckpointError: two different values are given, or transformers would not read the only value.
    """
    places = [place for place in [raw, *sections] if isinstance(place, dict) and place.get("rope_theta") is not None]
    thetas = {number(place, "rope_theta") for place in places}
    if len(thetas) > 1:
        raise CheckpointError(f"rope_theta is given as {sorted(thetas)}; keep the model's own value.")
    theta = thetas.pop() if thetas else RopeConfig.theta
    if sections[1:] and places == sections[1:] and theta != RopeConfig.theta:
        raise CheckpointError(
            f"rope_theta {theta} is in rope_parameters, which transformers ignores beside rope_scaling; move "
            "rope_theta into rope_scaling, and delete rope_parameters."
        )
    return theta
