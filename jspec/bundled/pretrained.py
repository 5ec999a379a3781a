"""A model by its name, with what goes with it."""

from typing import Any

from convert.hub_names import MODELS
from jspec.bundled.head_data import head_of
from jspec.core.sharding import Placement
from jspec.drafters import EagleDrafter, FallbackDrafter, NGramDrafter
from jspec.drafters.combine.fallback import behind_lookup
from jspec.models.llama import Llama
from jspec.models.load import load
from jspec.text import load_tokenizer


def pretrained(
    name: str, dtype: Any = None, quantize: str | None = None, sharding: Placement | None = None
) -> tuple[Llama, NGramDrafter | FallbackDrafter, Any]:
    """``(target, drafter, tokenizer)`` of a known model, such as "smollm2": `jspec models` lists them.

    The drafter is lookup (`NGramDrafter`), which needs no weights; behind it, as a `FallbackDrafter`, drafts the head
    that travels with jspec where the model has one, as smollm2 does. The tokenizer has the model's chat template.

    Args:
        name: it is looked for on this machine before the hub is asked.
        dtype, quantize, sharding: as for `load`.

    Raises:
        ValueError: no model is known by that name; any other source is for `load`.
        convert.CheckpointError: the model is not on this machine and cannot be downloaded; says how to get it.
    """
    if name not in MODELS:
        raise ValueError(f"{name!r} is none of the known models, {', '.join(MODELS)}; use jspec.load for others.")
    target, folder = load(name, dtype, quantize, sharding), head_of(name)
    drafter = NGramDrafter() if folder is None else behind_lookup(EagleDrafter.load(folder, target, dtype))
    return target, drafter, load_tokenizer(name)
