"""GGUF files: values of every type equal those of transformers; positions, ids, dtypes, and conversion."""

import json

import gguf
import numpy as np
import pytest

import convert
import jspec
from convert import CheckpointError, from_hf
from convert.__main__ import convert as command
from support import checkpoints, gguf_files, real
from support.gguf_files import RAW, Kind, metadata, model, stored, tensors, write
from support.loaded import assert_same, expected_params

PLAIN = {Kind.F32: "float32", Kind.F16: "float16", Kind.BF16: "bfloat16"}
REFUSED = {Kind.Q8_1, Kind.Q8_K, Kind.I8, Kind.I16, Kind.I32, Kind.I64, Kind.F64, Kind.Q1_0}
MATRICES = sorted(name for name, shape in checkpoints.hf_shapes(RAW).items() if len(shape) == 2)


def kinds_of_all() -> dict[str, Kind]:
    """Assign each readable type to a matrix, and repeat the types until every matrix has one."""
    kinds = [kind for kind in Kind if kind not in REFUSED]
    names = tensors(RAW, {name: np.zeros((256, 256), np.float32) for name in MATRICES})
    assert len(kinds) <= len(names)
    return {name: kinds[i % len(kinds)] for i, name in enumerate(names)}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Return a file that contains every readable type."""
    arrays = tensors(RAW, checkpoints.tensors(RAW))
    return write(tmp_path_factory.mktemp("gguf") / "mixed.gguf", metadata(RAW), arrays, kinds_of_all())


def same_bits(actual, expected):
    """Require equal bits, except that any NaN equals any other."""
    np.testing.assert_array_equal(actual, expected)
    numbers = ~np.isnan(expected)
    assert actual[numbers].tobytes() == expected[numbers].tobytes()


def test_all_gguf_types_match_transformers(mixed, report):
    pytest.importorskip("torch")
    expected = expected_params(real.transformers_weights(mixed), RAW)
    loaded = convert.load(mixed)
    assert loaded.params.keys() == expected.keys()
    for name, array in loaded.params.items():
        same_bits(array, expected[name])
    report(types=len(set(kinds_of_all().values())), tensors=len(loaded.params))


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_undequantisable_types_are_rejected_by_name(tmp_path, kind):
    array = np.zeros((2, 256), np.float32)
    data = stored(array, kind)
    with pytest.raises(NotImplementedError):
        gguf.dequantize(data, kind)
    keys = [gguf_files.entry(*pair) for pair in metadata(RAW | {"num_hidden_layers": 1}).items()]
    file = tmp_path / "x.gguf"
    file.write_bytes(
        gguf_files.assemble(keys, [gguf_files.info("token_embd.weight", (2, 256), kind, 0)], data.tobytes())
    )
    with pytest.raises(CheckpointError, match=rf"token_embd.weight in .*x\.gguf is of type {kind.name}, "):
        convert.load(file)


@pytest.mark.parametrize("variant", ["gqa", "mha", "mqa_tied", "attention_bias", "mlp_bias", "qwen2_tied", "qwen3"])
def test_every_model_feature_is_loaded(tmp_path, variant):
    changes = checkpoints.VARIANTS[variant]
    file, weights = model(tmp_path / "x.gguf", **changes)
    loaded = convert.load(file)
    assert_same(loaded.params, expected_params(weights, RAW | changes))
    assert loaded.config == convert.parse_config(RAW | changes | {"bos_token_id": 0})
    assert loaded.directory == file and convert.read_config(file) == loaded.config and convert.resolve(file) == file


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("wanted", [None, "float32", "bfloat16", "float16"])
def test_arrays_are_cast_to_dtype(tmp_path, kind, wanted):
    """`None` selects the dtype that all tensors share, or float32 if they differ."""
    weights = checkpoints.tensors(RAW)
    arrays = tensors(RAW, weights)
    file = write(tmp_path / "x.gguf", metadata(RAW), arrays, dict.fromkeys(arrays, kind))
    held = {name: array.astype(from_hf.dtypes.BY_NAME[PLAIN[kind]]) for name, array in weights.items()}
    target = from_hf.dtypes.BY_NAME[wanted or PLAIN[kind]]
    cast = {name: array.astype(target) for name, array in held.items()}
    assert_same(convert.load(file, wanted).params, expected_params(cast, RAW))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0])
def test_mixed_types_become_float32(tmp_path, kind):
    """A file of mixed types loads as float32, because norms are float32 in nearly every file."""
    weights = checkpoints.tensors(RAW)
    arrays = tensors(RAW, weights)
    kinds = {name: kind for name, array in arrays.items() if array.ndim == 2}
    params = convert.load(write(tmp_path / "x.gguf", metadata(RAW), arrays, kinds)).params
    assert {array.dtype for array in params.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(params["norm.weight"], weights["model.norm.weight"])


def test_rows_are_read_in_chunks(mixed, monkeypatch):
    from convert import safetensors_reader

    whole = convert.load(mixed).params
    monkeypatch.setattr(safetensors_reader, "_CHUNK_BYTES", 3 * 1024 + 1)  # three rows: neither a head nor half of one
    for name, array in convert.load(mixed).params.items():
        same_bits(array, whole[name])


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def llama3_factors(theta, head_dim, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings):
    """Compute the factors frequency by frequency, as llama.cpp's converter does."""
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / head_dim)
        if wavelength < original_max_position_embeddings / high_freq_factor:
            factors.append(1.0)
        elif wavelength > original_max_position_embeddings / low_freq_factor:
            factors.append(factor)
        else:
            smooth = original_max_position_embeddings / wavelength - low_freq_factor
            smooth /= high_freq_factor - low_freq_factor
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def scaled(file, keys, factors=None):
    """Write a model with changed keys and, if given, the factor tensor."""
    arrays = tensors(RAW, checkpoints.tensors(RAW))
    arrays |= {} if factors is None else {"rope_freqs.weight": factors}
    return write(file, metadata(RAW) | keys, arrays)


