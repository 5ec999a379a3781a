"""A model by its name, with what goes with it."""

from typing import Any

from convert.names import MODELS
from jspec.drafters import EagleDrafter, FallbackDrafter, NGramDrafter
from jspec.head_data import head_of
from jspec.llama import Llama
from jspec.sharding import Placement
from jspec.text import load_tokenizer
from jspec.weights import load


def pretrained(
    name: str, dtype: Any = None, quantize: str | None = None, sharding: Placement | None = None
) -> tuple[Llama, NGramDrafter | FallbackDrafter, Any]:
    """``(target, drafter, tokenizer)`` of a known model, such as "smollm2": `jspec models` lists them.

    The drafter is lookup (`NGramDrafter`), which needs no weights; for "smollm2" it falls back to a trained head, for
    one token, so that ``jspec.UpTo(4, (1,))`` is the `num_draft_tokens` to take. The tokenizer has the model's chat
    template.

    Args:
        name: it is looked for on this machine before the hub is asked.
        dtype, quantize, sharding: as for `load`.

    Raises:
        ValueError: no model is known by that name; any other source is for `load`. Or what is here by that name is
            another model than the head was trained for.
        convert.CheckpointError: the model is not on this machine and cannot be downloaded; says how to get it.
    """
    if name not in MODELS:
        raise ValueError(f"{name!r} is none of the known models, {', '.join(MODELS)}; use jspec.load for others.")
    target = load(name, dtype, quantize, sharding)
    return target, drafter_of(name, target, dtype), load_tokenizer(name)


def drafter_of(name: str, target: Llama, dtype: Any = None) -> NGramDrafter | FallbackDrafter:
    """What drafts for a known model: lookup, and where it has no guess the head that travels with jspec, if any."""
    folder = head_of(name)
    if folder is None:
        return NGramDrafter()
    return beside_lookup(EagleDrafter.load(folder, target, dtype))


def beside_lookup(head: Any) -> FallbackDrafter:
    """Lookup of what follows two or three tokens in a row, for one says less than a head; else one guess of that."""
    return FallbackDrafter(NGramDrafter(3, 2), head, second_reach=1)
