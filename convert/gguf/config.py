"""Convert a GGUF file's metadata to the config.json that the same model has on the Hugging Face Hub."""

import dataclasses
import math
import operator
import reprlib
from typing import Any, cast

import numpy as np

from convert.errors import CheckpointError, listing
from convert.gguf.header import Header
from convert.gguf.vocabulary import vocabulary
from convert.json_fields import Fields
from convert.json_file import Json

ROPE_FACTORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The differences between the GGUF files of one `general.architecture` and Hugging Face files.

    Attributes:
        model_type: the `model_type` in config.json.
        class_name: the class that `architectures` in config.json names.
        interleaved: whether the rows of q and k are interleaved in pairs within each head. llama.cpp rotates adjacent
            rows together, whereas Hugging Face rotates the first half of a head with the second.
        biases: config.json flag -> the first-layer tensor that exists if the flag is true. Biases that the
            architecture always has need no flag.
    """

    model_type: str
    class_name: str
    interleaved: bool
    biases: dict[str, str] = dataclasses.field(default_factory=dict[str, str])


ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", True, {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", interleaved=False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", interleaved=False),
}
# Key without the architecture's prefix -> name in config.json. Keys that are in none of these tables are rejected.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_ORIGINAL = "rope.scaling.original_context_length"
_FACTORS = ("rope.scaling.factor", "rope.scale_linear")  # older files use the second key
_SCALING = {"rope.scaling.type", _ORIGINAL, *_FACTORS}
_READ_APART = {"vocab_size", "rope.freq_base", "rope.dimension_count", "attention.value_length"}
# Keys that have no effect at these values. Converters write them for any model.
_FIXED = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
# Keys that have no effect in this architecture, whatever their value. Expert sizes matter only if there are experts.
_UNUSED = {
    "attention.layer_norm_epsilon",
    "expert_feed_forward_length",
    "expert_gating_func",
    "expert_group_count",
    "expert_group_used_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_weights_norm",
    "expert_weights_scale",
    "interleave_moe_layer_step",
    "moe_every_n_layers",
    "rope.scaling.finetuned",
}
_SAMPLING = "general.sampling."
_SAMPLING_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
# The values for every Llama 3 model. Files store only the factors computed from them.
_LLAMA3: dict[str, float] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def architecture(header: Header) -> Architecture:
    """Return the architecture that `header` names.

    Raises:
        CheckpointError: the architecture is not supported, or the file does not hold a model.
    """
    name = header.metadata.get("general.architecture")
    if (kind := header.metadata.get("general.type", "model")) != "model":
        raise CheckpointError(
            f"{header.file} has general.type {str(kind)[:40]!r}; expected 'model': choose the model's file."
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.file} has general.architecture {str(name)[:40]!r}; expected one of {', '.join(ARCHITECTURES)}: "
            "for other models, load the Hugging Face checkpoint."
        )
    return ARCHITECTURES[name]


def raw_config(header: Header) -> Fields:
    """Return the content of config.json, for `convert.parse_config` to check.

    End-of-turn tokens count as EOS too, because the files name only one EOS token.

    Raises:
        CheckpointError: a key is unknown, or has no equivalent in config.json.
    """
    kind, words = architecture(header), vocabulary(header)
    prefix = f"{header.metadata['general.architecture']}."
    fields = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    _check_known(fields, prefix, header)
    raw: Fields = {name: fields[key] for key, name in _FIELDS.items() if key in fields}
    if raw.get("sliding_window") == 0:  # llama.cpp writes 0 for no window
        raw["sliding_window"] = None
    raw |= {flag: name in header.tensors for flag, name in kind.biases.items()}
    rotated = fields.get("rope.dimension_count")
    raw |= {"head_dim": rotated} if rotated is not None and "head_dim" not in raw else {}
    head_dim = raw.get("head_dim")
    if head_dim != rotated and isinstance(rotated, int) and isinstance(head_dim, int) and head_dim:
        raw["partial_rotary_factor"] = rotated / head_dim
    ends = words.ends
    return raw | cast(
        "Fields",
        {
            "model_type": kind.model_type,
            "architectures": [kind.class_name],
            "vocab_size": _vocab_size(fields.get("vocab_size"), len(words.tokens), header),
            "tie_word_embeddings": "output.weight" not in header.tensors,
            "rope_parameters": _rope(fields, header),
            "hidden_act": "silu",
            "bos_token_id": words.ids.get("bos"),
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "pad_token_id": words.ids.get("pad"),
        },
    )


def ignored_keys(header: Header) -> list[str]:
    """Return the sorted keys of a supported model that are ignored, except those that describe the file.

    Architecture keys may change what is computed, so each is parsed, known to have no effect, or rejected. General
    keys describe the file. Keys outside "general", "tokenizer" and the architecture belong to other programs.
    """
    name = header.metadata["general.architecture"]
    described = ("general.", "tokenizer.", f"{name}.", "split.", "quantize.", "imatrix.")
    unused = {f"{name}.{key}" for key in _UNUSED} & header.metadata.keys()
    return sorted(unused | {key for key in header.metadata if not key.startswith(described)})


def raw_generation_config(header: Header) -> Fields:
    """Return the content of generation_config.json: the sampling parameters that the file recommends, if any."""
    fields = {k.removeprefix(_SAMPLING): v for k, v in header.metadata.items() if k.startswith(_SAMPLING)}
    return {_SAMPLING_NAMES.get(name, name): value for name, value in fields.items()}


def _check_known(fields: Fields, prefix: str, header: Header) -> None:
    known = _FIELDS.keys() | _SCALING | _READ_APART | _FIXED.keys() | _UNUSED
    misspelt = {key for key in header.metadata if key[len(prefix) :] in known and _differ_once(key, prefix)}
    if unknown := {prefix + key for key in fields.keys() - known} | misspelt:
        raise CheckpointError(
            f"{header.file} has {listing(unknown)}, which may change the computed function and is not supported; "
            "choose another model."
        )
    for key, wanted in _FIXED.items():
        if fields.get(key, wanted[0]) not in wanted:
            raise CheckpointError(
                f"{header.file} has {key} {reprlib.repr(fields[key])}; only {wanted[-1]!r} is supported, so choose "
                "another model."
            )
    if fields.get("attention.value_length") not in (None, fields.get("attention.key_length")):
        raise CheckpointError(
            f"{header.file} has attention.value_length {reprlib.repr(fields['attention.value_length'])} and "
            f"attention.key_length {reprlib.repr(fields.get('attention.key_length'))}; expected equal head sizes."
        )


def _differ_once(key: str, prefix: str) -> bool:
    """Return whether `key` starts with `prefix` except for one character, as after a bit flip."""
    return sum(map(operator.ne, key, prefix)) == 1


def _vocab_size(said: Json, tokens: int, header: Header) -> Json:
    """Return the vocabulary size, which may exceed the number of tokens."""
    if isinstance(said, int) and tokens > said:
        raise CheckpointError(f"{header.file} has {tokens} tokens, but vocab_size {said}; download it again.")
    return tokens if said is None else said


def _rope(fields: Fields, header: Header) -> Fields:
    theta, kind = fields.get("rope.freq_base", 10000.0), _kind_of_scaling(fields, header)
    if ROPE_FACTORS in header.tensors:
        return {"rope_theta": theta, "rope_type": "llama3"} | _llama3(theta, kind, fields.get(_ORIGINAL), header)
    if kind == "none":  # the other scaling keys have no effect then
        return {"rope_theta": theta, "rope_type": "default"}
    if kind != "linear":
        raise CheckpointError(
            f"rope.scaling.type {reprlib.repr(kind)} is not supported in a GGUF file, {header.file}; only 'none', "
            "'linear' and Llama 3's factors are, so choose the checkpoint that the file was made from."
        )
    factor = next((fields[key] for key in _FACTORS if key in fields), None)
    return {"rope_theta": theta, "rope_type": "linear", "factor": factor}


def _kind_of_scaling(fields: Fields, header: Header) -> Json:
    """Return the scaling type that the file names, or linear if it gives only a factor, as in llama.cpp."""
    factors = [fields[key] for key in _FACTORS if key in fields]
    if factors[1:] and factors[0] != factors[1]:
        raise CheckpointError(
            f"{header.file} scales positions by {' and by '.join(map(reprlib.repr, factors))}, under its newer and its "
            "older key; choose the checkpoint that the file was made from."
        )
    return fields.get("rope.scaling.type", "linear" if factors and factors[0] not in (0, 1) else "none")


def _llama3(theta: Json, kind: Json, original: Json, header: Header) -> Fields:
    """Return Llama 3's rope fields, after checking that they reproduce the frequency divisors stored in the file.

    Raises:
        CheckpointError: the fields produce other divisors.
    """
    stored = header.tensors[ROPE_FACTORS]
    found = np.fromfile(header.file, "<f4", math.prod(stored.shape), offset=stored.offset).astype(np.float64)
    original = _LLAMA3["original_max_position_embeddings"] if original is None else original
    fields: dict[str, Any] = {"factor": float(found.max()), **_LLAMA3, "original_max_position_embeddings": original}
    plain = stored.kind.name == "F32" and kind == "none" and fields["factor"] > 0
    numbers = all(isinstance(value, int | float) and value > 0 for value in (theta, original))
    if not (plain and numbers) or not np.allclose(
        found, _factors(cast("float", theta), found.size, **fields), rtol=1e-4, atol=0
    ):
        raise CheckpointError(
            f"{ROPE_FACTORS} in {header.file} does not match Llama 3's position scaling with the file's metadata; "
            "choose the checkpoint that the file was made from."
        )
    return fields


def _factors(
    theta: float,
    count: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> np.ndarray:
    """Return ``[count]`` frequency divisors, from 1 for the high frequencies to `factor` for the low ones."""
    turns = original_max_position_embeddings * theta ** (-np.arange(count) / count) / (2 * math.pi)
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
