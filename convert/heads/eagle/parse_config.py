"""Parse an EAGLE head's config.json. Every flag that changes the result is either parsed or rejected."""

import dataclasses
from collections.abc import Collection

from convert.config import LlamaConfig, check_supported, parse_config
from convert.errors import CheckpointError, listing
from convert.heads import draft_vocabulary
from convert.heads.eagle.config import EagleConfig
from convert.heads.eagle.tensor_names import EMBEDDING, FC_BIAS, FUSION, HEAD, LAYOUTS
from convert.json_fields import Fields, ascending_ids, flag, integer

IDS = "eagle_aux_hidden_state_layer_ids"
LAYER, NVIDIA = "transformer_layer_config", "eagle_config"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_SPECULATORS = {"eagle3": "speculators", "eagle": FUSION}
_ARCHITECTURES = {
    "speculators": {"Eagle3Speculator", "Eagle3DraftModel", "Eagle3LlamaForCausalLM"},
    "sglang": {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"},
    "eagle": {
        "LlamaForCausalLMEagle",
        "EagleLlamaForCausalLM",
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "MistralForCausalLM",
    },
    FUSION: {"EagleSpeculator", "LlamaDecoderLayer"},
}
_FAMILIES = {1: ("llama", "mistral", "qwen2"), 3: ("llama", "qwen3")}
# Optional fields with one supported value. They belong to parallel drafting, HASS and legacy SGLang.
_FIXED = {
    "mask_token_id": None,
    "parallel_drafting": False,
    "add_para_norm": False,
    "use_aux_norm": False,
    "logit_scale": 1.0,
    "layernorms": False,
}
_FIXED_3 = {"bias": False, "qkv_bias": False}
_FIXED_NVIDIA = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "has_lm_head": True,
}
_UNUSED_NVIDIA = {"parallel_draft_heads_num_layers"}


def layout_of(raw: Fields, names: Collection[str]) -> str:
    """Return the layout of a head's files, as a key of `LAYOUTS`.

    Args:
        raw: the content of config.json.
        names: the names of all tensors.

    Raises:
        CheckpointError: the files do not hold an EAGLE head.
    """
    kind, architectures = raw.get("speculators_model_type"), raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise CheckpointError(f"architectures is {architectures!r}; expected a list of names.")
    third = any("Eagle3" in str(one) for one in architectures) or "draft_vocab_size" in raw
    if kind is not None:
        layout = _SPECULATORS.get(kind) if isinstance(kind, str) else None
    elif third or any(name.startswith("midlayer.") or name.endswith(".hidden_norm.weight") for name in names):
        layout = "sglang"
    else:
        layout = "eagle" if "fc.weight" in names or any("Eagle" in str(one) for one in architectures) else None
    if layout is None or not set(map(str, architectures)) <= _ARCHITECTURES[layout]:
        said = f"speculators_model_type {kind!r} and " if kind is not None else ""
        raise CheckpointError(
            f"it has {said}architectures {architectures} and is not an EAGLE head with one Llama layer; "
            "load an EAGLE-1, EAGLE-3 or EAGLE-3.1 head for a Llama, Mistral or Qwen model."
        )
    return layout


def parse(raw: Fields, names: Collection[str], num_layers: int | None) -> EagleConfig:
    """Parse the content of a config.json into an `EagleConfig`.

    Args:
        names: the names of all tensors. They show whether the head has its own embedding, output head and bias.
        num_layers: the target's number of layers. Without it, config.json must name the states that the head reads.

    Raises:
        CheckpointError: a field is missing, has a wrong value, contradicts another, or is not supported.
    """
    layout = layout_of(raw, names)
    generation = LAYOUTS[layout].generation
    check_supported(raw, {**_FIXED, **(_FIXED_3 if generation == 3 else {})})
    layer = _layer(raw, layout)
    own = {"own_embedding": EMBEDDING in names, "own_head": HEAD in names and generation == 3}
    if generation == 1:
        field = "fusion_bias" if layout == FUSION else "bias"
        biased = flag(raw, field, FC_BIAS in names or "fusion_fc.bias" in names)
        return EagleConfig(1, layer, layer.hidden_size, (-1,), fc_bias=biased, **own)
    inner = _nvidia(raw)
    flags = {name: _flag(raw, inner, name) for name in FLAGS}
    if layout == "speculators" and raw.get(FLAGS[0]) is None:
        raise CheckpointError(
            f"{FLAGS[0]} is missing, which vLLM treats as true and speculators as false; add the "
            "value with which the head was trained."
        )
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise CheckpointError(
            "norm_before_fc and fc_norm are both true; a head has at most one of the two: restore its own values."
        )
    target_size = integer(raw, "target_hidden_size", layer.hidden_size)
    features = _features(raw, inner, num_layers)
    draft_vocab_size = draft_vocabulary.size(raw, layer.vocab_size, names)
    return EagleConfig(3, layer, target_size, features, draft_vocab_size, **own, **flags)


