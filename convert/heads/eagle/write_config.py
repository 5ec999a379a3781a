"""Convert an `EagleConfig` to a config.json that sets every flag, because programs have different defaults."""

import dataclasses
import json
from collections.abc import Collection
from typing import cast

from convert import config_json as llama_json
from convert.errors import CheckpointError
from convert.heads.eagle.config import EagleConfig, EagleOrigin
from convert.heads.eagle.parse_config import IDS, LAYER, NVIDIA, parse
from convert.heads.eagle.tensor_names import LAYOUTS
from convert.json_fields import Fields
from convert.json_file import Json

FORMATS = ("speculators", "sglang", "eagle")


def check_format(config: EagleConfig, layout: str) -> None:
    """Raise CheckpointError unless programs that read `layout` compute the same result as a head with `config`."""
    if layout not in FORMATS:
        raise CheckpointError(f"format {layout!r} is unknown; choose one of {', '.join(FORMATS)}.")
    generation = LAYOUTS[layout].generation
    if config.generation != generation:
        fitting = [name for name in FORMATS if LAYOUTS[name].generation == config.generation]
        raise CheckpointError(
            f"{layout} files hold heads of generation {generation}, and this head is of generation "
            f"{config.generation}; choose {' or '.join(fitting)}."
        )
    if config.generation == 1 and (config.draft_vocab_size is not None or config.own_head):
        raise CheckpointError(
            "eagle files have no output head, because the head uses the target's; this head has its own output head, "
            "which can be saved only with a head of generation 3."
        )
    if config.generation == 3 and (sorted(set(config.features)) != list(config.features) or config.features[0] < 0):
        raise CheckpointError(
            f"features is {config.features}; {layout} files need distinct layers in ascending order, "
            "none of them negative: create the head with such features."
        )
    if config.norm_before_fc and config.fc_norm:
        raise CheckpointError(
            "norm_before_fc and fc_norm are both true, which no program reads; use only one of the two."
        )
    if unread := [name for name, wanted in _unread(config, layout).items() if wanted]:
        raise CheckpointError(
            f"programs that read {layout} files do not read {', '.join(unread)} and would compute "
            "something else; choose another format, or a head without these features."
        )


def _unread(config: EagleConfig, layout: str) -> dict[str, bool]:
    """Return the features that readers of `layout` ignore, and whether the head uses each one."""
    layer = config.layer
    alone = layer.qkv_bias and not layer.attention_bias
    if layout == "speculators":
        return {"biases on q, k and v alone": alone}
    both = {
        "attention_bias": layer.attention_bias,
        "mlp_bias": layer.mlp_bias,
        "the norms of queries and keys": layer.qk_norm,
    }
    if layout == "eagle":
        return both
    return both | {
        "biases on q, k and v alone": alone,
        "norm_before_residual": config.norm_before_residual,
        "features that start with the input of layer 0": config.features[0] == 0,
    }


def describe(
    config: EagleConfig, layout: str, dtype: str, origin: EagleOrigin | None, names: Collection[str]
) -> Fields:
    """Return the content of a config.json.

    Args:
        dtype: the dtype of the weights.
        origin: the files that the head was loaded from. Their config.json fields are kept if they still describe
            `config`.
        names: the names of the tensors to write.
    """
    made = _speculators(config) if layout == "speculators" else _flat(config, layout)
    kept: Fields = json.loads(origin.fields) if origin is not None and origin.layout == layout else {}
    if kept:
        merged = _merged(made, kept)
        made = merged if _means(merged, config, names) else made
    place = cast("Fields", made.get(LAYER, made))
    for section in (made, place):
        spelled = [key for key in ("dtype", "torch_dtype") if key in section]
        section.update(dict.fromkeys(spelled, dtype))
    if not any(key in section for section in (made, place) for key in ("dtype", "torch_dtype")):
        place["torch_dtype"] = dtype
    return made


def _means(raw: Fields, config: EagleConfig, names: Collection[str]) -> bool:
    try:
        found = parse(raw, names, None)
    except CheckpointError:
        return False
    return dataclasses.replace(found, own_head=config.own_head) == config  # the head can use the target's output head


def _merged(made: Fields, kept: Fields) -> Fields:
    """Return `made` updated with the fields of `kept`. Merge sections field by field."""
    both = {
        key: _merged(cast("Fields", made[key]), value)
        if isinstance(made.get(key), dict) and isinstance(value, dict)
        else value
        for key, value in kept.items()
    }
    return {**made, **both}


def _flags(config: EagleConfig) -> Fields:
    return {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "draft_vocab_size": config.draft_vocab_size or config.layer.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        IDS: cast("Json", list(config.features)),
    }


def _layer(config: EagleConfig) -> Fields:
    """Return the layer's fields, untied: the output head is in the files or is the target's, never the embedding."""
    return llama_json.fields(config.layer) | {"tie_word_embeddings": False}


def _speculators(config: EagleConfig) -> Fields:
    """Return the fields in the format that vLLM reads."""
    method: Json = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **_flags(config),
        "embed_requires_grad": False,
        LAYER: _layer(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def _flat(config: EagleConfig, layout: str) -> Fields:
    """Return a Llama's fields with the head's fields at the same level."""
    layer = _layer(config)
    if layout == "eagle":
        return {
            "architectures": ["LlamaForCausalLM"],
            **layer,
            "bias": config.fc_bias,
            "qkv_bias": config.layer.qkv_bias,
        }
    inner: Json = {
        IDS: [i - 1 for i in config.features],
        "use_aux_hidden_state": True,
        "norm_before_fc": config.norm_before_fc,
    }
    flags = _flags(config)
    if config.draft_vocab_size is None and not config.own_head:
        flags["draft_vocab_size"] = None  # SGLang then shares the target's head; with a number it makes a random one
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer,
        **flags,
        "num_aux_hidden_states": len(config.features),
        NVIDIA: inner,
    }
