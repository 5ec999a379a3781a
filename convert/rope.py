"""The rotary embedding's fields, in the spelling of transformers 5 and in the earlier one."""

import dataclasses
import math
from typing import Any

from convert.errors import CheckpointError
from convert.json_fields import Fields, flag, integer, number

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
    """Rotary embedding: `kind` is default, linear, llama3 or yarn; a field it does not use keeps its default.

    `theta` is the base of the frequencies, `original_max_position_embeddings` counts tokens, factors are
    ratios. Of yarn (Peng et al. 2023), `attention_factor` multiplies cosines and sines; between `beta_fast`
    and `beta_slow` turns in the original context frequencies are blended, `truncate`: from whole dimensions.
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


def _section(section: Any, theta: float, raw: Fields) -> RopeConfig:
    if not isinstance(section, dict):
        raise CheckpointError(f"the rope section is {section!r}; expected an object or null.")
    kind = _kind(section)
    if by_layer := sorted(key for key in set(section) - KNOWN if isinstance(section[key], dict)):
        raise CheckpointError(f"the rope section has unsupported {by_layer}; choose a checkpoint without it.")
    if section.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"partial_rotary_factor is {section['partial_rotary_factor']!r}; only 1.0 is supported.")
    if kind == "yarn" and "factor" in section and section["factor"] is None:
        section = section | {"factor": integer(raw, "max_position_embeddings") / _original_length(section, raw)}
    used: Fields = {key: number(section, key) for key in _USED[kind]}
    if kind == "llama3":
        used[_ORIGINAL] = _original_length(section, raw)
        if used["high_freq_factor"] <= used["low_freq_factor"]:
            raise CheckpointError("high_freq_factor must exceed low_freq_factor; restore the model's own values.")
    if kind == "yarn":
        used |= _yarn(section, theta, raw)
    return RopeConfig(theta=theta, kind=kind, **used)


def _yarn(section: Fields, theta: float, raw: Fields) -> Fields:
    """The fields of yarn but for `factor`, with the defaults of transformers."""
    given = {key: section.get(key) or None for key in ("beta_fast", "beta_slow")}  # 0 is left out, too
    betas = {key: number(given, key, getattr(RopeConfig, key)) for key in given}
    if betas["beta_fast"] < betas["beta_slow"]:
        raise CheckpointError("beta_fast must not be less than beta_slow; restore the model's own values.")
    if theta <= 1:
        raise CheckpointError(f"rope_theta is {theta}; yarn needs more than 1, as in the model's own config.json.")
    return betas | {
        _ORIGINAL: _original_length(section, raw),
        "attention_factor": number(section, "attention_factor", attention_factor(section)),
        "truncate": flag(section, "truncate", RopeConfig.truncate if "truncate" not in section else False),
    }


def _original_length(section: Fields, raw: Fields) -> int:
    """In the section or beside it, where transformers looks first; `max_position_embeddings` if in neither."""
    lengths = {integer(place, _ORIGINAL) for place in (section, raw) if place.get(_ORIGINAL) is not None}
    if len(lengths) > 1:
        raise CheckpointError(f"{_ORIGINAL} is given as {sorted(lengths)}; keep the model's own value.")
    return lengths.pop() if lengths else integer(raw, "max_position_embeddings")


def attention_factor(section: Fields) -> float:
    """Return yarn's factor where none is given: 1 + 0.1 ln(factor), or a quotient of such if both mscales are there."""
    above_one = 0.1 * math.log(max(number(section, "factor"), 1))
    scales = [number(section, key) for key in ("mscale", "mscale_all_dim") if section.get(key)]
    if len(scales) < 2:  # one alone means nothing
        return 1 + above_one
    return (1 + above_one * scales[0]) / (1 + above_one * scales[1])


def parse_rope(raw: Fields) -> RopeConfig:
    """`rope_scaling` if it is there and not empty, as transformers does, else `rope_parameters` or `rope_theta` alone.

    Raises:
        CheckpointError: a kind other than those of `RopeConfig`, or fields that are missing or at odds.
    """
    sections = given_sections(raw)
    return _section(sections[0] if sections else {}, _theta(raw, sections), raw)


def given_sections(raw: Fields) -> list[Any]:
    """Return the sections that are there and not empty; the first one counts, as in transformers."""
    return [raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)]


def _theta(raw: Fields, sections: list[Any]) -> float:
    """Return the one value that is given.

    Raises:
        CheckpointError: there are two, or transformers would not read the one that there is.
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
