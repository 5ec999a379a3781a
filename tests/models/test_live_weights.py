"""New weights for a model in memory: the result is the model that `jspec.load` reads from a file with these weights."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jspec
from jspec.engine import Engine, Request
from support import checkpoints, gguf_files
from support.checkpoints import VARIANTS
from support.gguf_files import Kind
from support.packed_matrices import stored_rows

pytestmark = pytest.mark.usefixtures("quick_compile")
EVEN = {"intermediate_size": 64}  # packed and int4 matrices need multiples of 32
FORMS = {  # the dtype in the file and the options of `jspec.load`
    "float32": (np.float32, {"packed": False}),
    "bfloat16": (np.float32, {"dtype": "bfloat16"}),
    "float16": (np.float32, {"dtype": "float16"}),
    "packed bfloat16": (ml_dtypes.bfloat16, {"dtype": "float32", "packed": True}),
    "packed float16": (np.float16, {"dtype": "float32", "packed": True}),
    "packed int8": (np.float32, {"packed": True, "quantize": "int8"}),
    "packed int4, 8-bit activations": (np.float32, {"quantize": "int4", "activation_bits": 8}),
    "int8": (np.float32, {"packed": False, "quantize": "int8"}),
    "int4": (np.float32, {"packed": False, "quantize": "int4"}),
}


def assert_same_model(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for leaf, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert leaf.dtype == expected.dtype
        np.testing.assert_array_equal(leaf, expected)


def loaded(folder, raw, seed, stored=np.float32, **options):
    return jspec.load(checkpoints.write(folder, raw, checkpoints.tensors(raw, stored, seed)), **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_gets_the_weights_of_a_checkpoint(tmp_path, variant):
    raw = checkpoints.raw_config(**VARIANTS[variant])
    model, expected = (loaded(tmp_path / str(seed), raw, seed, packed=False) for seed in range(2))
    jspec.load_weights(model, checkpoints.tensors(raw, seed=1))
    assert_same_model(model, expected)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_kept(tmp_path, form):
    """Float32 weights are rounded as `jspec.load` rounds them. No program is compiled again."""
    stored, options = FORMS[form]
    raw = checkpoints.raw_config(**EVEN)
    model, expected = (loaded(tmp_path / str(seed), raw, seed, stored, **options) for seed in range(2))
    forward, tokens = jax.jit(lambda model, tokens: model(tokens)), np.arange(12).reshape(2, 6)
    first = forward(model, tokens)
    jspec.load_weights(model, checkpoints.tensors(raw, stored, seed=1))
    assert_same_model(model, expected)
    second = forward(model, tokens)
    assert forward._cache_size() == 1 and not np.array_equal(first, second)
    np.testing.assert_array_equal(second, forward(expected, tokens))


def test_pytorch_state_dict_is_accepted(tmp_path):
    """PyTorch's bfloat16 has no NumPy form. The state of a tied model includes the head."""
    import torch

    raw = checkpoints.raw_config(**VARIANTS["qwen2_tied"])
    model, expected = (loaded(tmp_path / str(seed), raw, seed, packed=False, dtype="bfloat16") for seed in range(2))
    state = {name: torch.tensor(array).bfloat16() for name, array in checkpoints.tensors(raw, seed=1).items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    jspec.load_weights(model, state)
    assert_same_model(model, expected)


def test_engine_uses_the_weights_after_an_update(tmp_path):
    raw = checkpoints.raw_config(eos_token_id=None)
    model, expected = (loaded(tmp_path / str(seed), raw, seed) for seed in range(2))
    request = Request((3, 1, 4), 12, key=jax.random.key(0))
    with Engine(model, model, slots=1, max_length=32, chunks=(8,), num_draft_tokens=2) as engine:
        first = engine.generate([request])[0].tokens
        jspec.load_weights(model, checkpoints.tensors(raw, seed=1))
        with pytest.raises(RuntimeError, match="weights of the target have changed"):
            engine.generate([request])
        engine.update()
        second = engine.generate([request])[0].tokens
    tokens = jspec.generate(expected, [[3, 1, 4]], [3], jax.random.key(0)[None], max_new_tokens=12).tokens[0]
    assert first != second == tokens.tolist()


def test_weights_are_placed_like_the_old_ones(tmp_path):
    raw = checkpoints.raw_config()
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    model, expected = (
        loaded(tmp_path / str(seed), raw, seed, sharding=jspec.tensor_parallel(mesh, "model")) for seed in range(2)
    )
    jspec.load_weights(model, checkpoints.tensors(raw, seed=1))
    assert_same_model(model, expected)
    for leaf, like in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding == like.sharding


def test_later_changes_of_the_tensors_do_not_change_the_model(tmp_path):
    """PyTorch's optimizers change parameters in place, and a JAX step may donate its arrays."""
    import torch

    raw = checkpoints.raw_config()
    model, expected = (loaded(tmp_path / str(seed), raw, seed, packed=False) for seed in range(2))
    weights = {name: torch.tensor(array) for name, array in checkpoints.tensors(raw, seed=1).items()}
    weights["model.norm.weight"] = jnp.asarray(weights["model.norm.weight"].numpy())
    jspec.load_weights(model, weights)
    weights.pop("model.norm.weight").delete()
    for tensor in weights.values():
        tensor.mul_(-3)
    assert_same_model(model, expected)


def test_unreadable_tensors_are_reported(tmp_path):
    import torch

    raw = checkpoints.raw_config()
    model, expected = (loaded(tmp_path / str(i), raw, 0, packed=False) for i in range(2))
    for change in (lambda tensor: tensor.repeat_interleave(2, dim=1)[:, ::2], lambda tensor: tensor.requires_grad_()):
        weights = {name: torch.tensor(array) for name, array in checkpoints.tensors(raw, seed=1).items()}
        weights[DOWN] = change(weights[DOWN])
        with pytest.raises(ValueError, match=rf"^{DOWN} cannot be read: .*; pass tensor.detach\(\).contiguous\(\)"):
            jspec.load_weights(model, weights)
        assert_same_model(model, expected)


def test_call_inside_jit_is_rejected(tmp_path):
    raw = checkpoints.raw_config()
    model = loaded(tmp_path / "x", raw, 0, packed=False)
    with pytest.raises(ValueError, match=r"have no values inside jax.jit; call load_weights outside it"):
        jax.jit(lambda weights: jspec.load_weights(model, weights))(checkpoints.tensors(raw))


def without(name):
    return lambda weights: weights.pop(name)


def extra(name):
    return lambda weights: weights.update({name: np.zeros((3, 3), np.float32)})


def changed(name, change):
    return lambda weights: weights.update({name: change(weights[name])})


DOWN = "model.layers.1.mlp.down_proj.weight"
MISTAKES = {
    "missing": (without(DOWN), rf"^The weights lack {DOWN}; pass all weights of the model\.$"),
    "unknown": (extra("model.layers.2.mlp.down_proj.weight"), "include model.layers.2.mlp.down_proj.weight, which a"),
    "adapter": (extra("model.layers.1.mlp.down_proj.lora_A.weight"), "include .*lora_A.weight, which a model of this"),
    "transposed": (
        changed(DOWN, np.transpose),
        rf"shapes: {DOWN} \[48, 32\]\. In the model, {DOWN} has shape \[32, 48\]",
    ),
    "integers": (changed(DOWN, lambda x: x.astype(np.int8)), f"{DOWN} have the dtype int8; expected"),
    "float8": (
        changed(DOWN, lambda x: x.astype(ml_dtypes.float8_e4m3fn)),
        f"weights {DOWN} have the dtype float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_change_nothing(tmp_path, mistake):
    change, message = MISTAKES[mistake]
    raw = checkpoints.raw_config()
    model, expected = (loaded(tmp_path / str(i), raw, 0, packed=False) for i in range(2))
    weights = checkpoints.tensors(raw, seed=1)
    change(weights)
    with pytest.raises(ValueError, match=message):
        jspec.load_weights(model, weights)
    assert_same_model(model, expected)


def test_tied_head_must_equal_the_embedding(tmp_path):
    raw = checkpoints.raw_config(tie_word_embeddings=True)
    model, weights = loaded(tmp_path / "x", raw, 0), checkpoints.tensors(raw)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    with pytest.raises(ValueError, match=r"^lm_head.weight differs from model.embed_tokens.weight, but the model uses"):
        jspec.load_weights(model, weights)


def test_values_that_do_not_fit_are_reported(tmp_path):
    raw = checkpoints.raw_config(**EVEN)
    for form, huge, message in (
        ("float16", 1e5, "has values that float16 cannot hold"),
        ("packed float16", 1e5, "has values that float16 cannot hold"),
        ("int4", np.nan, "has a value that is not finite"),
        ("packed int8", np.inf, "has a value that is not finite or exceeds float16"),
    ):
        stored, options = FORMS[form]
        model, weights = loaded(tmp_path / form, raw, 0, stored, **options), checkpoints.tensors(raw)
        weights[DOWN][3, 3] = huge
        with pytest.raises(ValueError, match=f"^layers.1.mlp.down_proj.weight {message}"):
            jspec.load_weights(model, weights)


def test_formats_of_gguf_files_cannot_be_written(tmp_path):
    raw = gguf_files.RAW | {"num_hidden_layers": 1}
    weights, name = checkpoints.tensors(raw), "blk.0.ffn_down.weight"
    arrays = gguf_files.tensors(raw, weights)
    arrays[name], _ = stored_rows("Q4_K", *arrays[name].shape)
    file = gguf_files.write(tmp_path / "x.gguf", gguf_files.metadata(raw), arrays, {name: Kind.Q4_K})
    with pytest.raises(ValueError, match=r"^layers.0.mlp.down_proj.weight is stored in Q4_K, which jspec cannot write"):
        jspec.load_weights(jspec.load(file, packed=True), weights)
    model = jspec.load(file, packed=False)
    jspec.load_weights(model, weights)
    np.testing.assert_array_equal(model.norm.weight, weights["model.norm.weight"])


def test_reduced_vocabulary_is_rejected(tmp_path):
    raw = checkpoints.raw_config()
    drafter = jspec.ModelDrafter.with_vocabulary(loaded(tmp_path / "x", raw, 0), np.arange(9))
    with pytest.raises(ValueError, match="output head covers only part of the vocabulary; update the original"):
        jspec.load_weights(drafter.model, checkpoints.tensors(raw))
