"""The `pretrained` function, which loads a known model by name, with its drafter and tokenizer."""

from jax.typing import DTypeLike

from convert.hub_names import MODELS
from jspec.bundled.head_data import head_of
from jspec.core.sharding import Placement
from jspec.drafters import EagleDrafter, FallbackDrafter, NGramDrafter
from jspec.drafters.combine.fallback import with_lookup_first
from jspec.drafters.heads.quantized_heads import quantize_for
from jspec.models.llama import Llama
from jspec.models.load import load
from jspec.text import load_tokenizer
from jspec.text.tokenizer_file import TokenizerFile


def pretrained(
    name: str, dtype: DTypeLike | None = None, quantize: str | None = None, sharding: Placement | None = None
) -> tuple[Llama, NGramDrafter | FallbackDrafter, TokenizerFile]:
    """Load ``(target, drafter, tokenizer)`` for a known model, such as "smollm2". `jspec models` lists the names.

    The drafter uses prompt lookup (`NGramDrafter`), which needs no weights. If jspec ships a trained head for the
    model, as it does for smollm2, the drafter is a `FallbackDrafter`: it tries prompt lookup first and falls back to
    the head. The head is quantised to int8 if the target's weights are packed in a quantised format. The tokenizer
    includes the model's chat template.

    Args:
        name: the model's short name. The model is downloaded only if it is not found on this machine.
        dtype, quantize, sharding: same as in `load`.

    Raises:
        ValueError: `name` is not a known model; use `load` for any other source.
        convert.CheckpointError: the model is not on this machine and cannot be downloaded. The message says how to get
            it.
    """
    if name not in MODELS:
        raise ValueError(
            f"{name!r} is not one of the known models, {', '.join(MODELS)}; use jspec.load for other models."
        )
    target, folder, tokenizer = load(name, dtype, quantize, sharding), head_of(name), load_tokenizer(name)
    if folder is None:
        return target, NGramDrafter(), tokenizer
    head = quantize_for(target, EagleDrafter.load(folder, target, dtype))
    return target, with_lookup_first(head), tokenizer
