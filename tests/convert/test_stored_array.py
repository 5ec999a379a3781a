"""Arrays that are read in parts: every part equals that of the whole array."""

import dataclasses
import itertools

import numpy as np
import pytest

from convert import keymap
from convert.config import read_config
from convert.from_hf import filled, tensors
from convert.stored_array import stored_arrays
from jspec.models.fused_projection import interleaved_order
from support import checkpoints


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def folder(tmp_path_factory, request):
    """Return a checkpoint with biases, whose arrays are cast when they are read as float32."""
    raw = checkpoints.raw_config(attention_bias=True, mlp_bias=True, num_hidden_layers=1)
    folder = tmp_path_factory.mktemp("stored") / request.param
    weights = {name: array.astype(request.param) for name, array in checkpoints.tensors(raw, seed=0).items()}
    checkpoints.write(folder, raw, weights)
    return folder


def parts(size):
    """Return slices that begin and end inside, between and at the ends of concatenated tensors."""
    edges = sorted({0, 1, size // 3, size // 2, size - 1, size})
    return [slice(first, last) for first, last in itertools.combinations(edges, 2)] + [slice(None)]


def test_parts_in_another_order(folder):
    """The rows of a part may come from any place, also in runs, and a part may be empty."""
    config = read_config(folder)
    found, dtype = tensors(folder, config), np.dtype(np.float32)
    whole = dict(filled(found, keymap.entries(config), dtype))
    entry = next(entry for entry in keymap.entries(config) if entry.name.endswith("qkv_proj.weight"))
    sizes = [part.rows for part in entry.parts]
    for order in (interleaved_order(sizes, 2), np.random.default_rng(0).permutation(entry.shape[0])):
        (_, array), *_ = stored_arrays(found, [entry], dtype)
        array = dataclasses.replace(array, order=order)
        for index in itertools.product(*map(parts, array.shape)):
            np.testing.assert_array_equal(array.read(index), whole[entry.name][order][index])
        assert array.read((slice(2, 2), slice(None))).shape == (0, array.shape[1])


@pytest.mark.parametrize("chunk", [None, 64])
def test_parts_equal_those_of_the_whole_array(folder, monkeypatch, chunk, report):
    """Rows and columns of matrices and biases, also across q, k and v, and with chunks of a few rows."""
    if chunk is not None:
        monkeypatch.setattr("convert.safetensors_reader._CHUNK_BYTES", chunk)
    config = read_config(folder)
    found, dtype, count = tensors(folder, config), np.dtype(np.float32), 0
    whole = dict(filled(found, keymap.entries(config), dtype))
    for name, array in stored_arrays(found, keymap.entries(config), dtype):
        assert array.shape == whole[name].shape and array.dtype == dtype
        for index in itertools.product(*map(parts, array.shape)):
            np.testing.assert_array_equal(array.read(index), whole[name][index], err_msg=f"{name} {index}")
            count += 1
    report(parts=count)
