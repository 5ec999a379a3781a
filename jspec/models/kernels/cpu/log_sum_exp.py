"""The native log-sum-exp kernel."""

from dataclasses import dataclass
from typing import ClassVar

import jax
from jax import Array

from jspec.models.kernels.cpu import native
from jspec.models.kernels.cpu.native import Kernel


@dataclass(frozen=True)
class LogSumExpKernel(Kernel):
    """The native kernel for `log_sum_exp`."""

    source: ClassVar[str] = "log_sum_exp"

    @property
    def variant(self) -> str:
        return "float32"

    @property
    def is_faster(self) -> bool:
        return native.has_avx512()


def log_sum_exp(x: Array) -> tuple[Array, Array]:
    """Return each row's largest element, and the log of the sum of ``exp(x - largest)``.

    Both are ``float32[N]``, for ``x``, ``float32[N, V]``. For CPU programs only.
    """
    result = jax.ShapeDtypeStruct(x.shape[:1], x.dtype)
    largest, log_sum = jax.ffi.ffi_call(LogSumExpKernel().target, (result, result))(x)
    return largest, log_sum
