"""Parse a block drafter's config.json. Every flag that changes the result is either parsed or rejected."""

import dataclasses
from collections.abc import Collection
from typing import TypedDict, cast, get_args

from convert.config import LlamaConfig, check_supported, parse_config
from convert.errors import CheckpointError, listing
from convert.heads import draft_vocabulary
from convert.heads.block import dflash2
from convert.heads.block.config import BlockConfig, ConfidenceInputs, MarkovConfig, MarkovKind
from convert.heads.block.fields import RESTORE, SECTION, once
from convert.heads.block.tensor_names import EMBEDDING, HEAD
from convert.json_fields import Fields, ascending_ids, flag, integer

LAYER = "transformer_layer_config"
IDS, SHIFTED_IDS = "aux_hidden_state_layer_ids", "target_layer_ids"  # numbers of layer inputs, and of layer outputs
_KNOWN = {SHIFTED_IDS, "mask_token_id", "block_size", "target_hidden_size"}


def layout_of(raw: Fields) -> str:
    """Return the layout of a block drafter's files, from the content of config.json.

    Raises:
        CheckpointError: the files do not hold a block drafter.
    """
    if (kind := raw.get("speculators_model_type")) is not None:
        layout = "speculators" if kind in ("dflash", "dspark", "dflash2") else None
    else:
        layout = "dflash" if SECTION in raw else "deepspec" if SHIFTED_IDS in raw else None
    if layout is None:
        said = f"speculators_model_type {kind!r} and " if kind is not None else ""
        raise CheckpointError(
            f"it has {said}architectures {raw.get('architectures')} and is not a block drafter; load a DFlash, DSpark, "
            "JetSpec or DFlash2 drafter."
        )
    return layout


def parse(raw: Fields, names: Collection[str], num_layers: int | None) -> BlockConfig:
    """Parse the content of a config.json into a `BlockConfig`.

    Args:
        names: the names of all tensors. They show whether the drafter has its own embedding and output head.
        num_layers: the target's number of layers. Without it, config.json must have it if a default depends on it.

    Raises:
        CheckpointError: a field is missing, has a wrong value, contradicts another, or is not supported.
    """
    layout, is_dflash2 = layout_of(raw), dflash2.is_used(raw)
    section = _section(raw, is_dflash2)
    block_size = once(raw, section, "block_size")
    windows = dflash2.windows(raw, block_size) if is_dflash2 and layout == "dflash" else ()
    body = _body(dflash2.without_windows(raw) if windows else raw, layout)
    for place in (section, raw):
        check_supported(place, {"target_hidden_size": body.hidden_size, "is_neox_style": True})
    whole = layout == "deepspec"  # these files hold everything
    kind = raw.get("speculators_model_type")
    first = whole or (layout == "speculators" and flag(raw, "sample_from_anchor", kind == "dspark"))
    if block_size == 1 and not first:
        raise CheckpointError(f"block_size is 1, so no row is left to draft a token; {RESTORE}.")
    if block_size > body.max_position_embeddings:
        raise CheckpointError(
            f"block_size is {block_size}; expected at most max_position_embeddings {body.max_position_embeddings}: "
            f"{RESTORE}."
        )
    drafted = draft_vocabulary.size(raw, body.vocab_size, names) if layout == "speculators" else None
    if is_dflash2 and layout == "dflash":
        causal = dflash2.is_causal(raw, windows)
    else:
        causal = flag(section, "causal_head")
        check_supported(raw, {"is_causal": causal})
    if is_dflash2:
        dflash2.check_whole(first, drafted)
    return BlockConfig(
        body=body,
        target_hidden_size=body.hidden_size,
        features=_features(raw, section, body, _num_layers(raw, num_layers)),
        block_size=block_size,
        mask_id=_mask_id(raw, section, body),
        causal=causal,
        drafts_from_first=first,
        draft_vocab_size=drafted,
        dflash2=dflash2.parse(raw, section, body, block_size) if is_dflash2 else None,
        windows=windows,
        own_embedding=whole or EMBEDDING in names,
        own_head=whole or HEAD in names,
        **_heads(raw, layout),
    )


def _section(raw: Fields, is_dflash2: bool) -> Fields:
    section, known = raw.get(SECTION) or {}, _KNOWN | (dflash2.KEYS if is_dflash2 else {"causal_head"})
    if not isinstance(section, dict) or set(section) - known:
        found = listing(set(section) - known) if isinstance(section, dict) else repr(section)
        raise CheckpointError(
            f"{SECTION} has unknown {found}; expected an object of {listing(known)}: choose another drafter."
        )
    return section


