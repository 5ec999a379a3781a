"""The forward pass matches transformers through a saved checkpoint, and the cache matches a pass without one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from convert import RopeConfig
from jspec.models import products
from jspec.models.layers import Linear

# The longest row exceeds the original context of the llama3 rope below, so that all branches of the rope matter.
LENGTHS = np.array([48, 1, 17, 33])
SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "grouped": {},
    "one_group": {"num_key_value_heads": 1},
    "all_groups": {"num_key_value_heads": 4, "rms_norm_eps": 1e-2},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True},
    "wide_heads": {"head_dim": 32},
    "narrow_heads": {"head_dim": 8, "num_key_value_heads": 1},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
}
LEGACY = ("theta", "linear", "llama3", "grouped")


def _hf_model(**changes):
    """Return a transformers Llama whose norms and biases are also random, so that leaving one out is noticed."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, **changes}, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5) if name.endswith("norm.weight") else weight.normal_(0, 0.3)
    return model


def _hf_logits(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def _tokens(vocab_size=SMALL["vocab_size"]):
    return np.random.default_rng(1).integers(0, vocab_size, (LENGTHS.size, LENGTHS.max())).astype(np.int32)


def _spell_as_before_transformers_5(directory):
    """Rewrite config.json with `rope_theta` and `rope_scaling`, as in checkpoints from 2023 to 2025."""
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if rope["rope_type"] == "linear":
        rope["type"] = rope.pop("rope_type")
    raw.pop("head_dim")
    path.write_text(json.dumps(raw))


def _compare(report, logits, expected):
    """Compare both arrays over the real positions of a right-padded batch."""
    real = np.arange(LENGTHS.max()) < LENGTHS[:, None]
    logits, expected = np.asarray(logits)[real], expected[real]
    difference = np.abs(logits - expected).max()
    agree = (logits.argmax(-1) == expected.argmax(-1)).mean()
    report(
        positions=len(logits),
        max_difference=f"{difference:.1e}",
        argmax=f"{agree:.1%}",
        logits_std=f"{expected.std():.2f}",
    )
    assert logits.dtype == np.float32
    assert difference <= 1e-4
    assert agree == 1


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_transformers(name, tmp_path, report):
    model = _hf_model(**CONFIGS[name])
    model.save_pretrained(tmp_path)
    loaded = jspec.load(tmp_path, dtype=np.float32)
    logits = jax.jit(lambda model, tokens: model(tokens))(loaded, _tokens())
    _compare(report, logits, _hf_logits(model, _tokens()))


@pytest.mark.parametrize("name", LEGACY)
def test_legacy_config_spelling_is_equivalent(name, tmp_path):
    _hf_model(**CONFIGS[name]).save_pretrained(tmp_path)
    new = jspec.load(tmp_path, dtype=np.float32)
    assert "rope_parameters" in (tmp_path / "config.json").read_text()
    _spell_as_before_transformers_5(tmp_path)
    assert jspec.load(tmp_path, dtype=np.float32).config == new.config


def test_masked_padding_changes_nothing(tmp_path, report):
    """Logits match those of transformers for the same ragged batch with an attention mask."""
    torch = pytest.importorskip("torch")
    model = _hf_model()
    model.save_pretrained(tmp_path)
    inside = np.arange(LENGTHS.max()) < LENGTHS[:, None]
    with torch.no_grad():
        tokens = torch.tensor(np.where(inside, _tokens(), 0), dtype=torch.long)
        expected = model(tokens, attention_mask=torch.tensor(inside, dtype=torch.long)).logits.numpy()
    _compare(report, jspec.load(tmp_path, dtype=np.float32)(_tokens()), expected)


def test_cached_forward_equals_full_forward(toy, report):
    """A cache fed in pieces, from a different position in each row as in decoding, gives the full pass's logits."""
    model = toy(0, num_hidden_layers=2, rope=RopeConfig(theta=100.0))
    tokens = _tokens(61)
    whole = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, tokens))
    forward = jax.jit(lambda model, tokens, cache, start: model.forward(tokens, cache, start))
    starts = np.array([0, 1, 7, 20])
    _, cache = forward(model, tokens[:, :20], model.new_cache(4, 64), np.zeros(4, np.int32))
    worst = 0.0
    for step in range(0, 28, 4):
        at = starts + step
        piece = np.stack([row[i : i + 4] for row, i in zip(tokens, at, strict=True)])
        hidden, cache = forward(model, piece, cache, at)
        expected = np.stack([row[i : i + 4] for row, i in zip(whole, at, strict=True)])
        worst = max(worst, np.abs(np.asarray(model.logits(hidden)) - expected).max())
    report(pieces=7, max_difference=f"{worst:.1e}")
    assert worst <= 1e-4


def test_bfloat16_model_gives_float32_logits(tmp_path):
    model = _hf_model()
    model.save_pretrained(tmp_path)
    loaded = jspec.load(tmp_path, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype("bfloat16")}
    logits = jax.jit(lambda model, tokens: model(tokens))(loaded, _tokens())
    expected = _hf_logits(model, _tokens())
    assert logits.dtype == jnp.float32
    # Eight mantissa bits through two layers give rough agreement; a wrong dtype would give none.
    assert np.abs(np.asarray(logits) - expected).mean() < 0.05 * expected.std()


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (5, 2)])
def test_bfloat16_product_is_rounded_once(shape):
    """The product and its gradients are each rounded once; a float32 result is not rounded."""
    rng = np.random.default_rng(0)
    x, given = (jnp.asarray(rng.normal(size=(*shape, size)), jnp.bfloat16) for size in (24, 40))
    linear = Linear(24, 40, False, jnp.bfloat16, nnx.Rngs(0))
    weight = linear.weight[...]
    found, back = jax.jit(
        lambda x, weight, given: (lambda y, vjp: (y, vjp(given)))(
            *jax.vjp(lambda x, w: products.project(w, x), x, weight)
        )
    )(x, weight, given)
    wide_x, wide_w, wide_given = (np.asarray(part, np.float64) for part in (x, weight, given))
    for got, exact in (
        (found, wide_x @ wide_w),
        (back[0], wide_given @ wide_w.T),
        (back[1], np.einsum("bsi,bso->io", wide_x, wide_given)),
    ):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2.0**-8, atol=1e-6)
    np.testing.assert_allclose(products.project(weight, x, jnp.float32), wide_x @ wide_w, rtol=1e-5, atol=1e-6)


def test_empty_layer_selection_returns_embeddings(toy):
    model, tokens = toy(0), np.array([[3, 5]])
    hidden, cache = model.forward(tokens, model.new_cache(1, 4), np.zeros(1, np.int32), layers=())
    np.testing.assert_array_equal(hidden, model.embed_tokens(tokens))
    assert not any(np.asarray(leaf).any() for leaf in (*cache.keys, *cache.values))
