"""Native products with packed matrices."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from jspec.models.kernels.cpu.native import Kernel


@dataclass(frozen=True)
class ProductKernel(Kernel):
    """A native kernel that multiplies by matrices of one format.

    Attributes:
        format: a key of `convert.blocks.FORMATS`.
        activation_bits: 8, 16 or 24. See `jspec.models.packed`.
    """

    format: str
    activation_bits: int
    source: ClassVar[str] = "product"

    @property
    def variant(self) -> str:
        return f"{self.format}_{self.activation_bits}"

    @property
    def macros(self) -> dict[str, object]:
        return {"FORMAT": self.format, "PLANES": self.activation_bits // 8}


def multiply(kernel: ProductKernel, x: Array, tiles: Array, out_size: int) -> Array:
    """Return the product ``float32[M, out]`` of ``x``, ``float32[M, in]``, and `tiles`. For CPU programs only."""
    result = jax.ShapeDtypeStruct((x.shape[0], out_size), jnp.float32)
    return jax.ffi.ffi_call(kernel.target, result)(x, tiles)
