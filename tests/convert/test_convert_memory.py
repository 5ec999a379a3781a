"""The peak memory of loading and converting is the arrays in the target dtype plus about one more array."""

import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import convert
from support import gguf_files, quantized_files
from support.checkpoints import BFLOAT16, hf_shapes, make, raw_config, write

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "vocab_size": 8192,
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
# VmHWM is what ru_maxrss reports, but it resets at exec, whereas a child inherits ru_maxrss from a large parent.
MEASURE = """
import sys
from orbax.checkpoint import v1
import jax
import convert

def high_water():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

jax.devices()
source, small, dtype, target = sys.argv[1:]
convert.load(small)  # whatever is set up once
before = high_water()
loaded = convert.load(source, dtype)
if target:
    (convert.save_hf if target.endswith("hf") else convert.save)(loaded, target)
print((high_water() - before) * 1024)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that makes one of five forms of an 84-million-weight model, each with a tiny sibling."""
    root = tmp_path_factory.mktemp("memory")
    forms = {"single": (np.float32, 1), "shards": (BFLOAT16, 3)}

    @functools.cache
    def made(form: str) -> Path:
        if form == "store":
            convert.save(convert.load(made("single")), root / "store")
            convert.save(convert.load(root / "single-small"), root / "store-small")
            return root / "store"
        if form == "gguf":
            gguf_files.model(root / "gguf-small.gguf", num_hidden_layers=1)
            raw = gguf_files.RAW | SIZES
            arrays = gguf_files.tensors(raw, {n: np.full(s, 0.5, np.float32) for n, s in hf_shapes(raw).items()})
            kinds = {name: gguf_files.Kind.Q8_0 for name, array in arrays.items() if array.ndim == 2}
            return gguf_files.write(root / "gguf.gguf", gguf_files.metadata(raw), arrays, kinds)
        if form == "quantised":
            for folder, sizes in ((root / "quantised", SIZES), (root / "quantised-small", {})):
                quantized_files.write_zeros(folder, quantized_files.awq(), **sizes)
            return root / "quantised"
        dtype, shards = forms[form]
        raw = raw_config(**SIZES)
        make(root / f"{form}-small", shards=shards)
        return write(root / form, raw, {n: np.full(s, 0.5, dtype) for n, s in hf_shapes(raw).items()}, shards)

    return made


SLOW = pytest.mark.slow
ALLOWED = {
    "single": 32,
    "shards": 32,
    "store": 96,
    "gguf": 32,
    "quantised": 64,
}  # MiB in addition to the arrays and one more array


@pytest.mark.parametrize("target", ["", pytest.param("orbax", marks=SLOW), pytest.param("hf", marks=SLOW)])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=SLOW)])
@pytest.mark.parametrize(
    "form", ["shards", *(pytest.param(form, marks=SLOW) for form in ("single", "store", "gguf", "quantised"))]
)
def test_peak_memory_is_bounded(source, tmp_path, capsys, form, dtype, target):
    shapes = convert.shapes(convert.read_config(source(form))).values()
    item = np.dtype(BFLOAT16 if dtype == "bfloat16" else np.float32).itemsize
    model, largest = item * sum(math.prod(s) for s in shapes), 4 * max(math.prod(s) for s in shapes)
    environment = os.environ | {"PYTHONPATH": str(Path(convert.__file__).parents[1])}
    place = source(form)
    small = place.with_stem(f"{place.stem}-small")
    command = [sys.executable, "-c", MEASURE, str(place), str(small), dtype, target and str(tmp_path / target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    peak = int(done.stdout)
    with capsys.disabled():
        print(
            f"\n{form} as {dtype} -> {target or 'memory'}: peak {peak / model:.2f} of the model's "
            f"{model / 2**20:.0f} MiB, {(peak - model) / 2**20:+.0f} MiB (largest array {largest / 2**20:.0f} MiB)"
        )
    assert peak <= model + largest + ALLOWED[form] * 2**20