def _layer(raw: Fields, layout: str) -> LlamaConfig:
    fields, generation = raw, LAYOUTS[layout].generation
    if raw.get("speculators_model_type") is not None:
        fields = raw.get(LAYER)
        if not isinstance(fields, dict):
            raise CheckpointError(
                f"{LAYER} is {fields!r}; expected the fields of its layer, as in the head's own file."
            )
        if raw.get("transformer_layer_architecture") != "auto":
            check_supported(raw, {"transformer_layer_architecture": "LlamaDecoderLayer"})
    elif flag(raw, "tie_word_embeddings"):
        raise CheckpointError(
            "tie_word_embeddings is true, which SGLang reads and other programs ignore; set it to false if "
            "the head's output is not its embedding."
        )
    known = _FAMILIES[generation]
    if fields.get("model_type") not in known:
        raise CheckpointError(
            f"model_type of its layer is {fields.get('model_type')!r}; expected one of "
            f"{', '.join(known)}: choose a head with such a layer."
        )
    if fields["model_type"] == "llama":
        check_supported(fields, {"sliding_window": None})
    layer = parse_config(
        {key: value for key, value in fields.items() if key != "architectures"} | {"tie_word_embeddings": False}
    )
    if layer.num_hidden_layers != 1:
        raise CheckpointError(
            f"num_hidden_layers is {layer.num_hidden_layers}; only single-layer heads are supported: choose one."
        )
    return dataclasses.replace(layer, qkv_bias=generation == 1 and flag(fields, "qkv_bias"))


def _nvidia(raw: Fields) -> Fields:
    """Return the fields that NVIDIA and SpecForge put into a section of their own."""
    inner = raw.get(NVIDIA)
    inner = {} if inner is None else inner
    known = {IDS, *FLAGS, *_FIXED_NVIDIA, *_UNUSED_NVIDIA}
    if not isinstance(inner, dict) or set(inner) - known:
        found = listing(set(inner) - known) if isinstance(inner, dict) else repr(inner)
        raise CheckpointError(
            f"{NVIDIA} has unknown {found}; expected an object of {listing(known, 20)}: choose another head."
        )
    check_supported(inner, _FIXED_NVIDIA)
    return inner


def _flag(raw: Fields, inner: Fields, name: str) -> bool:
    """Return a flag from config.json or its section, or false if neither has it, as in vLLM and SGLang."""
    values = {flag(place, name) for place in (raw, inner) if place.get(name) is not None}
    if len(values) > 1:
        raise CheckpointError(
            f"{name} differs between config.json and its {NVIDIA}; "
            "set both to the value with which the head was trained."
        )
    return values.pop() if values else False


def _features(raw: Fields, inner: Fields, num_layers: int | None) -> tuple[int, ...]:
    """Return the target layers whose inputs the head reads.

    vLLM and speculators list the numbers of these layer inputs at the top level. SGLang, SpecForge and NVIDIA list
    the numbers of layer outputs in a section.
    """
    found = {
        tuple(i + shift for i in ascending_ids(place, IDS)) for place, shift in ((raw, 0), (inner, 1)) if place.get(IDS)
    }
    if len(found) > 1:
        raise CheckpointError(
            f"{IDS} are {raw[IDS]} in config.json and {inner[IDS]} in its {NVIDIA}; the ids in {NVIDIA} name layer "
            "outputs, so each must be one less. Restore the head's own values."
        )
    features = found.pop() if found else _usual_features(num_layers)
    count = integer(raw, "num_aux_hidden_states", len(features))
    if count != len(features):
        raise CheckpointError(
            f"num_aux_hidden_states is {count} and {IDS} name {len(features)} states; restore the head's own values."
        )
    return features


def _usual_features(num_layers: int | None) -> tuple[int, ...]:
    """Return the features that Li et al. 2025 use: the inputs of layers 2, L // 2 and L - 3."""
    if num_layers is None:
        raise CheckpointError(
            f"config.json has no {IDS}, and the default layers depend on the target; pass the "
            "target, as in load(path, target)."
        )
    features = 2, num_layers // 2, num_layers - 3
    if sorted(set(features)) != list(features):
        raise CheckpointError(
            f"config.json has no {IDS}, and the default {list(features)} for a target of {num_layers} "
            "layers are not three different layers in ascending order; add the ids that the head was trained with."
        )
    return features
