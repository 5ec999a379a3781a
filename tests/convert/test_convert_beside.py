"""Loading a directory reads the same files as transformers and ignores all others."""

import logging
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert
from convert import CheckpointError, weight_files
from convert.heads import files as head_files
from support import gguf_files
from support.checkpoints import make, raw_config, tensors
from support.damage import INDEX, edit_json, edit_tensors
from support.loaded import assert_same, expected_params

SHARD, SINGLE, HEAD, EMBEDDING = (
    "model-00001-of-00003.safetensors",
    "model.safetensors",
    "lm_head.weight",
    "model.embed_tokens.weight",
)
TIED = {"tie_word_embeddings": True}


def copied(*names):
    return lambda folder: [shutil.copy(next(folder.glob("model*.safetensors")), folder / name) for name in names]


def empty(*names):
    def add(folder):
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"")

    return add


BESIDE = {
    "Mistral's own": copied("consolidated.safetensors"),
    "Mistral's own in parts": copied(*(f"consolidated-0000{i}-of-00002.safetensors" for i in (1, 2))),
    "an adapter": copied("adapter_model.safetensors"),
    "a shard of another model": copied("model-00004-of-00004.safetensors"),
    "another precision": copied("model.fp16.safetensors"),
    "a head": copied("medusa_lm_head.safetensors"),
    "an empty file": empty("leftover.safetensors"),
    "pickles": empty("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json.bak"),
    "Meta's own": empty("original/consolidated.00.pth", "consolidated.00.pth", "params.json.bak"),
    "other programs'": empty("model.onnx", "flax_model.msgpack", "tf_model.h5", "weights.npz", "optimizer.pt"),
    "a manifest": empty("MANIFEST.sha256"),
    "GGUF": lambda folder: gguf_files.model(folder / "x.gguf", num_hidden_layers=1),
}


def transformers_params(folder, raw):
    """Return the weights that transformers loads, keyed by our names."""
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return expected_params({name: value.float().numpy() for name, value in state.items()}, raw)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", BESIDE)
def test_extra_files_are_not_read(tmp_path, name, shards):
    folder = make(tmp_path / "hf", shards=shards)
    BESIDE[name](folder)
    params = convert.load(folder).params
    assert_same(params, expected_params(tensors(raw_config()), raw_config()))
    assert_same(params, transformers_params(folder, raw_config()))
    assert_same(convert.load(convert.save_hf(convert.load(folder), tmp_path / "back")).params, params)


def test_single_file_takes_precedence_over_index(tmp_path):
    """A directory with two whole models loads `model.safetensors`, as in transformers, even if the index is damaged."""
    folder = make(tmp_path / "hf", shards=3)
    make(folder, seed=5)
    expected = expected_params(tensors(raw_config(), seed=5), raw_config())
    assert_same(convert.load(folder).params, expected)
    assert_same(transformers_params(folder, raw_config()), expected)
    assert weight_files.find(folder).is_ambiguous
    (folder / INDEX).write_text("{")
    assert_same(convert.load(folder).params, expected)


def test_config_naming_other_weights_is_rejected(tmp_path):
    """A config that names other weights is rejected; transformers loads them instead of `model.safetensors`."""
    folder = make(tmp_path / "hf")
    make(tmp_path / "other", seed=5)
    shutil.copy(tmp_path / "other" / SINGLE, folder / "best.safetensors")
    edit_json("config.json", lambda raw: raw.update(transformers_weights="best.safetensors"))(folder)
    expected = expected_params(tensors(raw_config(), seed=5), raw_config())
    assert_same(transformers_params(folder, raw_config()), expected)
    with pytest.raises(
        CheckpointError, match=r"transformers_weights is 'best.safetensors', but only model.safetensors or"
    ):
        convert.load(folder)
    edit_json("config.json", lambda raw: raw.update(transformers_weights=SINGLE))(folder)
    assert_same(convert.load(folder).params, expected_params(tensors(raw_config()), raw_config()))


@pytest.mark.parametrize(
    ("extra", "level", "phrase"),
    [
        ("consolidated.safetensors", logging.INFO, "reading the 3 files of model.safetensors.index.json and ignoring"),
        ("adapter_config.json", logging.WARNING, "and not the adapter beside it"),
        (
            "adapter_model.safetensors",
            logging.WARNING,
            "and not the adapter beside it; to use the adapter, merge it with PEFT",
        ),
    ],
)
def test_ignored_files_are_logged_once(tmp_path, caplog, extra, level, phrase):
    folder = make(tmp_path / "hf", shards=3)
    copied(extra)(folder)
    with caplog.at_level(logging.INFO, "jspec"):
        convert.read_config(folder)
        convert.load(folder)
    (record,) = caplog.records
    assert record.levelno == level and phrase in record.getMessage()


def test_plain_checkpoint_logs_nothing(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "jspec"):
        convert.load(make(tmp_path / "hf", shards=3))
    assert not caplog.records


def test_head_file_with_shards_does_not_make_model_a_head(tmp_path):
    folder = make(tmp_path / "hf", shards=3)
    save_file({"fc.weight": np.zeros((2, 2), np.float32)}, folder / "eagle.safetensors")
    assert head_files.kind_of(folder) is None
    shutil.move(folder / "eagle.safetensors", tmp_path / SINGLE)
    assert head_files.kind_of(tmp_path) == "eagle"


