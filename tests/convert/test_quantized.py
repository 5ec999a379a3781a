"""Quantised checkpoints load with exactly the weights that the published formula of their format gives."""

import json
import logging
import re
import shutil
from collections import Counter

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert
import jspec
from convert import CheckpointError, from_hf, safetensors_reader
from convert.safetensors_reader import QUANTIZED as QUANTIZED_DTYPES
from jspec.models.llama import matrices, widened
from support import checkpoints, quantized_files
from support.checkpoints import BFLOAT16, QWEN2, raw_config
from support.families import hf_logits, twin
from support.loaded import assert_same, expected_params
from support.quantized_damage_cases import QUANTIZED, load_all
from support.quantized_files import KINDS, SIZES

TIED = {"tie_word_embeddings": True}
FEW = ("AWQ", "GPTQ, desc_act", "FP8 in blocks", "packed, asymmetric", "int8, asymmetric", "float8, channel")


def dense(weights, dtype=np.float32, **changes):
    """Return jspec's arrays for weights in float64, rounded to float32 and then to `dtype`."""
    rounded = {name: array.astype(np.float32).astype(dtype) for name, array in weights.items()}
    return expected_params(rounded, raw_config(**SIZES | changes))


def plain_twin(folder, weights, **changes):
    """Write the dequantised weights as an ordinary checkpoint."""
    rounded = {name: array.astype(np.float32) for name, array in weights.items()}
    return checkpoints.write(folder, raw_config(**SIZES | changes), rounded)


@pytest.mark.parametrize("name", KINDS)
def test_weights_equal_published_formula(tmp_path, name):
    weights = quantized_files.write(tmp_path / "x", KINDS[name])
    assert_same(convert.load(tmp_path / "x").params, dense(weights))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FEW)
def test_weights_are_cast_after_dequantisation(tmp_path, name, dtype):
    weights = quantized_files.write(tmp_path / "x", KINDS[name])
    assert_same(
        convert.load(tmp_path / "x", dtype).params, dense(weights, {"bfloat16": BFLOAT16}.get(dtype, np.float16))
    )


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_read_in_any_chunks(tmp_path, monkeypatch, name):
    """Chunks of 7 rows begin within packed words and blocks."""
    monkeypatch.setattr(safetensors_reader, "_CHUNK_BYTES", 7 * 4 * 64)
    weights = quantized_files.write(tmp_path / "x", KINDS[name])
    assert_same(convert.load(tmp_path / "x").params, dense(weights))


@pytest.mark.parametrize("changes", [TIED, QWEN2, QWEN2 | TIED], ids=["tied", "qwen2", "qwen2, tied"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", FEW)
def test_shards_tied_heads_and_biases_are_read(tmp_path, name, shards, changes):
    weights = quantized_files.write(tmp_path / "x", KINDS[name], shards, **changes)
    assert_same(convert.load(tmp_path / "x").params, dense(weights, **changes))


@pytest.mark.parametrize("changes", [{}, QWEN2 | TIED], ids=["llama", "qwen2, tied"])
@pytest.mark.parametrize("name", FEW)
def test_logits_match_transformers_with_dequantised_weights(tmp_path, quick_compile, report, name, changes):
    weights = quantized_files.write(tmp_path / "x", KINDS[name], **changes)
    theirs = twin(plain_twin(tmp_path / "plain", weights, **changes))
    tokens = np.random.default_rng(1).integers(0, 96, (2, 24)).astype(np.int32)
    expected = hf_logits(theirs, tokens)
    logits = np.asarray(jax.jit(lambda model, ids: model(ids))(jspec.load(tmp_path / "x", np.float32), tokens))
    difference = np.abs(logits - expected).max()
    report(max_difference=f"{difference:.1e}", logits_std=f"{expected.std():.2f}")
    assert difference <= 1e-3


def test_quantised_head_is_read(tmp_path):
    """The output head may be quantised, too, as with the field lm_head of GPTQ."""
    kind = quantized_files.Kind(KINDS["GPTQ"].section | {"lm_head": True}, KINDS["GPTQ"].pack, quantizes_head=True)
    weights = quantized_files.write(tmp_path / "x", kind)
    assert_same(convert.load(tmp_path / "x").params, dense(weights))


def test_modules_may_be_plain(tmp_path):
    """A matrix that is stored unquantised is read as it is, even if config.json does not list it as ignored."""
    weights = quantized_files.write(tmp_path / "x", KINDS["packed"])
    file, module = tmp_path / "x" / "model.safetensors", "model.layers.0.mlp.down_proj."
    stored = {name: array for name, array in load_file(file).items() if not name.startswith(module)}
    save_file(stored | {f"{module}weight": weights[f"{module}weight"].astype(np.float32)}, file)
    assert_same(convert.load(tmp_path / "x").params, dense(weights))


def test_biases_of_zeros_are_ignored(tmp_path):
    """AutoGPTQ writes a bias of zeros for every matrix of a model without biases."""
    weights = quantized_files.write(tmp_path / "x", KINDS["GPTQ"])
    file = tmp_path / "x" / "model.safetensors"
    stored = load_file(file)
    for name in [name for name in stored if name.endswith("qweight")]:
        stored[name.replace("qweight", "bias")] = np.zeros(stored[name].shape[1], np.float16)
    save_file(stored, file)
    assert_same(convert.load(tmp_path / "x").params, dense(weights))


@pytest.mark.parametrize("name", ["float8, channel", "FP8 for vLLM"])
def test_scales_of_cache_are_ignored(tmp_path, name):
    kind = KINDS[name]
    section = kind.section | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    weights = quantized_files.write(tmp_path / "x", quantized_files.Kind(section, kind.pack))
    file = tmp_path / "x" / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{name}_scale": np.ones(1, np.float32) for name in "kv"}
    save_file(load_all(file) | scales, file)
    assert_same(convert.load(tmp_path / "x").params, dense(weights))


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        (
            "FP8 in blocks",
            "ignoring activation_scheme 'dynamic', because activations and the KV cache",
        ),
        ("FP8, static", "ignoring activation_scheme 'static', because"),
        ("FP8 for vLLM", "ignoring activation_scheme 'static', because"),
        ("int8", "ignoring input_activations, because activations and the KV cache are not quantised"),
        ("packed", None),
        ("AWQ", None),
    ],
)
def test_expected_activations_are_noted(tmp_path, caplog, name, phrase):
    quantized_files.write(tmp_path / "x", KINDS[name])
    with caplog.at_level(logging.INFO, "jspec"):
        convert.load(tmp_path / "x")
    notes = [record.getMessage() for record in caplog.records]
    assert len(notes) == (phrase is not None)
    assert phrase is None or phrase in notes[0]


