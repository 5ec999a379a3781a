"""Small GGUF files for the tests, written by the gguf library, or byte by byte so that they can be invalid."""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from tokenizers import pre_tokenizers

from support import checkpoints, text_pair

Kind = gguf.GGMLQuantizationType
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [text_pair.END, *LETTERS, *(first + second for first, second in text_pair.MERGES), "<|tool|>"]
# Wide enough for every quantization's blocks.
RAW = checkpoints.raw_config(
    hidden_size=256,
    head_dim=64,
    intermediate_size=256,
    num_hidden_layers=4,
    vocab_size=len(TOKENS),
    bos_token_id=None,
    eos_token_id=0,
    rms_norm_eps=1e-5,
)
TEMPLATE = "{% for m in messages %}<|end|>{{ m['role'] }}\n{{ m['content'] | trim }}{% endfor %}{{ bos_token }}"


def metadata(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a model with this config and a byte-level tokenizer."""
    kind = {"mistral": "llama"}.get(raw["model_type"], raw["model_type"])
    return {
        "general.architecture": kind,
        "general.name": "tiny",
        f"{kind}.block_count": raw["num_hidden_layers"],
        f"{kind}.context_length": raw["max_position_embeddings"],
        f"{kind}.embedding_length": raw["hidden_size"],
        f"{kind}.feed_forward_length": raw["intermediate_size"],
        f"{kind}.attention.head_count": raw["num_attention_heads"],
        f"{kind}.attention.head_count_kv": raw["num_key_value_heads"],
        f"{kind}.rope.freq_base": np.float32(raw["rope_parameters"]["rope_theta"]),
        f"{kind}.rope.dimension_count": raw["head_dim"],
        f"{kind}.attention.key_length": raw["head_dim"],
        f"{kind}.attention.value_length": raw["head_dim"],
        f"{kind}.attention.layer_norm_rms_epsilon": np.float32(raw["rms_norm_eps"]),
        f"{kind}.vocab_size": raw["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS[: raw["vocab_size"]],
        "tokenizer.ggml.token_type": [3, *[1] * (len(TOKENS) - 2), 4][: raw["vocab_size"]],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in text_pair.MERGES],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def tensors(raw: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays by GGUF name from Hugging Face's, with rows of q and k in the order of llama.cpp's converter."""
    kind = raw["model_type"] if raw["model_type"].startswith("qwen") else "llama"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], raw["num_hidden_layers"])
    heads = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]} if kind == "llama" else {}
    found = {}
    for name, array in weights.items():
        for projection, count in heads.items():
            if f".{projection}." in name:
                halves = array.reshape(count, 2, array.shape[0] // count // 2, *array.shape[1:])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    return found


def stored(array: np.ndarray, kind: Kind, seed: int = 0) -> np.ndarray:
    """Return `array` as this type stores it, or random blocks if the library cannot quantize to it."""
    if kind == Kind.BF16:
        return array.astype(ml_dtypes.bfloat16).view(np.uint8)
    try:
        return gguf.quantize(array, kind)
    except NotImplementedError:
        shape = gguf.quant_shape_to_byte_shape(array.shape, kind)
        return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def write(
    file: Path, keys: dict[str, Any], arrays: dict[str, np.ndarray], kinds: dict[str, Kind] | None = None
) -> Path:
    """Write a file with the gguf library. Tensors are float32 unless `kinds` names a type; bytes stay unchanged."""
    writer = gguf.GGUFWriter(file, keys["general.architecture"])
    for key, value in keys.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, _type(value), _type(value[0]) if isinstance(value, list) else None)
    for name, array in arrays.items():
        kind = (kinds or {}).get(name, Kind.F32)
        writer.add_tensor(name, array if array.dtype == np.uint8 else stored(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _type(value: Any) -> gguf.GGUFValueType:
    for kind, name in ((bool, "BOOL"), (int, "UINT32"), (np.float32, "FLOAT32"), (float, "FLOAT32"), (list, "ARRAY")):
        if isinstance(value, kind):
            return gguf.GGUFValueType[name]
    return gguf.GGUFValueType.STRING


def model(file: Path, keys: dict[str, Any] | None = None, **changes: Any) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a random model of `RAW` with `changes`; return the file and its Hugging Face weights.

    `keys` replaces metadata; the value None removes a key.
    """
    raw = RAW | changes
    weights = checkpoints.tensors(raw)
    words = metadata(raw) | (keys or {})
    return write(
        file, {key: value for key, value in words.items() if value is not None}, tensors(raw, weights)
    ), weights


# ---- byte by byte
def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, value: Any) -> bytes:
    """Return the bytes of a key and its value; a value given as bytes (type and value) is used as it is."""
    return text(key) + (value if isinstance(value, bytes) else _packed(value, True))


def _packed(value: Any, typed: bool = False) -> bytes:
    kind = _type(value)
    head = struct.pack("<I", kind) if typed else b""
    if isinstance(value, list):
        items = b"".join(map(_packed, value))
        return head + struct.pack("<IQ", _type(value[0]), len(value)) + items
    if isinstance(value, str):
        return head + text(value)
    return head + struct.pack({"BOOL": "<?", "UINT32": "<I", "FLOAT32": "<f"}[kind.name], value)


def info(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """Return a tensor's entry in the header, given its shape in NumPy's order."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def assemble(entries: Iterable[bytes], infos: Iterable[bytes], data: bytes) -> bytes:
    """Return a file made of these parts."""
    entries, infos = list(entries), list(infos)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(entries)) + b"".join(entries) + b"".join(infos)
    return header + bytes(-len(header) % 32) + data
