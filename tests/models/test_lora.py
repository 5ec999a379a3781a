"""LoRA adapters: merging gives the weights W + scale B A."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jspec
from convert import CheckpointError
from jspec.engine import Engine, Request
from support import checkpoints
from support.checkpoints import VARIANTS

pytestmark = pytest.mark.usefixtures("quick_compile")
RAW = checkpoints.raw_config(intermediate_size=64, eos_token_id=None)
CONFIG = {  # as PEFT 0.18 writes it
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "org/model",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 6,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 3,
    "rank_pattern": {},
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}
MATRICES = "layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj", "layers.1.mlp.up_proj", "layers.0.mlp.down_proj"


def tensors(modules=MATRICES, rank=3, raw=RAW, dtype=np.float32):
    """Return an adapter's tensors by PEFT's names."""
    rng, shapes, found = np.random.default_rng(7), checkpoints.hf_shapes(raw), {}
    for module in modules:
        out_size, in_size = shapes[f"model.{module}.weight"]
        for side, shape in {"A": (rank, in_size), "B": (out_size, rank)}.items():
            found[f"base_model.model.model.{module}.lora_{side}.weight"] = rng.standard_normal(shape).astype(dtype)
    return found


def written(folder, arrays, **changes):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    save_file(arrays, folder / "adapter_model.safetensors")
    return folder


def merged(weights, arrays, scales):
    """Return Hugging Face weights with the adapter added."""
    weights = dict(weights)
    for name, b in arrays.items():
        if ".lora_B." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            a = arrays[name.replace("lora_B", "lora_A")]
            change = scales(module, a.shape[0]) * (b.astype(np.float32) @ a.astype(np.float32))
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + change
    return weights


def base(folder, **options):
    weights = checkpoints.tensors(RAW)
    return jspec.load(checkpoints.write(folder, RAW, weights), **options), weights


def assert_close(model, weights, folder, **options):
    expected = jspec.load(checkpoints.write(folder, RAW, weights), **options)
    for leaf, other in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-6, atol=1e-6)


SCALES = {
    "usual": ({}, lambda module, rank: 6 / rank),
    "rsLoRA": ({"use_rslora": True}, lambda module, rank: 6 / math.sqrt(rank)),
    "patterns": (
        {
            "alpha_pattern": {"proj": 40, r"layers\.1\.self_attn\.v_proj": 12, "v_proj": 50, "up_proj": 1},
            "r": 8,
            "rank_pattern": {".*": 3},
        },
        lambda module, rank: {"layers.1.self_attn.v_proj": 12, "layers.1.mlp.up_proj": 1}.get(module[6:], 6) / rank,
    ),
}


@pytest.mark.parametrize("name", SCALES)
def test_merged_folder_is_the_model_with_the_sum(tmp_path, name):
    changes, scales = SCALES[name]
    model, weights = base(tmp_path / "base", packed=False)
    before = jax.tree.map(jnp.copy, model)
    arrays = tensors()
    found = jspec.merge_lora(model, written(tmp_path / "lora", arrays, **changes))
    assert_close(found, merged(weights, arrays, scales), tmp_path / "sum", packed=False)
    jax.tree.map(np.testing.assert_array_equal, model, before)  # so that another adapter can be merged later
    assert found.embed_tokens.weight[...] is model.embed_tokens.weight[...]


def test_tensors_in_memory_are_merged_in_an_engine(tmp_path):
    """Names may omit PEFT's prefix and include an adapter name."""
    model, weights = base(tmp_path / "base", packed=False)
    arrays = tensors()
    renamed = {
        name.removeprefix("base_model.model.").replace(".weight", ".default.weight"): jnp.asarray(array)
        for name, array in arrays.items()
    }
    found = jspec.merge_lora(model, renamed, alpha=6)
    jax.tree.map(np.testing.assert_array_equal, found, jspec.merge_lora(model, arrays, alpha=6))
    assert_close(found, merged(weights, arrays, lambda module, rank: 6 / rank), tmp_path / "sum", packed=False)
    sampling = jspec.SamplingParams(temperature=0)
    request = Request((3, 1, 4), 12, sampling, jax.random.key(0))
    with Engine(model, slots=1, max_length=32, chunks=(8,)) as engine:
        first = engine.generate([request])[0].tokens
        engine.update(found)
        second = engine.generate([request])[0].tokens
    batch = [[3, 1, 4]], [3], jax.random.key(0)[None]
    tokens = jspec.generate(found, *batch, max_new_tokens=12, sampling=sampling).tokens[0]
    assert first != second == tokens.tolist()


