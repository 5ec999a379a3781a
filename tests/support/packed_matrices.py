"""Random packed matrices, and the weights that they hold."""

import gguf
import jax
import numpy as np
import pytest

from convert import blocks
from jspec.models.kernels.cpu import native
from jspec.models.kernels.cpu.masked_attention import AttentionKernel
from jspec.models.packed import PackedMatrix
from support import gguf_files
from support.gguf_files import Kind

FORMATS = sorted(blocks.FORMATS)
has_attention = native._compiler() is not None and AttentionKernel().is_faster
needs_attention = pytest.mark.skipif(not has_attention, reason="native attention needs AVX-512 and a C++ compiler")
needs_compiler = pytest.mark.skipif(native._compiler() is None, reason="there is no C++ compiler")


def stored_rows(name, count, width, seed=0):
    """Return random rows as a file stores them, with scales near 0.01, and the weights that they hold."""
    rng, kind = np.random.default_rng(seed), Kind[name]
    if name in ("BF16", "F16"):
        rows = gguf_files.stored(rng.standard_normal((count, width)).astype(np.float32) * 0.02, kind).view(np.uint8)
        return rows, gguf.dequantize(rows, kind)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    rows = rng.integers(0, 256, (count, width // values, size), np.uint8)
    for field in blocks.FORMATS[name].fields:
        if field.name in ("d", "dmin", "m"):
            scale = rng.uniform(0.005, 0.01, rows.shape[:2]).astype(np.float16)
            rows[..., field.offset : field.offset + 2] = scale[..., None].view(np.uint8)
    rows = rows.reshape(count, -1)
    return rows, gguf.dequantize(rows, kind)


def matrix(name, count, width, bits=24):
    """Return a random packed matrix and its weights."""
    rows, weights = stored_rows(name, count, width)
    tiles = blocks.empty_tiles(-(-count // blocks.LANES), blocks.LANES * rows.shape[1])
    blocks.interleave(name, rows, tiles)
    return PackedMatrix(jax.device_put(tiles), name, (count, width), bits), weights


def rounded(x, bits):
    """Return `x` in float64, with every 32 values rounded to `bits` bits as `jspec.load` describes."""
    runs = x.astype(np.float64).reshape(len(x), -1, 32)
    step = np.abs(runs).max(axis=-1, keepdims=True) / {8: 127, 16: 127 * 257}[bits]
    return (np.round(runs / np.where(step == 0, 1, step)) * step).reshape(x.shape)