def _body(raw: Fields, layout: str) -> LlamaConfig:
    fields = raw
    if layout == "speculators":
        fields = raw.get(LAYER)
        if not isinstance(fields, dict):
            raise CheckpointError(f"{LAYER} is {fields!r}; expected the fields of the drafter's layers: {RESTORE}.")
    if fields.get("model_type") not in ("llama", "qwen3"):
        raise CheckpointError(
            f"model_type of its layers is {fields.get('model_type')!r}; expected llama or qwen3: choose a drafter with "
            "such layers."
        )
    fields = {key: value for key, value in fields.items() if key != "architectures"} | {"tie_word_embeddings": False}
    return dataclasses.replace(parse_config(fields), qk_norm=True)  # every program's layers norm queries and keys


def _num_layers(raw: Fields, num_layers: int | None) -> int | None:
    """Return the target's number of layers, if it is known. It must not differ between the target and config.json."""
    if raw.get("num_target_layers") is None:
        return num_layers
    said = integer(raw, "num_target_layers")
    if num_layers is not None and said != num_layers:
        raise CheckpointError(
            f"num_target_layers is {said}, but this target has {num_layers} layers; use the drafter that was trained "
            "for this target."
        )
    return said


def _mask_id(raw: Fields, section: Fields, body: LlamaConfig) -> int:
    found = {repr(place["mask_token_id"]) for place in (raw, section) if place.get("mask_token_id") is not None}
    value = raw.get("mask_token_id") if section.get("mask_token_id") is None else section["mask_token_id"]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if len(found) != 1 or not whole or not 0 <= cast(int, value) < body.vocab_size:
        said = " and ".join(sorted(found)) or "missing"
        raise CheckpointError(
            f"mask_token_id is {said}; expected one of the target's tokens, 0 to {body.vocab_size - 1}: {RESTORE}."
        )
    return cast(int, value)


def _features(raw: Fields, section: Fields, body: LlamaConfig, num_layers: int | None) -> tuple[int, ...]:
    """Return the target's hidden states that the drafter reads: i is the input of layer i.

    speculators list these numbers. DFlash, DeepSpec and JetSpec list the numbers of layer outputs.
    """
    places = ((raw, IDS, 0), (raw, SHIFTED_IDS, 1), (section, SHIFTED_IDS, 1))
    given = {
        tuple(i + shift for i in ascending_ids(place, key, -shift)) for place, key, shift in places if place.get(key)
    }
    if len(given) > 1:
        raise CheckpointError(
            f"{IDS} and {SHIFTED_IDS} name different states; the latter are layer outputs, so each must be one less: "
            f"{RESTORE}."
        )
    features = given.pop() if given else _usual_features(body.num_hidden_layers, num_layers)
    if num_layers is not None and features[-1] > num_layers:
        raise CheckpointError(
            f"the drafter reads the output of layer {features[-1] - 1}, but its target has the layers 0 to "
            f"{num_layers - 1}; {RESTORE}, or use the drafter that was trained for this target."
        )
    return features


def _usual_features(count: int, num_layers: int | None) -> tuple[int, ...]:
    """Return the features that DFlash uses by default: evenly spaced layers, as many as the drafter has."""
    if num_layers is None:
        raise CheckpointError(
            f"config.json has no {SHIFTED_IDS}, and the default layers depend on the target; pass the target, as in "
            "load(path, target)."
        )
    if count == 1:
        return (num_layers // 2 + 1,)
    used = range(min(count, num_layers + 1))  # a damaged config.json may have millions of layers
    features = tuple(round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in used)
    if len(used) < count or sorted(set(features)) != list(features):
        raise CheckpointError(
            f"config.json has no {SHIFTED_IDS}, and the default for {count} of {num_layers} layers is not "
            "in ascending order; add the ids that the drafter was trained with."
        )
    return features


class _Heads(TypedDict, total=False):
    markov: MarkovConfig | None
    confidence: ConfidenceInputs | None


def _heads(raw: Fields, layout: str) -> _Heads:
    """Return the fields of the Markov head and the confidence head."""
    if not (layout == "deepspec" or raw.get("speculators_model_type") == "dspark"):
        return {}
    rank = raw.get("markov_rank")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise CheckpointError(f"markov_rank is {rank!r}; expected 0 or more: {RESTORE}.")
    kind = raw.get("markov_head_type")
    if rank and kind not in get_args(MarkovKind):
        raise CheckpointError(
            f"markov_head_type is {kind!r}; expected one of {', '.join(get_args(MarkovKind))}: {RESTORE}."
        )
    if raw.get("enable_confidence_head") is None:
        raise CheckpointError(f"enable_confidence_head is missing; expected true or false: {RESTORE}.")
    confidence: ConfidenceInputs | None = None
    if flag(raw, "enable_confidence_head"):
        confidence = "state and token" if flag(raw, "confidence_head_with_markov") else "state"
    if confidence == "state and token" and not rank:
        raise CheckpointError(
            f"confidence_head_with_markov is true, but markov_rank is 0, so there is no Markov head: {RESTORE}."
        )
    return {"markov": MarkovConfig(cast(MarkovKind, kind), rank) if rank else None, "confidence": confidence}