def test_adapter_beside_is_noted(tmp_path, caplog):
    quantized_files.write(tmp_path / "x", KINDS["AWQ"])
    (tmp_path / "x" / "adapter_config.json").write_text("{}")
    with caplog.at_level(logging.WARNING, "jspec"):
        convert.load(tmp_path / "x")
    (record,) = caplog.records
    assert "and not the adapter beside it" in record.getMessage()


# ---- other parts of the program


@pytest.mark.parametrize("name", FEW)
def test_int8_model_equals_that_of_dequantised_weights(tmp_path, name):
    weights = quantized_files.write(tmp_path / "x", KINDS[name])
    model = jspec.load(tmp_path / "x", "float32", quantize="int8")
    expected = jspec.load(plain_twin(tmp_path / "plain", weights), "float32", quantize="int8")
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_packed_model_has_widened_matrices(tmp_path, caplog):
    """Quantised matrices are widened; those in float16 stay as they are stored."""
    weights = quantized_files.write(tmp_path / "x", KINDS["AWQ"])
    with caplog.at_level(logging.INFO, "jspec"):
        model = jspec.load(tmp_path / "x", "float32", packed=True)
    assert "down_proj.weight (4-bit AWQ)" in caplog.text and "to float32, because jspec cannot pack" in caplog.text
    assert not matrices(model)["layers.0.mlp.down_proj.weight"].parts
    expected = jspec.load(plain_twin(tmp_path / "plain", weights), "float32", packed=False)
    for one, other in zip(jax.tree.leaves(widened(model)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_converted_directory_holds_plain_weights(tmp_path, run, name, to):
    weights = quantized_files.write(tmp_path / "x", KINDS[name], shards=3)
    (tmp_path / "x" / "quantize_config.json").write_text("{}")
    code, out, error = run("convert", str(tmp_path / "x"), str(tmp_path / "y"), "--to", to)
    assert (code, error) == (0, "") and "float32" in out
    raw = json.loads((tmp_path / "y" / "config.json").read_text())
    assert "quantization_config" not in raw and not (tmp_path / "y" / "quantize_config.json").exists()
    assert convert.read_config(tmp_path / "y") == convert.read_config(tmp_path / "x")
    assert_same(convert.load(tmp_path / "y").params, dense(weights))


def test_transformers_reads_converted_checkpoint(tmp_path):
    weights = quantized_files.write(tmp_path / "x", KINDS["GPTQ"])
    model = twin(convert.save_hf(convert.load(tmp_path / "x"), tmp_path / "y"))
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), weights[name].astype(np.float32))


def test_plan_counts_widened_weights(tmp_path, run):
    """The planned size is that of the model in memory, not that of the files."""
    weights = quantized_files.write(tmp_path / "x", KINDS["AWQ"])
    plain = plain_twin(tmp_path / "plain", weights)
    shutil.copytree(tmp_path / "x", tmp_path / "only", ignore=shutil.ignore_patterns("*.safetensors"))
    plans = [
        run("plan", str(folder), str(plain), "--device", "h100", "--json") for folder in (tmp_path / "only", plain)
    ]
    assert plans[0][0] == 0 and json.loads(plans[0][1]) == json.loads(plans[1][1])


