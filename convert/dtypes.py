"""The three dtypes that a checkpoint may have."""

from typing import cast

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from convert.errors import CheckpointError

BY_NAME = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
BY_SAFETENSORS_CODE = {"F32": BY_NAME["float32"], "BF16": BY_NAME["bfloat16"], "F16": BY_NAME["float16"]}


def parse(dtype: object) -> np.dtype:
    """Return the NumPy dtype for `dtype`: a name, a NumPy type or a JAX type.

    Raises:
        CheckpointError: `dtype` is not one of the three.
    """
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(cast("DTypeLike", dtype)).name
    except TypeError:
        name = ""
    if name not in BY_NAME:
        raise CheckpointError(f"dtype {dtype!r} is not supported; expected one of {', '.join(BY_NAME)}.")
    return BY_NAME[name]


def check_cast(values: np.ndarray, source: np.dtype, name: str) -> None:
    """Reject infinities in `values`, which were cast from `source`. They would surface only much later, as NaN.

    Raises:
        CheckpointError: the cast was not to a wider dtype, and a value is not finite.
    """
    if values.dtype not in (source, BY_NAME["float32"]):
        check_finite(bool(np.isfinite(values).all()), values.dtype, name)


def check_finite(is_finite: bool, dtype: np.dtype, name: str) -> None:
    """Raise CheckpointError if a value of the array `name` has become infinite in `dtype`."""
    if not is_finite:
        raise CheckpointError(f"{name} has values too large for {dtype}; choose bfloat16 or float32.")
