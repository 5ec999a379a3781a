"""Quantised checkpoints written from the published descriptions of their formats, value by value, without `convert`.

`write` saves a random model of a `Kind`, and returns its weights dequantised in float64. Every packer loops over bits,
so that it shares no arithmetic with the reader under test.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from support import checkpoints

# Sizes that all formats can store: multiples of 8 outputs and of 16 inputs, not all of them powers of 2.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 96}
GROUP = 16
Packed = tuple[dict[str, np.ndarray], np.ndarray]  # the parts of a matrix, and its values in float64
Pack = Callable[[tuple[int, int], np.random.Generator], Packed]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A format with its parameters: its section of config.json, and a function that makes one random matrix."""

    section: dict[str, Any]
    pack: Pack
    quantizes_head: bool = False


def write(
    directory: Path, kind: Kind, shards: int = 1, dtype: Any = np.float16, **changes: Any
) -> dict[str, np.ndarray]:
    """Write a random model, and return its Hugging Face weights in float64."""
    raw = checkpoints.raw_config(**SIZES | changes)
    rng = np.random.default_rng(1)
    plain = checkpoints.tensors(raw, dtype)
    stored: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    for name, array in plain.items():
        array = array + dtype(1) if name.endswith("norm.weight") else array
        is_outer = name.startswith("model.embed") or (name == "lm_head.weight" and not kind.quantizes_head)
        if array.ndim != 2 or is_outer:
            stored[name], weights[name] = array, array.astype(np.float64)
            continue
        parts, weights[name] = kind.pack(array.shape, rng)
        stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
    checkpoints.write(directory, raw | {"quantization_config": kind.section}, stored, shards)
    return weights