def test_adapter_config_is_not_copied(tmp_path):
    folder = make(tmp_path / "hf")
    (folder / "adapter_config.json").write_text("{}")
    assert not (convert.save(convert.load(folder), tmp_path / "store") / "adapter_config.json").exists()


# ---- tied heads


def head_in(dtype):
    def change(weights):
        weights[HEAD] = weights[EMBEDDING].astype(dtype)

    return edit_tensors(SINGLE, change)


def embedding_in(dtype):
    def change(weights):
        weights[HEAD] = weights[EMBEDDING]
        weights[EMBEDDING] = weights[EMBEDDING].astype(dtype)

    return edit_tensors(SINGLE, change)


def without_embedding(weights):
    weights[HEAD] = weights.pop(EMBEDDING)


CHANGES = [*map(head_in, ("float32", "float16", "bfloat16")), *map(embedding_in, ("float16", "bfloat16"))]


@pytest.mark.parametrize("change", CHANGES)
def test_tied_head_is_embedding_in_any_stored_dtype(tmp_path, change):
    """The head may be a rounded copy of the embedding or the reverse; `save_hf` omits such a copy."""
    folder = make(tmp_path / "hf", **TIED)
    change(folder)
    stored = load_file(folder / SINGLE)
    dtype = stored["model.norm.weight"].dtype
    loaded = convert.load(folder, dtype)
    np.testing.assert_array_equal(loaded.params["embed_tokens.weight"], stored[EMBEDDING].astype(dtype))
    assert "lm_head.weight" not in loaded.params
    written = load_file(convert.save_hf(loaded, tmp_path / "back") / SINGLE)
    assert (HEAD in written) == (stored[HEAD].dtype == stored[EMBEDDING].dtype)


@pytest.mark.parametrize(
    ("change", "is_rounded"),
    [
        (head_in("bfloat16"), True),
        (embedding_in("bfloat16"), True),
        (edit_tensors(SINGLE, lambda weights: weights.update({HEAD: weights[EMBEDDING]})), False),
        (
            edit_tensors(
                SINGLE,
                lambda weights: weights.update(
                    {EMBEDDING: np.round(weights[EMBEDDING]).astype("float16"), HEAD: np.round(weights[EMBEDDING])}
                ),
            ),
            False,
        ),
    ],
    ids=["a rounded head", "a rounded embedding", "a copy", "a copy without rounding"],
)
def test_rounded_tied_head_is_ignored_with_warning(tmp_path, caplog, change, is_rounded):
    """Such a head is ignored with a warning, because transformers computes with both arrays in float32."""
    folder = make(tmp_path / "hf", **TIED)
    change(folder)
    with caplog.at_level(logging.INFO, "jspec"):
        convert.load(folder, "float32")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == is_rounded and all("set tie_word_embeddings to false to read both" in one for one in said)


def test_dtype_of_tied_head_is_ignored(tmp_path):
    folder = make(tmp_path / "hf", **TIED)
    head_in("float16")(folder)
    assert {array.dtype for array in convert.load(folder).params.values()} == {np.dtype(np.float32)}


def test_tied_head_without_embedding_becomes_embedding(tmp_path):
    folder = make(tmp_path / "hf", **TIED)
    edit_tensors(SINGLE, without_embedding)(folder)
    params = convert.load(folder).params
    assert_same(params, expected_params(tensors(raw_config(**TIED)), raw_config(**TIED)))
    assert_same(params, transformers_params(folder, raw_config(**TIED)))
    back = convert.save_hf(convert.load(folder), tmp_path / "back")
    assert (back / SINGLE).read_bytes() == (folder / SINGLE).read_bytes()


@pytest.mark.parametrize(
    "names",
    [
        [HEAD],
        ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", HEAD],
    ],
    ids=["a head", "old tables"],
)
def test_index_may_name_optional_tensors_that_no_shard_holds(tmp_path, names):
    folder = make(tmp_path / "hf", shards=3, **TIED)
    edit_json(INDEX, lambda index: index["weight_map"].update(dict.fromkeys(names, SHARD)))(folder)
    params = convert.load(folder).params
    assert_same(params, expected_params(tensors(raw_config(**TIED)), raw_config(**TIED)))
    assert_same(params, transformers_params(folder, raw_config(**TIED)))
    assert_same(convert.load(convert.save_hf(convert.load(folder), tmp_path / "back")).params, params)


def test_shard_may_hold_tied_head_missing_from_index(tmp_path):
    folder = make(tmp_path / "hf", shards=3, **TIED)
    edit_tensors(SHARD, lambda weights: weights.update({HEAD: weights[EMBEDDING]}))(folder)
    assert convert.load(folder).params


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.rotary_emb.inv_freq", "model.layers.0.mlp.up_proj.scale"])
def test_index_naming_missing_tensor_is_rejected(tmp_path, name):
    folder = make(tmp_path / "hf", shards=3, **TIED)
    edit_json(INDEX, lambda index: index["weight_map"].update({name: SHARD}))(folder)
    with pytest.raises(CheckpointError, match=f"disagree about {name}"):
        convert.load(folder)
