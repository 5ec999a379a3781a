"""Warnings about rotary-embedding fields that are ignored, as in transformers. Each warning says what to do."""

import math
from collections.abc import Iterator
from typing import cast

from convert.json_fields import Fields, number
from convert.rope import KNOWN, attention_factor, given_sections, parse_rope

# vLLM reads the first two for yarn. The third scales the queries of Ministral 3. transformers reads none of the three
# for the supported families.
_READ_ELSEWHERE = "attn_factor", "extrapolation_factor", "llama_4_scaling_beta"


def unread(raw: Fields) -> list[str]:
    """Return the sorted keys of the rope section that no known program reads."""
    return sorted(
        {key for section in cast("list[Fields]", given_sections(raw))[:1] for key in section}
        - KNOWN
        - {*_READ_ELSEWHERE}
    )


def warnings(raw: Fields) -> Iterator[str]:
    """Yield a sentence for each ignored field that other programs may read.

    Args:
        raw: a config.json that `parse_rope` accepts.
    """
    sections = cast("list[Fields]", given_sections(raw))
    if len(sections) == 2 and _without_theta(sections[0]) != _without_theta(sections[1]):
        yield (
            "rope_parameters is ignored beside rope_scaling, as in transformers; delete the section that is not the "
            "model's own"
        )
    for section in sections[:1]:
        if section.get("type", section.get("rope_type")) != section.get("rope_type", section.get("type")):
            yield (
                f"type {section['type']!r} of the rope section is ignored beside rope_type {section['rope_type']!r}, "
                "as in transformers; delete the one that is not the model's own"
            )
        rope = parse_rope(raw)
        if rope.kind == "yarn":
            yield from _yarn(section | {"factor": rope.factor})


def _yarn(section: Fields) -> Iterator[str]:
    given = section.get("attention_factor") is not None
    attn, extrapolation, beta = (section.get(key) for key in _READ_ELSEWHERE)
    if isinstance(attn, int | float) and attn != 1 and not given:
        yield (
            f"attn_factor {attn} is ignored, as in transformers; to multiply by it, as vLLM does, set "
            f'"attention_factor" to {round(attn * attention_factor(section), 6)} in the rope section'
        )
    if isinstance(extrapolation, int | float) and extrapolation != 1:
        yield (
            f"extrapolation_factor {extrapolation} is ignored, as in transformers; vLLM reads it, so set it to 1 if "
            "both must compute the same function"
        )
    if beta:
        yield (
            f"llama_4_scaling_beta {beta} is ignored, as in transformers for this model_type; if the model was "
            "trained with it, sequences beyond original_max_position_embeddings need another program"
        )
    if section.get("mscale") and not section.get("mscale_all_dim") and not given:
        alone = 1 + 0.1 * math.log(max(cast("float", section["factor"]), 1)) * number(section, "mscale")
        yield (
            f"mscale {section['mscale']} is ignored without mscale_all_dim, as in transformers; to use it alone, set "
            f'"attention_factor" to {round(alone, 6)} in the rope section'
        )


def _without_theta(section: Fields) -> Fields:
    kind = section.get("rope_type", section.get("type", "default"))
    return {key: section[key] for key in section if key not in ("rope_theta", "type")} | {"rope_type": kind}