def write_zeros(directory: Path, kind: Kind, **changes: Any) -> None:
    """Write a model of any size whose quantised tensors are zeros, shaped like those of a small matrix scaled up."""
    raw = checkpoints.raw_config(**SIZES | changes)
    stored: dict[str, np.ndarray] = {}
    for name, shape in checkpoints.hf_shapes(raw).items():
        if len(shape) == 2 and ".layers." in name:
            for part, array in kind.pack((32, 32), np.random.default_rng(0))[0].items():
                grown = (array.shape[0] * shape[1] // 32, array.shape[1] * shape[0] // 32)
                stored[f"{name.removesuffix('weight')}{part}"] = np.zeros(grown, array.dtype)
        else:
            stored[name] = np.zeros(shape, np.float16)
    checkpoints.write(directory, raw | {"quantization_config": kind.section}, stored)


def _words(values: np.ndarray, bits: int, axis: int, order: list[int] | None = None) -> np.ndarray:
    """Pack unsigned `values` along `axis`; the value at place `order[i]` of a word fills its i-th lowest bits."""
    values = np.moveaxis(values, axis, -1)
    count = 32 // bits
    order = list(range(count)) if order is None else order
    words = np.zeros((*values.shape[:-1], -(-values.shape[-1] // count)), np.uint32)
    for word in range(words.shape[-1]):
        for i, place in enumerate(order):
            if word * count + place < values.shape[-1]:
                words[..., word] |= values[..., word * count + place].astype(np.uint32) << np.uint32(bits * i)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def _formula(values: np.ndarray, zeros: Any, scales: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return (value - zero) * scale in float64, column by column. `zeros` and `scales` are ``[O, G]``."""
    dense = np.empty(values.shape, np.float64)
    zeros = np.broadcast_to(zeros, scales.shape)
    for column, group in enumerate(groups):
        dense[:, column] = (values[:, column] - zeros[:, group].astype(np.float64)) * scales[:, group]
    return dense


def _scales(shape: tuple[int, ...], rng: np.random.Generator, dtype: Any = np.float16, bits: int = 4) -> np.ndarray:
    return (rng.uniform(0.08, 0.32, shape) / (1 << bits)).astype(dtype)


def awq(group_size: int = GROUP) -> Kind:
    """AWQ, version "gemm"."""

    def pack(shape: tuple[int, int], rng: np.random.Generator) -> Packed:
        rows, columns = shape
        size = columns if group_size == -1 else group_size
        values, zeros = rng.integers(0, 16, shape), rng.integers(0, 16, (rows, columns // size))
        scales = _scales(zeros.shape, rng)
        interleaved = [0, 2, 4, 6, 1, 3, 5, 7]
        parts = {
            "qweight": _words(values.T, 4, 1, interleaved),
            "qzeros": _words(zeros.T, 4, 1, interleaved),
            "scales": np.ascontiguousarray(scales.T),
        }
        return parts, _formula(values, zeros, scales.astype(np.float64), np.arange(columns) // size)

    section = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return Kind(section | {"modules_to_not_convert": None}, pack)


def _minus_ones(words: np.ndarray, bits: int) -> np.ndarray:
    """Subtract 1 at every place of each word as "gptq" does: as one number, so that a 0 borrows from the next place."""
    return (words.view(np.uint32) - np.uint32({4: 0x11111111, 8: 0x01010101}[bits])).view(np.int32)


def gptq(
    bits: int = 4, group_size: int = GROUP, layout: str = "gptq", sym: bool = False, desc_act: bool = False
) -> Kind:
    """GPTQ. With `desc_act`, columns are assigned to groups in random order."""

    def pack(shape: tuple[int, int], rng: np.random.Generator) -> Packed:
        rows, columns = shape
        size = columns if group_size == -1 else group_size
        values = rng.integers(0, 1 << bits, shape)
        zeros = rng.integers(0, 1 << bits, (rows, columns // size))
        zeros = np.full_like(zeros, 1 << (bits - 1)) if sym else zeros
        scales = _scales(zeros.shape, rng, bits=bits)
        groups = np.arange(columns) // size
        groups = rng.permutation(groups) if desc_act else groups
        parts = {
            "qweight": _words(values.T, bits, 0),
            "qzeros": _minus_ones(_words(zeros.T, bits, 1), bits) if layout == "gptq" else _words(zeros.T, bits, 1),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": groups.astype(np.int32),
        }
        return parts, _formula(values, zeros, scales.astype(np.float64), groups)

    section = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": sym, "desc_act": desc_act}
    return Kind(section | {"checkpoint_format": layout}, pack)


def _float8(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.normal(0, 8, shape).astype(ml_dtypes.float8_e4m3fn)


def _blocks(values: np.ndarray, scales: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return `values` in float64, each multiplied by the scale of its block."""
    dense = values.astype(np.float64)
    for i in range(dense.shape[0]):
        for j in range(dense.shape[1]):
            dense[i, j] *= float(scales[i // height, j // width])
    return dense


def fp8(block: list[int] | None = None, scheme: str = "dynamic") -> Kind:
    """The FP8 of transformers. Without `block`, a matrix has one scale."""

    def pack(shape: tuple[int, int], rng: np.random.Generator) -> Packed:
        height, width = block or shape
        scales = _scales((-(-shape[0] // height), -(-shape[1] // width)), rng, np.float32)
        values = _float8(rng, shape)
        parts = {"weight": values, "weight_scale_inv": scales if block else scales.reshape(())}
        if scheme == "static":
            parts["activation_scale"] = np.ones((), np.float32)
        return parts, _blocks(values, scales, height, width)

    section = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": block, "fmt": "e4m3"}
    return Kind(section | {"modules_to_not_convert": ["lm_head"]}, pack)


def serving_fp8(by_rows: bool = False, scheme: str = "static", one: tuple[int, ...] = ()) -> Kind:
    """The FP8 of AutoFP8 and vLLM. Without `by_rows`, a matrix has one scale, of shape `one`."""

    def pack(shape: tuple[int, int], rng: np.random.Generator) -> Packed:
        scales = _scales((shape[0] if by_rows else 1, 1), rng, np.float32)
        values = _float8(rng, shape)
        parts = {"weight": values, "weight_scale": scales if by_rows else scales.reshape(one)}
        if scheme == "static":
            parts["input_scale"] = np.ones(one, np.float32)
        return parts, _blocks(values, scales, 1 if by_rows else shape[0], shape[1])

    return Kind({"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]}, pack)


def _section(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    section = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return section | {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}


def packed(bits: int = 4, strategy: str = "group", symmetric: bool = True, actorder: str | None = None) -> Kind:
    """compressed-tensors "pack-quantized"."""

    def pack(shape: tuple[int, int], rng: np.random.Generator) -> Packed:
        rows, columns = shape
        size, offset = GROUP if strategy == "group" else columns, 1 << (bits - 1)
        values = rng.integers(-offset, offset, shape)
        zeros = rng.integers(-offset, offset, (rows, columns // size)) * (not symmetric)
        scales, groups = _scales(zeros.shape, rng, checkpoints.BFLOAT16, bits), np.arange(columns) // size
        parts = {
            "weight_packed": _words(values + offset, bits, 1),
            "weight_scale": scales,
            "weight_shape": np.array(shape, np.int64),
        }
        if not symmetric:
            parts["weight_zero_point"] = _words(zeros + offset, bits, 0)
        if actorder == "group":
            groups = rng.permutation(groups)
            parts["weight_g_idx"] = groups.astype(np.int32)
        return parts, _formula(values, zeros, scales.astype(np.float64), groups)

    group_size = GROUP if strategy == "group" else None
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group_size}
    return Kind(_section("pack-quantized", weights | {"actorder": actorder}), pack)


def integers(
    form: str = "int-quantized",
    strategy: str = "channel",
    symmetric: bool = True,
    bits: int = 8,
    actorder: str | None = None,
) -> Kind:
    """compressed-tensors "int-quantized" or "naive-quantized", for activations in int8."""

    def pack(shape: tuple[int, int], rng: np.random.Generator) -> Packed:
        rows, columns = shape
        size, offset = GROUP if strategy == "group" else columns, 1 << (bits - 1)
        values = rng.integers(-offset, offset, shape)
        zeros = rng.integers(-offset, offset, (rows, columns // size)) * (not symmetric)
        scales = _scales(zeros.shape, rng, checkpoints.BFLOAT16, bits)
        if strategy == "tensor":
            scales, zeros = scales[:1], zeros[:1]
        parts = {"weight": values.astype(np.int8), "weight_scale": scales[:, 0] if strategy == "tensor" else scales}
        if not symmetric:
            parts["weight_zero_point"] = zeros.astype(np.int8).reshape(parts["weight_scale"].shape)
        shown, groups = np.broadcast_to(scales.astype(np.float64), (rows, scales.shape[1])), np.arange(columns) // size
        if actorder == "group":
            groups = rng.permutation(groups)
            parts["weight_g_idx"] = groups.astype(np.int32)
        return parts, _formula(values, zeros, shown, groups)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    weights |= {"group_size": GROUP if strategy == "group" else None, "actorder": actorder}
    return Kind(_section(form, weights, {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}), pack)


def floats(strategy: str = "channel", form: str = "float-quantized", static: bool = False) -> Kind:
    """compressed-tensors "float-quantized" or "naive-quantized", for activations in float8."""
    block = [32, 24]

    def pack(shape: tuple[int, int], rng: np.random.Generator) -> Packed:
        height, width = {"tensor": shape, "channel": (1, shape[1]), "block": block}[strategy]
        scales = _scales((-(-shape[0] // height), -(-shape[1] // width)), rng, checkpoints.BFLOAT16)
        values = _float8(rng, shape)
        parts = {"weight": values, "weight_scale": scales.reshape(1) if strategy == "tensor" else scales}
        if static:
            parts["input_scale"] = np.ones(1, checkpoints.BFLOAT16)
        return parts, _blocks(values, scales, height, width)

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    weights |= {"block_structure": block} if strategy == "block" else {}
    activations = {"num_bits": 8, "type": "float", "strategy": "tensor" if static else "token", "dynamic": not static}
    return Kind(_section(form, weights, activations), pack)


KINDS: dict[str, Kind] = {
    "AWQ": awq(),
    "AWQ, whole rows": awq(-1),
    "GPTQ": gptq(),
    "GPTQ, symmetric": gptq(sym=True),
    "GPTQ, whole rows": gptq(group_size=-1),
    "GPTQ, desc_act": gptq(desc_act=True),
    "GPTQ, 8 bits": gptq(8),
    "GPTQ, 8 bits, symmetric, desc_act": gptq(8, sym=True, desc_act=True),
    "GPTQ v2": gptq(layout="gptq_v2"),
    "GPTQ v2, 8 bits, desc_act": gptq(8, layout="gptq_v2", desc_act=True),
    "FP8 in blocks": fp8([32, 24]),
    "FP8 in blocks of 128": fp8([128, 128]),
    "FP8 in blocks larger than all": fp8([10**30, 10**30]),
    "FP8": fp8(),
    "FP8, static": fp8(scheme="static"),
    "FP8 for vLLM": serving_fp8(),
    "FP8 for vLLM, dynamic": serving_fp8(scheme="dynamic", one=(1,)),
    "FP8 for vLLM, by rows": serving_fp8(by_rows=True),
    "packed": packed(),
    "packed, asymmetric": packed(symmetric=False),
    "packed, actorder": packed(actorder="group"),
    "packed, asymmetric, actorder": packed(symmetric=False, actorder="group"),
    "packed, actorder by weight": packed(actorder="weight"),
    "packed, channel": packed(strategy="channel"),
    "packed, 8 bits": packed(8),
    "packed, 8 bits, channel, asymmetric": packed(8, "channel", symmetric=False),
    "int8": integers(),
    "int8, tensor": integers(strategy="tensor"),
    "int8, tensor, asymmetric": integers(strategy="tensor", symmetric=False),
    "int8, group": integers(strategy="group"),
    "int8, group, actorder": integers(strategy="group", actorder="group"),
    "int8, asymmetric": integers(symmetric=False),
    "naive int8": integers("naive-quantized"),
    "naive int4, group, asymmetric": integers("naive-quantized", "group", symmetric=False, bits=4),
    "float8, channel": floats(),
    "float8, tensor": floats("tensor"),
    "float8, tensor, static": floats("tensor", static=True),
    "float8, block": floats("block"),
    "naive float8": floats("channel", "naive-quantized"),
}
