"""Detection of weights quantised by another program, based on config.json."""

import reprlib

from convert.errors import CheckpointError
from convert.json_fields import Fields
from convert.json_file import Json

# `quant_method` -> the common name of the method, if it differs.
_NAMES = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "eetq": "EETQ",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp8": "FP8",
    "fp_quant": "FP-Quant",
    "gptq": "GPTQ",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "modelopt": "NVIDIA ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "quark": "AMD Quark",
    "spqr": "SpQR",
    "vptq": "VPTQ",
}
_SECTIONS = ("quantization_config", "compression_config", "quantization")


def check(raw: Fields) -> None:
    """Reject quantised weights. The error names the method.

    Raises:
        CheckpointError: config.json has a section for a quantisation method.
    """
    for key in _SECTIONS:
        if raw.get(key) is not None:
            raise CheckpointError(
                f"{key} is for weights quantised with {_method(key, raw[key])}, which are not read; choose the "
                "unquantised checkpoint that it was made from."
            )


def _method(key: str, section: Json) -> str:
    fields = section if isinstance(section, dict) else {}
    method = fields.get("quant_method")
    if method is None and key == "compression_config":
        method = "compressed-tensors"
    elif method is None and {"group_size", "bits"} <= fields.keys() <= {"group_size", "bits", "mode"}:
        method = "MLX"
    if method is None:
        return f"a method that it does not name ({reprlib.repr(section)})"
    name = _NAMES.get(str(method).lower(), str(method)[:40])
    loaded = [size for size in (4, 8) if fields.get(f"load_in_{size}bit") is True]
    bits = [fields[name] for name in ("bits", "w_bit", "nbits") if isinstance(fields.get(name), int | float)] + loaded
    return f"{name} ({bits[0]} bits)" if bits else name
