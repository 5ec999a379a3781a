"""Saving and loading of draft models and of drafters that no other program reads."""

import json

import jax
import numpy as np
import pytest

import convert
import jspec
from convert.heads.files import kind_of
from support import heads, toys

TARGET = toys.tiny_llama(0, 3)
OTHER = toys.tiny_llama(0, 3, hidden_size=24)
MADE = {
    "hydra": heads.hydra,
    "hydra without heads": lambda target: heads.hydra(target, own_head=False),
    "blockwise": heads.blockwise,
    "kangaroo": lambda target: heads.kangaroo(target, 2),
    "pass": heads.vectors,
}


def equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", MADE)
def test_saved_drafter_is_restored(tmp_path, name):
    drafter = MADE[name](TARGET)
    assert drafter.save(tmp_path / "drafter") == tmp_path / "drafter"
    equal(type(drafter).load(tmp_path / "drafter", TARGET), drafter)
    assert kind_of(tmp_path / "drafter") == name.split()[0]
    rounded = type(drafter).load(tmp_path / "drafter", TARGET, "bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(rounded)} == {"bfloat16"}
    with pytest.raises(convert.CheckpointError, match="exists and is not overwritten"):
        drafter.save(tmp_path / "drafter")


@pytest.mark.parametrize("name", MADE)
def test_drafter_for_another_target_is_rejected(tmp_path, name):
    drafter = MADE[name](TARGET)
    drafter.save(tmp_path / "drafter")
    with pytest.raises(
        ValueError, match=r"Drafter was made for a target whose hidden_size is 16, .* is 24; use a drafter"
    ):
        type(drafter).load(tmp_path / "drafter", OTHER)


def test_adapter_with_different_rope_is_rejected(tmp_path):
    drafter = heads.kangaroo(TARGET)
    drafter.save(tmp_path / "drafter")
    turned = toys.tiny_llama(0, 3, rope=convert.RopeConfig(theta=500.0))
    with pytest.raises(ValueError, match=r"a target whose rope_theta is 10000.0, but this target's is 500.0"):
        jspec.KangarooDrafter.load(tmp_path / "drafter", turned)


def config(folder, **changes):
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: config(folder, kind="owl"), "kind 'owl'; expected 'jspec_drafter' and 'blockwise'"),
        (lambda folder: config(folder, model_type="llama"), "says model_type 'llama' and kind 'blockwise'"),
        (lambda folder: config(folder, num_heads=None), "num_heads"),
        (lambda folder: config(folder, num_heads="3"), "num_heads is '3'"),
        (lambda folder: config(folder, num_heads=2), r"layer.down.bias in .* has shape"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (cut, "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"holds no \*.safetensors file"),
    ],
)
def test_damaged_files_are_rejected(tmp_path, damage, message):
    heads.blockwise(TARGET).save(tmp_path / "drafter")
    damage(tmp_path / "drafter")
    with pytest.raises(convert.CheckpointError, match=message):
        jspec.BlockwiseDrafter.load(tmp_path / "drafter", TARGET)


@pytest.mark.parametrize("size", ["num_heads", "num_blocks"])
def test_impossible_part_counts_are_rejected_before_allocation(tmp_path, size):
    heads.hydra(TARGET).save(tmp_path / "drafter")
    config(tmp_path / "drafter", **{size: 10**9})
    with pytest.raises(
        convert.CheckpointError, match=rf"has \d+ tensors, but its config.json says .*{size} 1000000000"
    ):
        jspec.HydraDrafter.load(tmp_path / "drafter", TARGET)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"qk_norm": True}, {"attention_bias": True}, {"qkv_bias": True}]
)
def test_saved_draft_model_is_restored(tmp_path, changes):
    drafter = jspec.ModelDrafter(toys.tiny_llama(1, 2, **changes))
    drafter.save(tmp_path / "model")
    equal(jspec.load(tmp_path / "model"), drafter.model)
    equal(jspec.ModelDrafter.load(tmp_path / "model"), drafter)


def test_saved_multi_drafter_is_restored(tmp_path):
    several = jspec.MultiDrafter([toys.tiny_llama(1), toys.tiny_llama(2)], 3)
    equal(jspec.MultiDrafter.load(several.save(tmp_path / "several")), several)
    assert kind_of(tmp_path / "several") == "several"
    with pytest.raises(TypeError, match="only if all its drafters are models, but one is of type NGramDrafter"):
        jspec.MultiDrafter([toys.tiny_llama(1), jspec.NGramDrafter()]).save(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_inexpressible_models_are_not_saved(tmp_path):
    with pytest.raises(convert.CheckpointError, match="only Qwen2 has biases on q, k and v alone"):
        jspec.ModelDrafter(toys.tiny_llama(1, qkv_bias=True, qk_norm=True)).save(tmp_path / "model")
    with pytest.raises(ValueError, match="The model is int8 and cannot be saved"):
        jspec.ModelDrafter(jspec.quantize(toys.tiny_llama(1))).save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