def test_unsupported_format_is_reported_by_plan(tmp_path, run):
    kind = KINDS["GPTQ"]
    quantized_files.write(tmp_path / "x", quantized_files.Kind(kind.section | {"bits": 3}, kind.pack))
    code, _, error = run("plan", str(tmp_path / "x"), str(tmp_path / "x"), "--device", "h100")
    assert code == 1 and "quantization_config: bits is 3; only 4, 8 can be read" in error


def test_part_of_float8_tensor_is_read(tmp_path):
    values = np.arange(-24, 24, dtype=np.float32).reshape(8, 6).astype(QUANTIZED_DTYPES["F8_E4M3"])
    save_file({"x": values}, tmp_path / "model.safetensors")
    tensor = safetensors_reader.scan(tmp_path, extra_dtypes=QUANTIZED_DTYPES)["x"]
    for index in (
        ...,
        slice(2, 5),
        (slice(2, 5), slice(1, 4)),
        (slice(None), slice(3, None)),
        (slice(6, None), slice(2)),
    ):
        np.testing.assert_array_equal(tensor.read_part(index), values[index])


# ---- other readers


def parts_of(folder, name):
    """Return the stored parts of a matrix as PyTorch tensors."""
    from safetensors.torch import load_file as load_torch

    module = name.removesuffix("weight")
    stored = load_torch(folder / "model.safetensors")
    return {key.removeprefix(module): value for key, value in stored.items() if key.startswith(module)}


def quantized_tensors(folder):
    found = from_hf.tensors(folder, convert.read_config(folder))
    return {name: tensor for name, tensor in found.items() if tensor.format not in ("F16", "F32", "BF16")}


@pytest.mark.parametrize("name", ["FP8 in blocks of 128", "FP8", "FP8, static"])
def test_fp8_equals_transformers(tmp_path, name):
    """On a CPU, transformers itself dequantises FP8, but only in whole blocks."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    quantized_files.write(tmp_path / "x", KINDS[name])
    for key, tensor in quantized_tensors(tmp_path / "x").items():
        parts = parts_of(tmp_path / "x", key)
        expected = Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.float32)
        np.testing.assert_array_equal(tensor.read(slice(None)), expected.numpy())


@pytest.mark.parametrize(
    "name",
    [name for name in KINDS if name.startswith(("packed", "int8", "float8", "naive")) and ", actorder" not in name],
)
def test_compressed_tensors_agrees(tmp_path, name):
    """Every format of compressed-tensors equals what that library (0.20) decompresses, with scales in float32."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    quantized_files.write(tmp_path / "x", KINDS[name])
    config = QuantizationConfig(**json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"])
    compressor = BaseCompressor.get_value_from_registry(config.format)
    for key, tensor in quantized_tensors(tmp_path / "x").items():
        parts = parts_of(tmp_path / "x", key)
        parts["weight_scale"] = parts["weight_scale"].float()
        expected = compressor.decompress(parts, config.config_groups["group_0"])["weight"]
        np.testing.assert_array_equal(tensor.read(slice(None)), expected.numpy())


# ---- random damage

CHANGES = {
    "cut": lambda array: array[:-1] if array.ndim else array.reshape(1, 1),
    # The transpose of a square matrix has the same shape.
    "transpose": lambda array: np.ascontiguousarray(array.T if len({*array.shape}) > 1 else array.reshape(1, 1, -1)),
    "flatten": lambda array: array.reshape(-1),
    "double": lambda array: np.stack([array, array], axis=-1),
    "float32": lambda array: array.astype(np.float32),
    "bytes": lambda array: array.reshape(*array.shape, 1).view(np.int8),
}
SUFFIXES = ("", "qweight", "weight_scale", "weight", "x")  # new last components of a name; "" deletes the tensor


def damaged(tensors):
    """Yield copies of `tensors`, each with one tensor of the chosen matrices changed, deleted or renamed."""
    for name in [name for name in tensors if "down_proj" in name or "q_proj" in name]:
        rest = {key: array for key, array in tensors.items() if key != name}
        yield from (rest | {name: change(tensors[name])} for change in CHANGES.values())
        renamed = {suffix: f"{name.rpartition('.')[0]}.{suffix}" for suffix in SUFFIXES}
        yield from (
            rest | ({new: tensors[name]} if suffix else {}) for suffix, new in renamed.items() if new not in rest
        )


@pytest.mark.parametrize("name", QUANTIZED)
def test_random_damage_is_rejected_or_harmless(tmp_path, name, report):
    """A tensor that is reshaped, cast, renamed or missing gives a one-sentence error or the same weights."""
    weights = quantized_files.write(tmp_path / "x", QUANTIZED[name], num_hidden_layers=1)
    file, outcomes = tmp_path / "x" / "model.safetensors", []
    for tensors in damaged(load_all(file)):
        save_file(tensors, file)
        try:
            loaded = convert.load(tmp_path / "x").params
        except CheckpointError as error:
            assert re.fullmatch(r".{,600}[;:] .*\.", str(error))
            outcomes.append("rejected")
        else:
            assert_same(loaded, dense(weights, num_hidden_layers=1))
            outcomes.append("harmless")
    report(**Counter(outcomes))
    assert outcomes.count("rejected") > 30
