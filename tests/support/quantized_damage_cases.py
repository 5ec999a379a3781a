"""The damaged quantised checkpoints that `convert.load` must reject: base, damage, and error message."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from support import quantized_files
from support.damage import Damage, config, overwrite
from support.quantized_files import KINDS, Kind

# The base checkpoints by name.
QUANTIZED: dict[str, Kind] = {
    "AWQ": KINDS["AWQ"],
    "GPTQ": KINDS["GPTQ"],
    "GPTQ, desc_act": KINDS["GPTQ, desc_act"],
    "FP8": KINDS["FP8 in blocks"],
    "FP8, static": KINDS["FP8, static"],
    "FP8 for vLLM": KINDS["FP8 for vLLM, by rows"],
    "packed": KINDS["packed, asymmetric"],
    "packed, actorder": KINDS["packed, actorder"],
    "int8": KINDS["int8, group"],
    "float8": KINDS["float8, tensor, static"],
}
Q, DOWN = "model.layers.1.self_attn.q_proj.", "model.layers.1.mlp.down_proj."
_DTYPES = {
    **{"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn},
    **{"I8": np.int8, "I32": np.int32, "I64": np.int64},
}


def load_all(file: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a safetensors file, float8 included, which the library cannot load into NumPy."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        values = np.frombuffer(data[8 + size + start : 8 + size + end], _DTYPES[entry["dtype"]])
        found[name] = values.reshape(entry["shape"]).copy()
    return found


def edit(change: Callable[[dict], object]) -> Damage:
    def damage(directory: Path) -> None:
        weights = load_all(directory / "model.safetensors")
        change(weights)
        save_file(weights, directory / "model.safetensors", {"format": "pt"})

    return damage


def section(**changes: object) -> Damage:
    """Change fields of the quantisation section."""

    def damage(directory: Path) -> None:
        raw = json.loads((directory / "config.json").read_text())
        raw["quantization_config"].update(changes)
        (directory / "config.json").write_text(json.dumps(raw))

    return damage


def weights_field(**changes: object) -> Damage:
    """Change fields that describe the weights in a compressed-tensors section."""

    def damage(directory: Path) -> None:
        raw = json.loads((directory / "config.json").read_text())
        raw["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)
        (directory / "config.json").write_text(json.dumps(raw))

    return damage


def put(name: str, value: Callable[[dict], np.ndarray]) -> Damage:
    return edit(lambda w: w.update({name: value(w)}))


def entry(name: str, index: int | tuple[int, ...], value: float) -> Damage:
    return edit(lambda w: w[name].__setitem__(index, value))


def without(name: str) -> Damage:
    return edit(lambda w: w.pop(name))


def _another_group(directory: Path) -> None:
    raw = json.loads((directory / "config.json").read_text())
    groups = raw["quantization_config"]["config_groups"]
    groups["group_1"] = {"targets": ["re:.*down_proj"], "weights": groups["group_0"]["weights"] | {"num_bits": 8}}
    (directory / "config.json").write_text(json.dumps(raw))


GPTQ_TENSORS = quantized_files.gptq().pack((64, 64), np.random.default_rng(0))[0]
PLAIN = {f"{Q}weight": np.ones((64, 64), np.float16)}

QUANTIZED_CASES: dict[str, tuple[str, Damage, str]] = {
    # missing, unknown and misshapen parts
    "AWQ without qweight": ("AWQ", without(f"{Q}qweight"), r"lacks .*q_proj\.qweight, expected in 4-bit AWQ"),
    "AWQ without zero points": ("AWQ", without(f"{Q}qzeros"), r"lacks .*q_proj\.qzeros"),
    "GPTQ without scales": ("GPTQ", without(f"{Q}scales"), r"lacks .*q_proj\.scales, expected in 4-bit GPTQ"),
    "GPTQ without group indices": ("GPTQ, desc_act", without(f"{Q}g_idx"), r"lacks .*q_proj\.g_idx"),
    "FP8 without scales": ("FP8", without(f"{Q}weight_scale_inv"), r"lacks .*q_proj\.weight_scale_inv, .* FP8"),
    "FP8 without weight": ("FP8", without(f"{Q}weight"), r"lacks .*q_proj\.weight, expected in FP8"),
    "FP8 for vLLM without scales": (
        "FP8 for vLLM",
        without(f"{Q}weight_scale"),
        r"q_proj\.weight in .* has no scale; expected either weight_scale or weight_scale_inv",
    ),
    "FP8 with both scales": (
        "FP8 for vLLM",
        put(f"{Q}weight_scale_inv", lambda w: np.ones((1, 1), np.float32)),
        "has weight_scale and weight_scale_inv; expected either",
    ),
    "FP8 for vLLM in blocks": (
        "FP8 for vLLM",
        section(weight_block_size=[32, 24]),
        r"lacks .*q_proj\.weight_scale_inv, expected in FP8",
    ),
    "FP8 for vLLM, scales transposed": (
        "FP8 for vLLM",
        put(f"{Q}weight_scale", lambda w: w[f"{Q}weight_scale"].T.copy()),
        r"weight_scale in .* has shape \[1, 64\], expected \[64, 1\]",
    ),
    "packed without shape": ("packed", without(f"{Q}weight_shape"), r"lacks .*q_proj\.weight_shape"),
    "packed without zero points": ("packed", without(f"{Q}weight_zero_point"), r"lacks .*weight_zero_point"),
    "a quantised matrix is missing": (
        "AWQ",
        edit(lambda w: [w.pop(f"{Q}{part}") for part in ("qweight", "qzeros", "scales")]),
        r"lacks model\.layers\.1\.self_attn\.q_proj\.weight",
    ),
    "AWQ transposed": ("AWQ", put(f"{DOWN}qweight", lambda w: w[f"{DOWN}qweight"].T.copy()), "has shape .*expected"),
    "AWQ scales transposed": (
        "AWQ",
        put(f"{DOWN}scales", lambda w: w[f"{DOWN}scales"].T.copy()),
        r"scales in .* has shape \[64, 6\], expected \[6, 64\] in 4-bit AWQ",
    ),
    "GPTQ packed as AWQ": ("GPTQ", section(quant_method="awq"), "g_idx, which belong to no matrix|has shape"),
    "AWQ packed as GPTQ": ("AWQ", section(quant_method="gptq"), r"qweight in .* has shape"),
    "FP8 scales transposed": (
        "FP8",
        put(f"{DOWN}weight_scale_inv", lambda w: w[f"{DOWN}weight_scale_inv"].T.copy()),
        r"has shape \[4, 2\], expected \[2, 4\]",
    ),
    "FP8 with one scale in place of blocks": (
        "FP8",
        put(f"{Q}weight_scale_inv", lambda w: np.ones((), np.float32)),
        r"has shape \[\], expected \[2, 3\]",
    ),
    "wrong packed shape": (
        "packed",
        put(f"{Q}weight_shape", lambda w: np.array([64, 32])),
        r"weight_shape is \[64, 32\], expected \[64, 64\]",
    ),
    "unknown part": ("AWQ", put(f"{Q}perm", lambda w: np.ones(64, np.float16)), "unexpected .*perm"),
    "an adapter inside": ("AWQ", put(f"{Q}lora_A.weight", lambda w: np.ones((4, 64), np.float16)), "unexpected .*lora"),
    "scales without a matrix": ("AWQ", put("model.norm.scales", lambda w: np.ones(64, np.float16)), "belong to no mat"),
    "both plain and quantised": ("GPTQ", edit(lambda w: w.update(PLAIN)), r"q_proj\.weight, which belong to no matrix"),
    "a bias that is not 0": ("GPTQ", put(f"{Q}bias", lambda w: np.ones(64, np.float16)), r"unexpected .*q_proj\.bias"),
    "static scales of a dynamic scheme": (
        "FP8, static",
        section(activation_scheme="dynamic"),
        r"unexpected .*activation_scale",
    ),
    "int4 in float32": (
        "AWQ",
        put(f"{Q}qweight", lambda w: w[f"{Q}qweight"].astype(np.float32)),
        "qweight in .* is float32; expected int32 in 4-bit AWQ",
    ),
    "scales in int32": (
        "AWQ",
        put(f"{Q}scales", lambda w: w[f"{Q}scales"].astype(np.int32)),
        "is int32; expected float32 or bfloat16 or float16",
    ),
    "a plain weight with scales": (
        "float8",
        put(f"{Q}weight", lambda w: w[f"{Q}weight"].astype(np.float16)),
        "is float16; expected float8_e4m3fn",
    ),
    "a norm in int32": (
        "AWQ",
        put("model.norm.weight", lambda w: np.ones(64, np.int32)),
        r"model\.norm\.weight in .* is int32; expected one of float32, bfloat16, float16",
    ),
    "a norm in float64": ("AWQ", put("model.norm.weight", lambda w: np.ones(64)), "is F64; expected one of F32"),
    # mixed formats, and sections that contradict the tensors
    "another format inside": (
        "packed",
        edit(lambda w: w.update({f"{Q}{part}": value for part, value in GPTQ_TENSORS.items()})),
        "q_proj.g_idx, .*q_proj.qweight.* belong to no matrix in pack-quantized",
    ),
    "nothing is quantised": (
        "AWQ",
        edit(lambda w: [w.pop(name) for name in list(w) if name.endswith(("qweight", "qzeros", "scales"))]),
        r"has no matrix in 4-bit AWQ, the format that its config.json names",
    ),
    "no section": ("AWQ", config(quantization_config=None), "is I32; expected .* quantization_config describes"),
    "two sections": ("AWQ", config(compression_config={}), "quantization_config and compression_config describe"),
    "section is a list": ("AWQ", config(quantization_config=[1]), "a method that it does not name"),
    "another group size": ("AWQ", section(group_size=32), r"has shape \[4, 8\], expected \[2, 8\]"),
    "whole rows by mistake": ("GPTQ", section(group_size=-1), r"has shape \[4, 8\], expected \[1, 8\]"),
    "groups that do not divide": ("AWQ", section(group_size=40), "64 columns cannot be divided into groups of 40"),
    "packed groups that do not divide": (
        "packed",
        weights_field(group_size=40),
        "64 columns cannot be divided into groups of 40",
    ),
    "another block size": ("FP8", section(weight_block_size=[32, 32]), r"has shape \[2, 3\], expected \[2, 2\]"),
    "ignored but quantised": (
        "int8",
        section(ignore=["lm_head", Q[:-1]]),
        r"q_proj of .* is quantised, but its config.json says that it is not",
    ),
    "more bits": ("GPTQ", section(bits=8), r"qweight in .* has shape \[8, 64\], expected \[16, 64\]"),
    "zero points in a symmetric checkpoint": (
        "packed",
        weights_field(symmetric=True),
        "unexpected .*weight_zero_point, not part of pack-quantized",
    ),
    "an undeclared order": (
        "packed, actorder",
        weights_field(actorder=None),
        "unexpected .*weight_g_idx, not part of",
    ),
    "an order without desc_act": (
        "GPTQ, desc_act",
        section(desc_act=False),
        "g_idx in .* reorders the groups, but desc_act is false",
    ),
    "a group out of range": ("GPTQ, desc_act", entry(f"{Q}g_idx", 3, 4), "names groups outside 0 to 3"),
    "a negative group": ("GPTQ, desc_act", entry(f"{Q}g_idx", 3, -1), "names groups outside 0 to 3"),
    "groups of unequal size": (
        "packed, actorder",
        edit(lambda w: w[f"{Q}weight_g_idx"].fill(0)),
        "does not assign equally many columns to each of 4 groups",
    ),
    # values
    "AWQ infinite scale": (
        "AWQ",
        entry(f"{Q}scales", (1, 3), np.inf),
        "q_proj.weight in .* has scales that are not fi",
    ),
    "GPTQ scale not a number": ("GPTQ", entry(f"{DOWN}scales", (1, 3), np.nan), "has scales that are not finite"),
    "FP8 infinite scale": ("FP8", entry(f"{Q}weight_scale_inv", (1, 1), -np.inf), "has scales that are not finite"),
    "packed infinite scale": ("packed", entry(f"{Q}weight_scale", (1, 1), np.inf), "has scales that are not finite"),
    "FP8 weight not a number": (
        "FP8",
        entry(f"{Q}weight", (5, 1), np.nan),
        "has dequantised values that are not finite",
    ),
    "FP8 overflow": ("FP8", entry(f"{Q}weight_scale_inv", (1, 1), 3e38), "has dequantised values that are not finite"),
    # parameters that are not supported
    "AWQ, 8 bits": ("AWQ", section(bits=8), "quantization_config: bits is 8; only 4 can be read"),
    "AWQ, gemv": ("AWQ", section(version="gemv"), "version is 'gemv'; only 'gemm' can be read"),
    "GPTQ, 3 bits": ("GPTQ", section(bits=3), "bits is 3; only 4, 8 can be read"),
    "GPTQ, no bits": ("GPTQ", section(bits=None), "bits is None; only 4, 8"),
    "GPTQ, true bits": ("GPTQ", section(bits=True), "bits is True; only 4, 8"),
    "GPTQ, marlin": (
        "GPTQ",
        section(checkpoint_format="marlin"),
        "checkpoint_format is 'marlin'; only 'gptq', 'gptq_v2'",
    ),
    "GPTQ, bits by layer": ("GPTQ", section(dynamic={"-:.*": {}}), "dynamic is set, which changes the weights"),
    "GPTQ, group size as text": ("GPTQ", section(group_size="16"), "group_size is '16'; expected a positive integer"),
    "GPTQ, group size 0": ("GPTQ", section(group_size=0), "group_size is 0; expected a positive integer"),
    "GPTQ, desc_act as text": ("GPTQ", section(desc_act="no"), "desc_act is 'no'; expected true or false"),
    "FP8, e5m2": ("FP8", section(fmt="e5m2"), "fmt is 'e5m2'; only"),
    "FP8, three block sizes": (
        "FP8",
        section(weight_block_size=[1, 2, 3]),
        r"is \[1, 2, 3\]; expected two positive int",
    ),
    "FP8, block size 0": ("FP8", section(weight_block_size=[0, 2]), "expected two positive integers"),
    "FP8, names of modules": ("FP8", section(modules_to_not_convert="lm_head"), "expected a list of module names"),
    "another compression": ("packed", section(format="nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'; only"),
    "packed, 3 bits": ("packed", weights_field(num_bits=3), "num_bits is 3; only 4, 8 can be read"),
    "packed, one scale": ("packed", weights_field(strategy="tensor"), "strategy is 'tensor'; only 'channel', 'group'"),
    "packed floats": ("packed", weights_field(type="float"), "type is 'float'; only 'int'"),
    "float8 in groups": ("float8", weights_field(strategy="group", group_size=16), "strategy is 'group'; only"),
    "float8 with zero points": ("float8", weights_field(symmetric=False), "symmetric is false for float weights"),
    "groups without a size": (
        "packed",
        weights_field(group_size=None),
        "group_size is missing for the strategy 'group'",
    ),
    "no groups": ("packed", section(config_groups={}), "config_groups is empty"),
    "groups by name": ("packed", section(config_groups={"W4A16": ["Linear"]}), "W4A16 is .* expected an object"),
    "no weights": ("packed", section(config_groups={"group_0": {"weights": None}}), "weights is None; expected an obj"),
    "two schemes in one file": ("packed", _another_group, "describes 2 ways to store weights, but all matrices"),
    "transforms": (
        "packed",
        section(transform_config={"R1": {}}),
        "transform_config is set, which changes the weights",
    ),
    "sparse": (
        "packed",
        section(sparsity_config={"format": "sparse-24-bitmask"}),
        "format is 'sparse-24-bitmask'; only",
    ),
    "bitsandbytes": ("AWQ", section(quant_method="bitsandbytes"), "bitsandbytes .4 bits., which are not read, because"),
    # files
    "float8 file cut": ("FP8", lambda d: overwrite("model.safetensors", _half(d))(d), "damaged or cut short"),
}


def _half(directory: Path) -> bytes:
    data = (directory / "model.safetensors").read_bytes()
    return data[: len(data) // 2]
