"""Convert a `BlockConfig` to a config.json that sets every flag, because programs have different defaults."""

import json
from collections.abc import Collection
from typing import cast

from convert import config_json as llama_json
from convert.errors import CheckpointError
from convert.heads.block import dflash2
from convert.heads.block.config import BlockConfig, BlockOrigin
from convert.heads.block.fields import SECTION
from convert.heads.block.parse_config import IDS, LAYER, SHIFTED_IDS, parse
from convert.json_fields import Fields
from convert.json_file import Json

# Each format's layout. JetSpec and DFlash2 read more fields than DFlash.
FORMATS = {
    "dflash": "dflash",
    "jetspec": "dflash",
    "dflash2": "dflash",
    "deepspec": "deepspec",
    "speculators": "speculators",
}

_SPECULATORS = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator", "dflash2": dflash2.ARCHITECTURE}


def check_format(config: BlockConfig, format: str) -> None:
    """Raise CheckpointError unless programs that read `format` compute the same result as a drafter with `config`."""
    if format not in FORMATS:
        raise CheckpointError(f"format {format!r} is unknown; choose one of {', '.join(FORMATS)}.")
    if config.target_hidden_size != config.body.hidden_size or not config.body.qk_norm:
        raise CheckpointError(
            "no program reads a block drafter whose hidden size differs from the target's, or whose layers do not norm "
            "queries and keys; create the drafter with such sizes."
        )
    if unread := [name for name, is_used in _unread(config, format).items() if is_used]:
        raise CheckpointError(
            f"programs that read {format} files do not support {', '.join(unread)}; choose another format, or a "
            "drafter without these features."
        )


def format_of(config: BlockConfig, origin: BlockOrigin | None) -> str:
    """Return a format that can hold the drafter, preferably that of the files that it was loaded from.

    Raises:
        CheckpointError: no format can hold the drafter.
    """
    layout = "speculators" if origin is None else origin.layout
    *others, last = sorted(FORMATS, key=lambda name: FORMATS[name] != layout)
    for format in others:
        try:
            check_format(config, format)
        except CheckpointError:
            continue
        return format
    check_format(config, last)
    return last


def _unread(config: BlockConfig, format: str) -> dict[str, bool]:
    """Return the features that readers of `format` lack, and whether the drafter uses each one."""
    causal, draft_vocab = config.causal, config.draft_vocab_size is not None
    extra = {"a Markov head": config.markov is not None, "a confidence head": config.confidence is not None}
    windows, selects = {"sliding windows": any(config.windows)}, config.dflash2 is not None
    if format == "speculators":
        scaled = config.dflash2 is not None and dflash2.has_scales(config.dflash2)
        others = selects and (draft_vocab or config.drafts_from_first or any(extra.values()))
        return {
            "causal blocks": causal,
            "scales of embeddings or logits": scaled,
            "a candidate selector with other heads, a reduced vocabulary or drafting from the first row": others,
            **windows,
        }
    if format == "deepspec":
        return {
            "a candidate selector": selects,
            **windows,
            "causal blocks": causal,
            "a reduced vocabulary": draft_vocab,
            "drafts from the second row on": not config.drafts_from_first,
            "the target's own embedding or output head": not (config.own_embedding and config.own_head),
        }
    sizes = {size for size in config.windows if size is not None}
    if format == "dflash2":
        extra |= {"windows of different sizes": len(sizes) > 1, "blocks without a candidate selector": not selects}
    else:
        extra |= {"a candidate selector": selects, **windows}
    return extra | {
        "causal blocks": causal and format == "dflash",
        "a reduced vocabulary": draft_vocab,
        "drafts from the first row on": config.drafts_from_first,
        "an own embedding or output head": config.own_embedding or config.own_head,
        "the embedding as a hidden state": config.features[0] == 0,
    }


def describe(
    config: BlockConfig, format: str, dtype: str, origin: BlockOrigin | None, names: Collection[str]
) -> Fields:
    """Return the content of a config.json.

    Args:
        dtype: the dtype of the weights.
        origin: the files that the drafter was loaded from. Their config.json is kept if it still describes `config`.
        names: the names of the tensors to write.
    """
    fields = _fields(config, format)
    if origin is not None and origin.layout == FORMATS[format]:
        kept: Fields = json.loads(origin.fields)
        fields = kept if _means(kept, config, names) else fields
    place = cast("Fields", fields.get(LAYER, fields))
    spelled = [key for key in ("dtype", "torch_dtype") if key in place] or ["torch_dtype"]
    place.update(dict.fromkeys(spelled, dtype))
    return fields


def _means(raw: Fields, config: BlockConfig, names: Collection[str]) -> bool:
    try:
        return parse(raw, names, None) == config
    except CheckpointError:
        return False


def _fields(config: BlockConfig, format: str) -> Fields:
    body: Fields = {**llama_json.fields(config.body), "tie_word_embeddings": False}
    outputs: Json = [i - 1 for i in config.features]
    block: Fields = {"block_size": config.block_size}
    if format in ("dflash", "jetspec", "dflash2"):
        section: Fields = {SHIFTED_IDS: outputs, "mask_token_id": config.mask_id}
        if config.dflash2 is not None:
            section |= {**block, **dflash2.fields(config.dflash2, with_scales=True)}
            names: Json = [dflash2.ARCHITECTURE]
            return {**body, **dflash2.window_fields(config), "architectures": names, SECTION: section}
        if format == "jetspec":
            section["causal_head"] = config.causal
        return {**body, **block, "architectures": ["DFlashDraftModel"], SECTION: section}
    heads = _heads(config)
    if format == "deepspec":
        ids: Fields = {SHIFTED_IDS: outputs, "mask_token_id": config.mask_id}
        return {**body, **block, **ids, **heads, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    kind = "dflash" if config.markov is None and config.confidence is None else "dspark"
    extra: Fields = {} if kind == "dflash" else heads
    if config.dflash2 is not None:
        kind, extra = "dflash2", dflash2.fields(config.dflash2, with_scales=False)
    method: Json = {"proposal_type": "greedy", "speculative_tokens": config.num_draft_tokens}
    return {
        "architectures": [_SPECULATORS[kind]],
        "speculators_model_type": kind,
        **block,
        "draft_vocab_size": config.draft_vocab_size or config.body.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        IDS: cast("Json", list(config.features)),
        "mask_token_id": config.mask_id,
        "sliding_window_non_causal": False,
        "sample_from_anchor": config.drafts_from_first,
        **extra,
        LAYER: body,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def _heads(config: BlockConfig) -> Fields:
    markov = config.markov
    return {
        "markov_rank": 0 if markov is None else markov.rank,
        "markov_head_type": "vanilla" if markov is None else markov.kind,
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": config.confidence == "state and token",
    }