@pytest.mark.parametrize("changes", [{}, {"factor": 32.0}, {"original_max_position_embeddings": 4096}])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_llama3_rope_scaling_is_recovered_from_factors(tmp_path, theta, changes):
    fields = LLAMA3 | changes
    keys = {"llama.rope.freq_base": np.float32(theta)}
    if changes.get("original_max_position_embeddings"):
        keys["llama.rope.scaling.original_context_length"] = fields["original_max_position_embeddings"]
    file = scaled(tmp_path / "x.gguf", keys, llama3_factors(theta, 64, **fields))
    expected = convert.parse_config(RAW | {"rope_parameters": {"rope_type": "llama3", "rope_theta": theta, **fields}})
    assert convert.load(file).config.rope == expected.rope


@pytest.mark.parametrize(
    "change",
    [lambda f: f[::-1], lambda f: f * 0, lambda f: f * np.nan, lambda f: f[:16], lambda f: np.append(f[:-1], 9)],
)
def test_unknown_rope_factors_are_rejected(tmp_path, change):
    factors = np.ascontiguousarray(change(llama3_factors(10000.0, 64, **LLAMA3)), np.float32)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight in .*x.gguf .*(does not match Llama 3|has shape)"):
        convert.load(scaled(tmp_path / "x.gguf", {}, factors))


def test_linear_rope_scaling_is_read(tmp_path):
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": np.float32(4)}
    rope = convert.load(scaled(tmp_path / "x.gguf", keys)).config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    older = scaled(tmp_path / "older.gguf", {"llama.rope.scale_linear": np.float32(4)})
    assert convert.load(older).config.rope == rope
    untyped = scaled(tmp_path / "untyped.gguf", {"llama.rope.scaling.factor": np.float32(4)})
    assert convert.load(untyped).config.rope == rope
    once = scaled(tmp_path / "once.gguf", {"llama.rope.scaling.factor": np.float32(1)})
    assert convert.load(once).config.rope == convert.RopeConfig()
    factors = np.asarray(llama3_factors(10000.0, 64, **LLAMA3), np.float32)
    with pytest.raises(CheckpointError, match="does not match Llama 3's position scaling"):  # scaled by both
        convert.load(scaled(tmp_path / "both.gguf", {"llama.rope.scaling.factor": np.float32(4)}, factors))
    none = scaled(tmp_path / "none.gguf", {"llama.rope.scaling.type": "none"})
    assert convert.load(none).config.rope == convert.RopeConfig()


def test_all_eos_ids_are_collected(tmp_path):
    keys = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 0}
    assert convert.load(model(tmp_path / "x.gguf", keys)[0]).config.eos_token_ids == (0, 5)
    without = model(tmp_path / "none.gguf", {"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.bos_token_id": None})
    config = convert.load(without[0]).config
    assert (config.eos_token_ids, config.bos_token_id) == ((0,), None), "the text of 0 is <|endoftext|>"


def test_gguf_converts_to_store_and_hugging_face(mixed, tmp_path, capsys):
    loaded = convert.load(mixed)
    command(str(mixed), tmp_path / "store")
    assert "float32" in capsys.readouterr().out
    convert.save_hf(convert.load(tmp_path / "store"), tmp_path / "hf")
    for directory in (tmp_path / "store", tmp_path / "hf"):
        again = convert.load(directory)
        assert_same(again.params, loaded.params)
        assert again.config == loaded.config
        assert {"tokenizer.json", "tokenizer_config.json"} <= {file.name for file in directory.iterdir()}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"


def test_transformers_reads_converted_gguf(tmp_path, quick_compile):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    file, _ = model(tmp_path / "x.gguf", num_hidden_layers=1)
    convert.save_hf(convert.load(file), tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32").eval()
    tokens = np.arange(1, 13).reshape(2, 6)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    ours = jspec.load(file, "float32")(tokens)
    np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_directory_of_gguf_files_error_names_file(tmp_path):
    model(tmp_path / "x.gguf", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"name the GGUF file itself, as in .*x\.gguf"):
        convert.load(tmp_path)


def test_revision_of_file_is_rejected(tmp_path):
    file, _ = model(tmp_path / "X.GGUF", num_hidden_layers=1)
    assert convert.load(file).params
    with pytest.raises(CheckpointError, match="revision 'main' was passed with the file"):
        convert.load(file, revision="main")
