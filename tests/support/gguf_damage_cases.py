"""The damaged GGUF files that must be rejected: the change to a good file, and the error message."""

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from support import checkpoints, gguf_files
from support.gguf_files import Kind, assemble, entry, info, text

RAW = checkpoints.raw_config(
    vocab_size=12, num_hidden_layers=1, hidden_size=32, bos_token_id=None, eos_token_id=0, tie_word_embeddings=False
)
U32, STRING, ARRAY = (struct.pack("<I", kind) for kind in (4, 8, 9))


@dataclasses.dataclass
class Parts:
    """A file in parts: the metadata, the tensors (name -> shape, type, bytes), and the parts that are to be wrong.

    Attributes:
        entries: more bytes after the metadata, each counted as a key.
        places: offsets by name, instead of the right ones.
        infos: bytes by name, instead of the right ones.
    """

    keys: dict[Any, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]]
    entries: list[bytes] = dataclasses.field(default_factory=list)
    places: dict[str, int] = dataclasses.field(default_factory=dict)
    infos: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def bytes(self) -> bytes:
        data, infos = b"", []
        for name, (shape, kind, content) in self.tensors.items():
            infos.append(self.infos.get(name) or info(name, shape, kind, self.places.get(name, len(data))))
            data += content + bytes(-len(content) % 32)
        return assemble([*(entry(*pair) for pair in self.keys.items()), *self.entries], infos, data)


def good() -> Parts:
    """Return a complete file of a tiny model with twelve tokens."""
    keys = gguf_files.metadata(RAW) | {
        "tokenizer.ggml.tokens": ["<|end|>", *"abcdefgh", "Ġ", "ab", "Ġa"],
        "tokenizer.ggml.token_type": [3, *[1] * 11],
        "tokenizer.ggml.merges": ["a b", "Ġ a"],
    }
    arrays = gguf_files.tensors(RAW, checkpoints.tensors(RAW))
    return Parts(keys, {name: (array.shape, Kind.F32, array.tobytes()) for name, array in arrays.items()})


Q, NORM, HEAD = "blk.0.attn_q.weight", "output_norm.weight", "output.weight"
Change = Callable[[Parts], object]


def key(name: str, value: Any) -> Change:
    return lambda parts: parts.keys.update({name: value})


def without(name: str) -> Change:
    return lambda parts: parts.keys.pop(name)


def tensor(name: str, shape: tuple[int, ...], kind: int = Kind.F32, content: bytes | None = None) -> Change:
    filled = bytes(4 * int(np.prod(shape, dtype=np.int64))) if content is None else content
    return lambda parts: parts.tensors.update({name: (shape, kind, filled)})


def described(name: str, data: bytes) -> Change:
    return lambda parts: parts.infos.update({name: data})


