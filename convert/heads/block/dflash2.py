"""DFlash2 in a block drafter's config.json: the convolutions, the candidate selector and sliding windows."""

from convert.config import LlamaConfig
from convert.errors import CheckpointError
from convert.heads.block.config import BlockConfig, DFlash2Config
from convert.heads.block.fields import RESTORE, once
from convert.json_fields import Fields, flag, integer, number
from convert.json_file import Json

ARCHITECTURE = "DFlash2DraftModel"
_SIZES = {
    "conv_kernel_size": "num_taps",
    "conv_group_size": "group_size",
    "selector_rank": "rank",
    "selector_top_k": "num_candidates",
}
_SCALES = {"input_embedding_scale": "embedding_scale", "output_multiplier": "logit_scale"}
_CAP = "final_logit_softcapping"
KEYS = {*_SIZES, *_SCALES, _CAP}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_WINDOW_FIELDS = "layer_types", "use_sliding_window"


def is_used(raw: Fields) -> bool:
    """Return whether a block drafter's config.json describes a DFlash2 drafter."""
    kind, names = raw.get("speculators_model_type"), raw.get("architectures")
    return kind == "dflash2" if kind is not None else isinstance(names, list) and ARCHITECTURE in names


def parse(raw: Fields, section: Fields, body: LlamaConfig, block_size: int) -> DFlash2Config:
    """Parse the fields of the convolutions and the candidate selector.

    Raises:
        CheckpointError: a field is missing or has a wrong value.
    """
    sizes = {ours: once(raw, section, theirs) for theirs, ours in _SIZES.items()}
    limits = (("conv_kernel_size", "num_taps", block_size), ("selector_top_k", "num_candidates", body.vocab_size))
    for key, ours, most in limits:
        if sizes[ours] > most:
            raise CheckpointError(f"{key} is {sizes[ours]}; expected at most {most}: {RESTORE}.")
    if body.hidden_size % sizes["group_size"]:
        raise CheckpointError(
            f"conv_group_size is {sizes['group_size']}; expected a divisor of hidden_size {body.hidden_size}: "
            f"{RESTORE}."
        )
    both = raw | {key: value for key, value in section.items() if value is not None}
    embedding, logits = (number(both, theirs, 1.0) for theirs in _SCALES)
    cap = number(both, _CAP) if both.get(_CAP) else None
    return DFlash2Config(**sizes, embedding_scale=embedding, logit_scale=logits, logit_cap=cap)


def windows(raw: Fields, block_size: int) -> tuple[int | None, ...]:
    """Return the layers' sliding windows, or () if all layers attend to all positions.

    Raises:
        CheckpointError: the fields contradict each other, or a window is smaller than a block.
    """
    kinds, is_on = raw.get("layer_types"), flag(raw, "use_sliding_window")
    count = integer(raw, "num_hidden_layers")
    if kinds is None and not is_on:
        return ()
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in (_SLIDING, _FULL) for kind in kinds):
        raise CheckpointError(f"layer_types is {kinds!r}; expected {_SLIDING} or {_FULL} for each layer: {RESTORE}.")
    if _SLIDING not in kinds:
        return ()
    size = integer(raw, "sliding_window")
    if not is_on or size < block_size:
        raise CheckpointError(
            f"layer_types has {_SLIDING}, with use_sliding_window {str(is_on).lower()} and sliding_window {size}; "
            f"expected true and at least block_size {block_size}: {RESTORE}."
        )
    return tuple(size if kind == _SLIDING else None for kind in kinds)


def without_windows(raw: Fields) -> Fields:
    """Return config.json without the fields that `windows` parses."""
    return {key: value for key, value in raw.items() if key not in _WINDOW_FIELDS}


def is_causal(raw: Fields, windows: tuple[int | None, ...]) -> bool:
    """Return whether the rows of a block attend only to earlier rows.

    If the field is missing, layers with sliding windows are causal, and others are not.

    Raises:
        CheckpointError: the field is missing, and only some layers have a window.
    """
    if raw.get("is_causal") is None and None in windows:
        raise CheckpointError(
            f"is_causal is missing, and its default differs between layers with {_SLIDING} and {_FULL}; add it."
        )
    return flag(raw, "is_causal", bool(windows))


def check_whole(drafts_from_first: bool, draft_vocab_size: int | None) -> None:
    """Raise CheckpointError for flags of speculators' files that DFlash2 does not define."""
    if drafts_from_first or draft_vocab_size is not None:
        raise CheckpointError(
            f"a DFlash2 drafter has sample_from_anchor {str(drafts_from_first).lower()} and a draft vocabulary of "
            f"{draft_vocab_size or 'all'} tokens; expected false and all tokens: {RESTORE}."
        )


def fields(config: DFlash2Config, with_scales: bool) -> Fields:
    """Return the fields from which `parse` restores `config`. The scales and the bound are optional."""
    sizes: Fields = {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    scales: Fields = {theirs: getattr(config, ours) for theirs, ours in _SCALES.items()} | {_CAP: config.logit_cap}
    return sizes | (scales if with_scales else {})


def has_scales(config: DFlash2Config) -> bool:
    """Return whether the drafter scales or bounds its embeddings or logits."""
    return (config.embedding_scale, config.logit_scale, config.logit_cap) != (1.0, 1.0, None)


def window_fields(config: BlockConfig) -> Fields:
    """Return the fields from which `windows` and `is_causal` restore their values in `config`."""
    kinds: Json = [_FULL if size is None else _SLIDING for size in config.windows]
    size = next((size for size in config.windows if size is not None), None)
    used: Fields = {"layer_types": kinds, "sliding_window": size, "use_sliding_window": True} if config.windows else {}
    return {"is_causal": config.causal, **used}
