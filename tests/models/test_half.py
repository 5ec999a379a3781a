"""float16 is rejected for a model whose activations would not fit into it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.models.float16_check import activations, check_fits_float16
from support import toys
from support.checkpoints import raw_config, tensors, write


def half(scale=1.0):
    """Return a float16 toy model with two matrices of one layer multiplied by `scale`."""
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), toys.tiny_llama(0))
    for linear in (model.layers[1].mlp.gate_up_proj, model.layers[1].mlp.down_proj):
        linear.weight.set_value((linear.weight[...].astype(jnp.float32) * scale).astype(jnp.float16))
    return model


def test_checked_activations_match_forward_pass(report):
    """The last output is the hidden state of a float32 pass, and the bound applies to that pass's values."""
    model = half()
    found = dict(activations(model))
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model)
    tokens = np.linspace(0, 7, 64).astype(np.int32)[None]
    hidden, _ = wide.forward(jnp.asarray(tokens), wide.new_cache(1, 64), jnp.zeros(1, jnp.int32))
    np.testing.assert_allclose(found["layers.1.output"], np.abs(hidden).max(), rtol=1e-5)
    report(names=len(found), largest=f"{max(found.values()):.1f}")
    check_fits_float16(model)


def test_activations_beyond_60_000_are_rejected_by_name():
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.down_proj's (input|output) reaches [\d,]+ on a probe prompt"
    ):
        check_fits_float16(half(1e3))
    for value in (jnp.inf, jnp.nan):
        model = half()
        model.layers[0].self_attn.o_proj.weight.set_value(
            model.layers[0].self_attn.o_proj.weight[...].at[0, 0].set(value)
        )
        with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.o_proj's output reaches (inf|nan)"):
            check_fits_float16(model)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_load_rejects_float16_overflow(tmp_path, quantize):
    raw = raw_config()
    weights = tensors(raw)
    for name in ("up_proj", "down_proj"):
        weights[f"model.layers.0.mlp.{name}.weight"] *= 1e5
    write(tmp_path / "large", raw, weights)
    write(tmp_path / "small", raw, tensors(raw))
    assert jspec.load(tmp_path / "small", "float16", quantize).dtype == jnp.float16
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj's (input|output)"):
        jspec.load(tmp_path / "large", "float16", quantize)
    assert jspec.load(tmp_path / "large", "float32", quantize).dtype == jnp.float32
