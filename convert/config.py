"""Parse config.json into a `LlamaConfig`.

Every field that changes the computed function is either parsed or rejected by name.
"""

import dataclasses
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from convert.architectures import FAMILIES, Family
from convert.architectures.base import Details
from convert.errors import CheckpointError
from convert.generation_config import NAME, SamplingDefaults, parse_sampling
from convert.gguf import header as gguf_header
from convert.gguf.config import raw_config, raw_generation_config
from convert.json_fields import Fields, flag, integer, number, token_ids
from convert.json_file import Json, read_object
from convert.quantized import methods
from convert.rope import RopeConfig, parse_rope
from convert.weight_files import INDEX, SINGLE

# The fields that are fixed in every family. See `Family.fixed`.
_FIXED = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a model's forward pass, with its EOS ids and recommended sampling parameters.

    Instances are hashable, so they can be static arguments of `jax.jit`.

    Attributes:
        max_position_embeddings: the maximum sequence length. It is at most the sliding window, if the model has one.
        attention_bias: whether q, k, v and o have biases.
        qkv_bias: whether q, k and v have biases. It says nothing about o.
        qk_norm: whether queries and keys are normalised over each head before they are rotated.
        eos_token_ids: the EOS ids in config.json, followed by those that only generation_config.json names.
        pad_token_id: the padding id, if the files name one. It is used only to detect left padding.
        sampling: the sampling parameters that the model recommends.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    pad_token_id: int | None = None
    sampling: SamplingDefaults = SamplingDefaults()


def _family(raw: Fields) -> Family:
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or architectures not in (None, [family.class_name]):
        known = ", ".join(f"{family.model_type!r} with [{family.class_name!r}]" for family in FAMILIES.values())
        raise CheckpointError(
            f"model_type is {model_type!r} and architectures is {architectures!r}; only {known} are supported, "
            "so choose a checkpoint of one of these."
        )
    return family


def check_supported(raw: Fields, fixed: Mapping[str, Json]) -> None:
    """Raise CheckpointError if a field of `raw` differs from its value in `fixed`. Null counts as missing."""
    for key, wanted in fixed.items():
        value = raw.get(key)
        if value is not None and (value != wanted or isinstance(value, bool) != isinstance(wanted, bool)):
            raise CheckpointError(
                f"{key} is {value!r}, which changes the computed function; only {wanted!r} is supported, "
                "so choose another checkpoint."
            )


def _check_weights(raw: Fields) -> None:
    """Reject a config.json that makes transformers read a non-standard weights file."""
    named = raw.get("transformers_weights")
    if named not in (None, SINGLE):
        raise CheckpointError(
            f"transformers_weights is {reprlib.repr(named)}, but only {SINGLE} or the files listed in {INDEX} are "
            f"read; rename the weights file to {SINGLE}, and delete the field."
        )


def _check_layer_types(raw: Fields) -> None:
    kinds, layers = raw.get("layer_types"), integer(raw, "num_hidden_layers")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == kinds.count("full_attention") == layers):
        raise CheckpointError(
            f"layer_types is {reprlib.repr(kinds)}; only 'full_attention' in each of the {layers} layers is supported, "
            "so choose a checkpoint without sliding_attention."
        )


def _heads(raw: Fields) -> tuple[int, int, int]:
    """Return (number of query heads, number of key-value heads, head size)."""
    heads, hidden = integer(raw, "num_attention_heads"), integer(raw, "hidden_size")
    kv_heads = integer(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; restore the "
            "model's own config.json."
        )
    if raw.get("head_dim") is None and hidden % heads:
        raise CheckpointError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is missing; add it."
        )
    head_dim = integer(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"head_dim is {head_dim}; rotary embedding needs an even number.")
    return heads, kv_heads, head_dim


def parse_config(raw: Fields) -> LlamaConfig:
    """Parse the content of a config.json into a `LlamaConfig`.

    Both the transformers 5 fields (`rope_parameters`) and the earlier ones (`rope_theta`, `rope_scaling`) are
    supported. `eos_token_id` may be an int, a list or null. Fields that transformers ignores for the model's family
    are ignored here too.

    Raises:
        CheckpointError: a field is missing, has a wrong value, or requires an unsupported computation.
    """
    family = _family(raw)
    raw = {**family.defaults, **raw}
    methods.parse(raw)
    _check_weights(raw)
    check_supported(raw, {**_FIXED, **family.fixed})
    _check_layer_types(raw)
    heads, kv_heads, head_dim = _heads(raw)
    bos = token_ids(raw, "bos_token_id")
    if len(bos) > 1:
        raise CheckpointError(f"bos_token_id is {list(bos)}; expected one token id or null.")
    return LlamaConfig(
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "hidden_size"),
        intermediate_size=integer(raw, "intermediate_size"),
        num_hidden_layers=integer(raw, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(raw, "rms_norm_eps"),
        tie_word_embeddings=flag(raw, "tie_word_embeddings"),
        rope=parse_rope(raw),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(raw, "eos_token_id"),
        pad_token_id=_pad(raw),
        **cast("Details", {"attention_bias": False, "mlp_bias": False, **family.details(raw)}),
    )


def _pad(raw: Fields) -> int | None:
    """Return the padding id, or None for -1 and other values that are not ids. Such values do not affect any result."""
    pad = raw.get("pad_token_id")
    return pad if isinstance(pad, int) and not isinstance(pad, bool) and pad >= 0 else None


def read_config(source: str | Path) -> LlamaConfig:
    """Read `source`/config.json and generation_config.json, or the metadata of the GGUF file `source`.

    Chat models often name the end-of-turn token only in generation_config.json, so its ids count as EOS too. If that
    file is missing, config.json may hold its fields, as in transformers.

    Raises:
        CheckpointError: under the same conditions as `parse_config`, or if a file is missing, is not a JSON object, or
            is a damaged GGUF file.
    """
    path = Path(source)
    if path.is_file():
        return gguf_config(gguf_header.read(path))
    file, generation = path / "config.json", path / NAME
    raw = read_object(file)
    config = _parse(raw, file)
    file, raw = (generation, read_object(generation)) if generation.exists() else (file, raw)
    return _with_generation(config, raw, file)


def _with_generation(config: LlamaConfig, raw: Fields, file: Path) -> LlamaConfig:
    """Return `config` updated with `raw`, the generation_config.json fields read from `file`."""
    try:
        ends = dict.fromkeys((*config.eos_token_ids, *token_ids(raw, "eos_token_id")))
        sampling = parse_sampling(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    pad = config.pad_token_id if (own := _pad(raw)) is None else own
    return dataclasses.replace(config, eos_token_ids=tuple(ends), pad_token_id=pad, sampling=sampling)


def gguf_config(header: gguf_header.Header) -> LlamaConfig:
    """Return the config of a GGUF file, given its header.

    Raises:
        CheckpointError: under the same conditions as `read_config`.
    """
    config = _parse(raw_config(header), header.file)
    return _with_generation(config, raw_generation_config(header), header.file)


def _parse(raw: Fields, path: Path) -> LlamaConfig:
    try:
        return parse_config(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