# Files with wrong parts.
CHANGES: dict[str, tuple[Change, str]] = {
    # the header
    "key twice": (lambda p: p.entries.append(entry("general.name", "again")), "'general.name' appears twice"),
    "unknown value type": (key("general.x", struct.pack("<I", 13)), "value type 13"),
    "unknown array type": (key("general.x", ARRAY + struct.pack("<IQ", 13, 1)), "array of unsupported type 13"),
    "array of arrays": (key("general.x", ARRAY + struct.pack("<IQ", 9, 1)), "array of unsupported type 9"),
    "huge array": (key("general.x", ARRAY + struct.pack("<IQ", 8, 2**60)), f"count of {2**60}"),
    "huge array of numbers": (key("general.x", ARRAY + struct.pack("<IQ", 4, 2**20)), f"{2**22} bytes expected"),
    "long name": (key("x" * 300, 1), "invalid name 'xxxxxxxxxxxxxxxxxxxx'"),
    "name of two lines": (key("general\n.name", 1), "invalid name"),
    "another architecture at length": (key("general.architecture", "m" * 10**6), "expected one of llama"),
    "huge string": (key("general.x", STRING + struct.pack("<Q", 2**40)), f"count of {2**40}"),
    "string beyond the end": (key("general.x", STRING + struct.pack("<Q", 2**20)), f"{2**20} bytes expected"),
    "negative length": (key("general.x", STRING + struct.pack("<q", -1)), f"count of {2**64 - 1}"),
    "neither true nor false": (key("general.x", struct.pack("<IB", 7, 2)), "boolean 2 before byte"),
    "text not UTF-8": (key("general.x", STRING + text(b"\xff\xfe")), "'general.x' at byte .* can't decode"),
    "key not UTF-8": (key(b"\xff\xfe", 1), "can't decode"),
    # alignment, split, kind
    "alignment 0": (key("general.alignment", 0), "general.alignment is '0'"),
    "alignment 24": (key("general.alignment", 24), "general.alignment is '24'"),
    "another alignment": (key("general.alignment", 128), "starts at|bytes, expected"),
    "huge alignment": (key("general.alignment", 2**31), "starts at|bytes, expected"),
    "alignment in words": (key("general.alignment", "32"), "general.alignment is '32'"),
    "one of two parts": (key("split.count", 2), "is one of 2 parts; join them"),
    "part of no number": (key("split.count", "2"), "is one of 2 parts"),
    "an adapter": (key("general.type", "adapter"), "general.type 'adapter'"),
    "no architecture": (without("general.architecture"), "general.architecture 'None'"),
    "another architecture": (
        key("general.architecture", "mamba"),
        "general.architecture 'mamba'; expected one of llama",
    ),
    "architecture is a number": (key("general.architecture", 3), "general.architecture '3'"),
    "architecture is a list": (key("general.architecture", ["llama"]), "general.architecture .*'llama'"),
    # the model's keys
    **{
        f"no {name}": (without(f"llama.{name}"), f"{field} is missing")
        for name, field in (
            ("block_count", "num_hidden_layers"),
            ("context_length", "max_position_embeddings"),
            ("embedding_length", "hidden_size"),
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count", "num_attention_heads"),
            ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        )
    },
    "no count of key heads": (without("llama.attention.head_count_kv"), "has shape"),
    "heads by layer": (key("llama.attention.head_count_kv", [2]), r"num_key_value_heads is \[2\]"),
    "layers in words": (key("llama.block_count", "1"), "num_hidden_layers is '1'"),
    "layers true": (key("llama.block_count", True), "num_hidden_layers is True"),
    "four billion layers": (
        key("llama.block_count", 2**32 - 1),
        "11 tensors, .* num_hidden_layers 4294967295|12 tensors",
    ),
    "one layer more": (key("llama.block_count", 2), "lacks model.layers.1"),
    "no layer": (key("llama.block_count", 0), "num_hidden_layers is 0"),
    "another width": (key("llama.embedding_length", 64), "has shape"),
    "another inner width": (key("llama.feed_forward_length", 2**31), "has shape"),
    "odd heads": (key("llama.attention.head_count", 3), "not a multiple"),
    "more key heads": (key("llama.attention.head_count_kv", 4), "has shape"),
    "values of another size": (key("llama.attention.value_length", 4), "attention.value_length 4"),
    "part of a head turns": (key("llama.rope.dimension_count", 4), "partial_rotary_factor is 0.5"),
    "epsilon 0": (key("llama.attention.layer_norm_rms_epsilon", np.float32(0)), "rms_norm_eps is 0.0"),
    "theta NaN": (key("llama.rope.freq_base", np.float32(np.nan)), "rope_theta is nan"),
    "theta in words": (key("llama.rope.freq_base", "10000"), "rope_theta is '10000'"),
    "unknown key": (key("llama.attention.twist", np.float32(0)), "has llama.attention.twist, which may change"),
    "clamped": (key("llama.attention.clamp_kqv", np.float32(1)), "has attention.clamp_kqv 1.0; only 0.0 is supported"),
    "scaled": (key("llama.logit_scale", np.float32(0.5)), "has logit_scale 0.5; only 1.0 is supported"),
    "ranges": (key("llama.tensor_data_layout", "reversed"), "has tensor_data_layout 'reversed'"),
    "misspelt key": (
        lambda p: p.keys.update({"lnama.rope.freq_base": p.keys.pop("llama.rope.freq_base")}),
        "has lnama.rope.freq_base",
    ),
    "a window in words": (key("llama.attention.sliding_window", "16"), "sliding_window is '16'"),
    "experts": (key("llama.expert_count", 8), "expert_count 8; only 0"),
    "yarn": (key("llama.rope.scaling.type", "yarn"), "'yarn' is not supported in a GGUF file"),
    "heads in words": (
        lambda p: p.keys.update(dict.fromkeys(("llama.attention.key_length", "llama.attention.value_length"), "8")),
        "head_dim is '8'",
    ),
    "two factors": (
        lambda p: p.keys.update({"llama.rope.scaling.factor": np.float32(2), "llama.rope.scale_linear": np.float32(4)}),
        "scales positions by 2.0 and by 4.0",
    ),
    "linear without factor": (key("llama.rope.scaling.type", "linear"), "factor is missing"),
    # the tokenizer
    "no tokens": (without("tokenizer.ggml.tokens"), "has 0 tokens for a tokenizer 'gpt2'"),
    "no tokenizer": (key("tokenizer.ggml.model", "none"), "a tokenizer 'none', expected tokens for 'gpt2' or 'llama'"),
    "no kind of tokenizer": (without("tokenizer.ggml.model"), "a tokenizer 'none'"),
    "no merges": (without("tokenizer.ggml.merges"), "has no tokenizer.ggml.merges"),
    "endless token": (key("tokenizer.ggml.tokens", ["x" * 5000, *map(str, range(11))]), "a token of more than 4096"),
    "types in words": (key("tokenizer.ggml.token_type", ["a"] * 12), "types or scores that are not numbers"),
    "scores NaN": (key("tokenizer.ggml.scores", [np.float32(np.nan)] * 12), "types or scores that are not numbers"),
    "token twice": (key("tokenizer.ggml.tokens", ["<|end|>"] * 12), "has duplicate tokens"),
    "tokens are numbers": (key("tokenizer.ggml.tokens", list(range(12))), "tokens that are not text"),
    "tokens are one text": (key("tokenizer.ggml.tokens", "abc"), "tokenizer.ggml.tokens in .* is 'abc'; expected list"),
    "fewer types": (key("tokenizer.ggml.token_type", [1] * 11), "has 11 token types"),
    "more tokens than the model": (key("llama.vocab_size", 11), "has 12 tokens, but vocab_size 11"),
    "fewer tokens than the model": (key("llama.vocab_size", 13), "has shape"),
    "end outside": (key("tokenizer.ggml.eos_token_id", 12), "has eos_token_id 12, with 12 tokens"),
    "end in words": (key("tokenizer.ggml.eos_token_id", "<|end|>"), "expected int"),
    "flag is a number": (key("tokenizer.ggml.add_bos_token", 1), "expected bool"),
    "unknown tokenizer key": (key("tokenizer.ggml.flip", 1), "has tokenizer.ggml.flip"),
    "misspelt tokenizer key": (key("tokenizes.ggml.add_eos_token", True), "has tokenizes.ggml.add_eos_token"),
    "charsmap": (key("tokenizer.ggml.precompiled_charsmap", [1, 2]), "changes text before it is split"),
    # tensors with wrong descriptions
    "no dimension": (described(NORM, text(NORM) + struct.pack("<IIQ", 0, 0, 0)), "0 dimensions"),
    "five dimensions": (described(NORM, info(NORM, (1,) * 5, 0, 0)), "5 dimensions"),
    "a billion dimensions": (described(NORM, text(NORM) + struct.pack("<I", 2**30)), "1073741824 dimensions"),
    "dimension 0": (described(NORM, info(NORM, (0,), 0, 0)), "shape \\[0\\]|starts at"),
    "huge dimension": (described(NORM, info(NORM, (2**62, 2**62), 0, 0)), "starts at|bytes, expected"),
    "unknown type": (described(NORM, info(NORM, (32,), 200, 0)), "is of type 200, which gguf .* does not know"),
    **{
        f"removed type {number}": (
            described(NORM, info(NORM, (32,), number, 0)),
            rf"is of type {name} \({number}\), which llama.cpp has removed; choose the {instead} file",
        )
        for number, name, instead in (
            (4, "Q4_2", "Q4_0"),
            (31, "Q4_0_4_4", "Q4_0"),
            (33, "Q4_0_8_8", "Q4_0"),
            (38, "IQ4_NL_8_8", "IQ4_NL"),
        )
    },
    "another type": (described(NORM, info(NORM, (32,), Kind.F16, 0)), "starts at|bytes, expected"),
    "broken blocks": (described(Q, info(Q, (64, 16), Kind.Q8_0, 0)), "Q8_0 has blocks of 32"),
    "name beyond the end": (described(NORM, struct.pack("<Q", 2**30) + b"x"), f"count of {2**30}"),
    "tensor twice": (described(NORM, info(Q, (32,), 0, 0)), f"'{Q}' appears twice"),
    "offset outside": (lambda p: p.places.update({NORM: 2**40}), "starts at 1099511627776"),
    "offset of another": (lambda p: p.places.update({NORM: 0}), "starts at 0"),
    "offset not aligned": (lambda p: p.places.update({NORM: 33}), "starts at 33"),
    "gap": (lambda p: p.tensors.update({NORM: ((32,), 0, bytes(256))}), "starts at|bytes, expected"),
    # tensors that differ from the config's
    "missing tensor": (lambda p: p.tensors.pop(Q), "lacks model.layers.0.self_attn.q_proj.weight"),
    "missing embedding": (lambda p: p.tensors.pop("token_embd.weight"), "lacks model.embed_tokens.weight"),
    "unknown tensor": (tensor("extra.weight", (4,)), "unexpected extra.weight"),
    "renamed tensor": (
        lambda p: p.tensors.update({"blk.0.attn_w.weight": p.tensors.pop(Q)}),
        "unexpected blk.0.attn_w.weight",
    ),
    "name of Hugging Face": (tensor("model.norm.weight", (32,)), "unexpected model.norm.weight"),
    "tensor of another layer": (tensor("blk.7.attn_q.weight", (32, 32)), "unexpected blk.7.attn_q.weight"),
    "one bias": (tensor("blk.0.attn_q.bias", (32,)), "lacks model.layers.0.self_attn.k_proj.bias"),
    "transposed": (tensor("blk.0.attn_k.weight", (32, 16)), r"has shape \[32, 16\], expected \[16, 32\]"),
    "flattened": (tensor(Q, (1024,)), r"has shape \[1024\]"),
    "other experts' shape": (tensor(Q, (1, 32, 32)), r"has shape \[1, 32, 32\]"),
    "padded vocabulary": (tensor("token_embd.weight", (16, 32)), r"has shape \[16, 32\], expected \[12, 32\]"),
    "numbers that cannot be read": (tensor(NORM, (32,), Kind.I32), "of type I32, which the gguf library cannot"),
    "factors of no Llama 3": (tensor("rope_freqs.weight", (4,)), "does not match Llama 3's position scaling"),
    "factors long": (tensor("rope_freqs.weight", (4096, 16)), "rope_freqs.weight in"),
}


