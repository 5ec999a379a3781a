"""The quantisation section of config.json: the supported formats, and the names of unsupported formats."""

import reprlib
from collections.abc import Callable

from convert.errors import CheckpointError
from convert.json_fields import Fields
from convert.json_file import Json
from convert.quantized.awq import Awq
from convert.quantized.base import Format
from convert.quantized.compressed import Compressed
from convert.quantized.fp8 import Fp8
from convert.quantized.gptq import Gptq

# `quant_method` -> the common name of the method, if it differs.
_NAMES = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "bitnet": "BitNet",
    "eetq": "EETQ",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp_quant": "FP-Quant",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "modelopt": "NVIDIA ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "quark": "AMD Quark",
    "spqr": "SpQR",
    "vptq": "VPTQ",
}
SECTIONS = ("quantization_config", "compression_config", "quantization")
SUFFIXES = Awq.SUFFIXES | Gptq.SUFFIXES | Fp8.SUFFIXES | Compressed.SUFFIXES
_FORMATS: dict[str, Callable[[Fields], Format]] = {
    "awq": Awq.parse,
    "compressed-tensors": Compressed.parse,
    "fp8": Fp8.parse,
    "gptq": Gptq.parse,
}


def parse(raw: Fields) -> Format | None:
    """Return the format of the weights that config.json describes; None for weights without quantisation.

    Raises:
        CheckpointError: the weights are in a format that is not supported. The message names the format.
    """
    present = [key for key in SECTIONS if raw.get(key) is not None]
    if not present:
        return None
    if any(raw[key] != raw[present[0]] for key in present):
        raise CheckpointError(
            f"{' and '.join(present)} describe quantised weights differently; delete the section that does not "
            "describe these weights."
        )
    key, section = present[0], raw[present[0]]
    reader = _FORMATS.get(str(_quant_method(key, section)).lower())
    if reader is None or not isinstance(section, dict):
        raise CheckpointError(
            f"{key} is for weights quantised with {_method(key, section)}, which {_reason(key, section)}; choose the "
            "unquantised checkpoint that they were made from."
        )
    try:
        return reader(section)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error


def _quant_method(key: str, section: Json) -> Json:
    method = section.get("quant_method") if isinstance(section, dict) else None
    return "compressed-tensors" if method is None and key == "compression_config" else method


def _reason(key: str, section: Json) -> str:
    if str(_quant_method(key, section)).lower() == "bitsandbytes":
        return "are not read, because only that library defines how its codebooks and nested scales are stored"
    return "are not read"


def _method(key: str, section: Json) -> str:
    fields = section if isinstance(section, dict) else {}
    method = _quant_method(key, section)
    if method is None and {"group_size", "bits"} <= fields.keys() <= {"group_size", "bits", "mode"}:
        method = "MLX"
    if method is None:
        return f"a method that it does not name ({reprlib.repr(section)})"
    name = _NAMES.get(str(method).lower(), str(method)[:40])
    loaded = [size for size in (4, 8) if fields.get(f"load_in_{size}bit") is True]
    bits = [fields[name] for name in ("bits", "w_bit", "nbits") if isinstance(fields.get(name), int | float)] + loaded
    return f"{name} ({bits[0]} bits)" if bits else name
