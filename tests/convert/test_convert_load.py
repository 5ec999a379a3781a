"""`convert.load` on intact checkpoints: names, values, dtypes, shards, tied heads."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
from convert import CheckpointError
from support.checkpoints import BFLOAT16, VARIANTS, make, raw_config, save_torch, tensors, write
from support.loaded import assert_same, expected_params

ROOT = Path(convert.__file__).parents[1]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_array_is_loaded(tmp_path, variant, shards):
    raw = raw_config(**VARIANTS[variant])
    weights = tensors(raw)
    loaded = convert.load(write(tmp_path / "hf", raw, weights, shards))
    assert_same(loaded.params, expected_params(weights, raw))
    assert {name: array.shape for name, array in loaded.params.items()} == convert.shapes(loaded.config)
    assert loaded.directory == tmp_path / "hf"
    assert loaded.config == convert.parse_config(raw)


@pytest.mark.parametrize("variant", VARIANTS)
def test_files_written_by_transformers_are_loaded(tmp_path, variant):
    pytest.importorskip("torch")
    raw = raw_config(**VARIANTS[variant])
    model = save_torch(tmp_path / "hf", **VARIANTS[variant])
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    loaded = convert.load(tmp_path / "hf")
    assert_same(loaded.params, expected_params(weights, raw))
    assert loaded.config == convert.parse_config(raw)


@pytest.mark.parametrize("stored", [np.float32, BFLOAT16, np.float16])
@pytest.mark.parametrize("wanted", [None, "float32", "bfloat16", "float16"])
def test_arrays_are_cast_to_dtype(tmp_path, stored, wanted):
    raw = raw_config()
    weights = tensors(raw, stored)
    loaded = convert.load(write(tmp_path / "hf", raw, weights), dtype=wanted)
    target = {None: np.dtype(stored), "bfloat16": np.dtype(BFLOAT16)}.get(wanted) or np.dtype(wanted)
    cast = {name: array.astype(target) for name, array in weights.items()}
    assert_same(loaded.params, expected_params(cast, raw))


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), ml_dtypes.bfloat16, "bfloat16"])
def test_dtype_spellings_are_accepted(tmp_path, dtype):
    loaded = convert.load(make(tmp_path / "hf"), dtype=dtype)
    assert loaded.params["norm.weight"].dtype == np.dtype(dtype)


@pytest.mark.parametrize("dtype", ["int8", "float64", np.int32, "half", object(), 3])
def test_unsupported_dtypes_are_rejected(tmp_path, dtype):
    with pytest.raises(CheckpointError, match="expected one of float32, bfloat16, float16"):
        convert.load(make(tmp_path / "hf"), dtype=dtype)


def test_jax_dtypes_are_accepted(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    assert convert.load(make(tmp_path / "hf"), dtype=jnp.bfloat16).params["norm.weight"].dtype == BFLOAT16


def test_mixed_dtypes_require_a_choice(tmp_path):
    raw = raw_config()
    weights = tensors(raw, BFLOAT16)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float32)
    write(tmp_path / "hf", raw, weights)
    with pytest.raises(CheckpointError, match=r"mixes dtypes .* choose one with dtype=") as error:
        convert.load(tmp_path / "hf")
    assert "model.norm.weight is float32" in str(error.value)
    assert_same(
        convert.load(tmp_path / "hf", "bfloat16").params,
        expected_params({name: a.astype(BFLOAT16) for name, a in weights.items()}, raw),
    )


def test_rows_are_read_in_chunks(tmp_path, monkeypatch):
    from convert import safetensors_reader

    monkeypatch.setattr(safetensors_reader, "_CHUNK_BYTES", 300)  # a little more than two rows
    raw = raw_config(attention_bias=True)
    weights = tensors(raw)
    loaded = convert.load(write(tmp_path / "hf", raw, weights))
    assert_same(loaded.params, expected_params(weights, raw))


def test_values_too_large_for_float16_are_rejected(tmp_path):
    raw = raw_config()
    weights = tensors(raw)
    weights["model.layers.1.mlp.up_proj.weight"][47, 31] = 70000.0
    write(tmp_path / "hf", raw, weights)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has values too large"):
        convert.load(tmp_path / "hf", dtype="float16")
    assert convert.load(tmp_path / "hf", dtype="bfloat16").params["layers.1.mlp.gate_up_proj.weight"].max() > 6e4


def test_widening_preserves_infinity(tmp_path):
    raw = raw_config()
    weights = tensors(raw, np.float16)
    weights["model.norm.weight"][0] = np.inf
    assert np.isinf(convert.load(write(tmp_path / "hf", raw, weights), "float32").params["norm.weight"][0])


def test_repeated_tied_head_is_accepted(tmp_path):
    raw = raw_config(tie_word_embeddings=True)
    weights = tensors(raw)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    loaded = convert.load(write(tmp_path / "hf", raw, weights))
    assert "lm_head.weight" not in loaded.params
    assert_same(loaded.params, expected_params(weights, raw))


def test_rotary_tables_are_ignored(tmp_path):
    raw = raw_config()
    weights = tensors(raw)
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    extra["model.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert_same(convert.load(write(tmp_path / "hf", raw, weights | extra)).params, expected_params(weights, raw))


def test_pickles_are_ignored(tmp_path):
    make(tmp_path / "hf")
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"never read")
    assert convert.load(tmp_path / "hf").params


def test_directories_of_symlinks_are_read(tmp_path):
    """A directory of links to files loads, because the hub cache contains links to blobs."""
    make(tmp_path / "blobs", shards=2)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert_same(convert.load(tmp_path / "snapshot").params, convert.load(tmp_path / "blobs").params)


def test_relative_string_path_is_accepted(tmp_path, monkeypatch):
    make(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert convert.load("org/model").directory == Path("org/model")


def test_load_imports_nothing_heavy(tmp_path):
    heavy = "{'torch', 'jax', 'orbax', 'huggingface_hub', 'transformers'}"
    code = f"import sys, convert; convert.load(sys.argv[1]); print({heavy} & set(sys.modules))"
    command = [sys.executable, "-c", code, str(make(tmp_path / "hf"))]
    fresh = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert fresh.stdout.strip() == "set()"


def test_convert_imports_no_unpickler():
    for file in Path(convert.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "import pickle" not in text, file
        assert "import torch" not in text, file


def test_public_names_are_sorted_and_exist():
    assert convert.__all__ == sorted(convert.__all__)
    assert all(hasattr(convert, name) for name in convert.__all__)


def test_single_file_matches_safetensors_reader(tmp_path):
    """The expected values above match the file on disk, not only the arrays that were meant to be written."""
    raw = raw_config()
    make(tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert_same(convert.load(tmp_path / "hf").params, expected_params(weights, raw))