def at(position: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda file: file[:position] + data + file[position + len(data) :]


# Files with wrong bytes.
FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda f: b"", "4 bytes expected at byte 0 of 0"),
    "one byte": (lambda f: f[:1], "damaged or cut short"),
    "only zeros": (lambda f: bytes(len(f)), "begins with"),
    "another magic": (at(0, b"GGML"), "begins with b'GGML'"),
    "LFS pointer": (
        lambda f: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "is a git-lfs pointer",
    ),
    "a web page": (lambda f: b"<!DOCTYPE html><html>not found</html>", "is a web page"),
    "the format before": (at(0, b"tjgg"), "is in GGML, the format before GGUF"),
    "safetensors": (lambda f: struct.pack("<Q", 2) + b"{}", "begins with"),
    "version 0": (at(4, struct.pack("<I", 0)), "is GGUF version 0"),
    "version 1": (at(4, struct.pack("<I", 1)), "is GGUF version 1"),
    "version 4": (at(4, struct.pack("<I", 4)), "is GGUF version 4"),
    "big-endian": (at(4, struct.pack(">I", 3)), "is in big-endian byte order"),
    "no tensors": (at(8, struct.pack("<Q", 0)), "bytes, expected"),
    "a tensor too few": (at(8, struct.pack("<Q", 11)), "bytes, expected"),
    "a tensor too many": (at(8, struct.pack("<Q", 13)), "damaged or cut short"),
    "huge count of tensors": (at(8, struct.pack("<Q", 2**62)), f"count of {2**62}"),
    "a key too few": (at(16, struct.pack("<Q", 22)), "damaged or cut short"),
    "a key too many": (at(16, struct.pack("<Q", 24)), "damaged or cut short"),
    "huge count of keys": (at(16, struct.pack("<Q", 2**21)), "damaged or cut short"),
    "huge first key": (at(24, struct.pack("<Q", 2**63)), f"count of {2**63}"),
    "last byte missing": (lambda f: f[:-1], "bytes, expected"),
    "a byte more": (lambda f: f + b"\0", "bytes, expected"),
    "a page more": (lambda f: f + bytes(4096), "bytes, expected"),
    "twice": (lambda f: f + f, "bytes, expected"),
    **{f"cut at {i} of 24": (lambda f, i=i: f[: len(f) * i // 24], "damaged or cut short") for i in range(1, 24)},
}
