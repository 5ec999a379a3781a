"""The native log-sum-exp kernel."""

from dataclasses import dataclass
from typing import ClassVar

import jax
from jax import Array

from jspec.models.kernels.cpu.native import Float32Kernel


@dataclass(frozen=True)
class LogSumExpKernel(Float32Kernel):
    """The native kernel for `log_sum_exp`."""

    source: ClassVar[str] = "log_sum_exp"


def log_sum_exp(x: Array) -> tuple[Array, Array]:
    """Return each row's largest element, and the log of the sum of ``exp(x - largest)``.

    Both are ``float32[N]``, for ``x``, ``float32[N, V]``. For CPU programs only.
    """
    result = jax.ShapeDtypeStruct(x.shape[:1], x.dtype)
    largest, log_sum = jax.ffi.ffi_call(LogSumExpKernel().target, (result, result))(x)
    return largest, log_sum