FORMS = {"dtype": "bfloat16"}, {"packed": True, "quantize": "int8"}, {"packed": False, "quantize": "int8"}


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_form_is_kept(tmp_path, options):
    """A quantised matrix is widened, changed and quantised again. This rounds its weights twice."""
    model, _ = base(tmp_path / "base", **options)
    exact, _ = base(tmp_path / "exact", packed=False)
    arrays = tensors()
    found = jspec.merge_lora(model, arrays, alpha=6)
    assert jax.tree.structure(found) == jax.tree.structure(model)
    assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [leaf.dtype for leaf in jax.tree.leaves(model)]
    tokens = np.arange(10)[None]
    logits = [jax.jit(lambda m: m(tokens))(one) for one in (found, jspec.merge_lora(exact, arrays, alpha=6), exact)]
    assert np.abs(logits[0] - logits[1]).mean() < 0.2 * np.abs(logits[2] - logits[1]).mean()
    unchanged = model.layers[0].self_attn.o_proj, found.layers[0].self_attn.o_proj
    for leaf, other in zip(*map(jax.tree.leaves, unchanged), strict=True):
        assert leaf is other


MISTAKES = {
    "another model": (
        lambda: tensors(raw=RAW | {"hidden_size": 64}),
        r"q_proj have shapes \[3, 64\] and \[32, 3\], but",
    ),
    "another depth": (
        lambda: tensors(["layers.2.mlp.up_proj"], raw=RAW | {"num_hidden_layers": 3}),
        "has .*layers.2.mlp.up_proj.lora_A.weight, .* which this model cannot merge",
    ),
    "embedding": (
        lambda: {"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((3, 97))},
        "lora_embedding_A, which this model cannot",
    ),
    "nothing": (dict, "has no tensors; pass a LoRA adapter"),
    "two adapters": (
        lambda: tensors() | {name.replace(".weight", ".b.weight"): array for name, array in tensors().items()},
        r"has lora_A of model.layers.0.self_attn.q_proj twice; pass one adapter",
    ),
    "half": (
        lambda: {n: a for n, a in tensors().items() if "up_proj.lora_B" not in n},
        "lacks lora_A or lora_B for model.layers.1.mlp.up_proj",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_tensors_of_another_model_are_rejected(tmp_path, mistake):
    make, message = MISTAKES[mistake]
    model, _ = base(tmp_path / "base")
    with pytest.raises(CheckpointError, match=message):
        jspec.merge_lora(model, make(), alpha=6)


FIELDS = {
    "peft_type": ("IA3", "sets peft_type to 'IA3'; jspec can merge only"),
    "bias": ("all", "sets bias to 'all'; jspec can merge only"),
    "use_dora": (True, "sets use_dora, which jspec does not support; merge the adapter with PEFT's"),
    "modules_to_save": (["lm_head"], "sets modules_to_save, which"),
    "new_field": (1, "sets new_field, which"),
    "lora_alpha": ("6", "lora_alpha is '6'; expected a positive number"),
    "r": (0, "r is 0; expected a positive integer"),
    "init_lora_weights": (
        "pissa_niter_4",
        "sets init_lora_weights to 'pissa_niter_4', which also changes the base model",
    ),
    "loftq_config": ({"loftq_bits": 4}, "sets loftq_config, which jspec does not support"),
    "alpha_pattern": ({"(": 3}, "has an alpha_pattern key that is not a regular expression"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_more_than_lora_is_rejected(tmp_path, field):
    value, message = FIELDS[field]
    model, _ = base(tmp_path / "base")
    with pytest.raises(CheckpointError, match=message):
        jspec.merge_lora(model, written(tmp_path / "lora", tensors(), **{field: value}))


def test_missing_files_and_alpha_are_reported(tmp_path):
    model, _ = base(tmp_path / "base")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").touch()
    with pytest.raises(
        CheckpointError, match=r"lacks adapter_config.json, adapter_model.safetensors; pass the folder of"
    ):
        jspec.merge_lora(model, tmp_path / "empty")
    with pytest.raises(ValueError, match="alpha is None; pass the adapter's lora_alpha, a positive number"):
        jspec.merge_lora(model, tensors())
    for alpha in ("6", float("nan"), -1):
        with pytest.raises(ValueError, match=f"alpha is {alpha!r}; pass the adapter's lora_alpha"):
            jspec.merge_lora(model, tensors(), alpha=alpha)
    with pytest.raises(ValueError, match=r"alpha=6 was passed with a folder, whose adapter_config.json sets it"):
        jspec.merge_lora(model, written(tmp_path / "lora", tensors()), alpha=6)


def test_reduced_vocabulary_is_rejected(tmp_path):
    model, _ = base(tmp_path / "base")
    drafter = jspec.ModelDrafter.with_vocabulary(model, np.arange(9))
    with pytest.raises(ValueError, match="output head covers only part of the vocabulary; update the original"):
        jspec.merge_lora(drafter.model, tensors(), alpha=6)


def test_every_family_can_be_merged(tmp_path):
    for name in ("qwen2_tied", "qwen3", "mlp_bias"):
        raw = checkpoints.raw_config(**VARIANTS[name])
        model = jspec.load(checkpoints.write(tmp_path / name, raw, checkpoints.tensors(raw)), packed=False)
        found = jspec.merge_lora(model, tensors(raw=raw), alpha=6)
        assert not np.array_equal(found.layers[0].mlp.down_proj.weight, model.layers[0].mlp.down_proj.weight)
