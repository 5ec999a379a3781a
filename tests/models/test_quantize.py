"""Quantised matrices for GPUs and TPUs: rounding, passes, loading, and the output distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import convert
import jspec
from jspec.bundled import PAIR
from jspec.models import quantize, quantized_matrix
from jspec.models.layers import Linear
from jspec.models.quantize import matrices
from support import law, live_arrays, oracle, toys
from support.checkpoints import BFLOAT16, hf_shapes, make, raw_config, tensors, write

pytestmark = pytest.mark.usefixtures("quick_compile")

GREEDY = jspec.SamplingParams(temperature=0.0)
KINDS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen": {"qkv_bias": True, "qk_norm": True},
    "tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
}
apply = jax.jit(lambda model, tokens: model(tokens))


def _copy(model):
    return jax.tree.map(lambda leaf: leaf, model)


def _parts(module):
    """Return the codes ``[groups, size, out]`` and the scales ``[groups, 1, out]`` as NumPy arrays."""
    (part,) = module.parts
    return np.asarray(part.codes[...]).swapaxes(1, 2), np.asarray(part.scales[...])[:, None]


def _dequantised(quantised, like):
    """Return a copy of the Llama `like` with the float32 weights that `quantised` represents."""
    twin = _copy(like)
    for name, module in matrices(twin).items():
        rounded, scales = _parts(matrices(quantised)[name])
        weight = rounded.astype(np.float64) * scales
        module.weight.set_value(jnp.asarray(weight.reshape(module.weight.shape), jnp.float32))
    return twin


def _assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_matches_float64_oracle(toy, dtype, report):
    """Rounding matches float64 NumPy, even for a zero column, one too small to divide by, and one with an outlier."""
    model = jax.tree.map(lambda leaf: leaf.astype(dtype), toy(0, num_hidden_layers=2))
    odd = model.layers[1].mlp.down_proj
    columns = odd.weight[...].at[:, 0].set(0).at[:, 1].set(1e-37).at[:, 2].multiply(1e-4).at[5, 2].set(-300)
    odd.weight.set_value(columns)
    quantised = jspec.quantize(model, "int8")
    assert quantised.dtype == dtype
    worst, compared = 0.0, 0
    for name, module in matrices(quantised).items():
        exact = np.asarray(matrices(model)[name].weight[...], np.float64)
        rounded, scale = (part[0] for part in _parts(module))
        assert (rounded.dtype, scale.dtype, rounded.shape) == (np.int8, np.float32, exact.shape)
        scale, expected = scale[0], np.abs(exact).max(0) / 127
        usable = expected >= np.finfo(np.float32).tiny
        np.testing.assert_allclose(scale, np.where(usable, expected, 1), rtol=2e-7)
        assert (np.abs(rounded).max(0) == np.where(usable, 127, 0)).all()
        worst = max(worst, (np.abs(exact - rounded * scale.astype(np.float64)) / scale).max())
        compared += exact.size
    assert _parts(matrices(quantised)["layers.1.mlp.down_proj.weight"])[1][0, 0, :2].tolist() == [1, 1]
    report(weights=compared, largest_error_over_scale=f"{worst:.7f}", bound=0.5)
    # Quotients as large as 127 are themselves rounded to float32 before they are rounded to integers.
    assert worst <= 0.5 * (1 + 127 * np.finfo(np.float32).eps)


def test_int4_rounding_matches_float64_oracle(report):
    """Groups have zero, tiny, huge and ordinary scales. Their extremes are positive, negative, or tied."""
    weight = np.random.default_rng(0).standard_normal((96, 7)).astype(np.float32)
    weight[:32, 0], weight[32:64, 0], weight[:, 1] = 0, 1e-39, weight[:, 1] * 1e30
    weight[3, 2], weight[40, 2], weight[5, 3], weight[6, 3] = 9, -9, 6, -6
    (part,) = _quantized_linear(weight, "int4").parts
    assert (part.codes.shape, part.scales.shape, part.format) == ((3, 7, 32), (3, 7), "int4")
    codes, scales = np.asarray(part.codes[...]).astype(np.float64), np.asarray(part.scales[...], np.float64)
    groups = weight.T.reshape(7, 3, 32).swapaxes(0, 1).astype(np.float64)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
    usable = np.abs(extreme / 8) >= np.finfo(np.float32).tiny
    np.testing.assert_allclose(scales, np.where(usable, extreme / -8, 1), rtol=2e-7)
    expected = np.clip(groups / scales[..., None], -8, 7)
    error = np.abs(codes - expected)
    report(largest_error=f"{error.max():.4f} of a step")
    assert error.max() <= 0.5001 and (codes.min(-1) == np.where(usable, -8, 0)).all()
    widened = np.asarray(part.widen(), np.float64).reshape(7, 3, 32).swapaxes(0, 1)
    assert (np.abs(widened - groups) <= 1.01 * np.abs(scales)[..., None]).all()


def _quantized_linear(weight, kind):
    layer = Linear(*weight.shape, False, jnp.dtype(weight.dtype), nnx.Rngs(0))
    quantize.quantize_matrix(layer, jnp.asarray(weight), kind, None, 24, "weight")
    return layer


def test_other_parameters_are_shared_and_original_unchanged(toy):
    model = toy(1, attention_bias=True)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(model)]
    quantised = jspec.quantize(model, "int8")
    _assert_same(model, toy(1, attention_bias=True))
    assert all((old == new).all() for old, new in zip(before, jax.tree.leaves(model), strict=True))
    assert quantised.norm.weight[...] is model.norm.weight[...]
    old, new = (pair.layers[0].self_attn.qkv_proj.bias for pair in (model, quantised))
    assert old is not None and new is not None and new[...] is old[...]
    _assert_same(jspec.quantize(quantised, "int8"), quantised)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_dequantised_weights(toy, kind, report):
    model = toy(2, num_hidden_layers=2, **KINDS[kind])
    quantised = jspec.quantize(model, "int8")
    assert (quantised.lm_head is None) == ("tied" in kind.split(", "))
    tokens = np.random.default_rng(3).integers(0, 61, (4, 48), dtype=np.int32)
    logits, expected = apply(quantised, tokens), apply(_dequantised(quantised, model), tokens)
    difference, moved = np.abs(logits - expected).max(), np.abs(logits - apply(model, tokens)).max()
    report(max_difference=f"{difference:.1e}", from_float32=f"{moved:.2f}", logits_std=f"{expected.std():.2f}")
    assert logits.dtype == np.float32
    assert difference <= 1e-4 < 1e-2 < moved


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_activations_and_cache_keep_the_dtype(toy, dtype, report):
    model = toy(4, num_hidden_layers=2, attention_bias=True)
    quantised = jspec.quantize(jax.tree.map(lambda leaf: leaf.astype(dtype), model), "int8")
    tokens = np.random.default_rng(5).integers(0, 61, (2, 16), dtype=np.int32)
    cache, forward = quantised.new_cache(2, 16), jax.jit(lambda model, *rest: model.forward(*rest))
    hidden, written = forward(quantised, tokens, cache, np.zeros(2, np.int32))
    assert {leaf.dtype for leaf in jax.tree.leaves((hidden, cache, written))} == {jnp.dtype(dtype)}
    logits, expected = apply(quantised, tokens), apply(model, tokens)
    error = float(np.abs(logits - expected).mean() / expected.std())
    report(mean_error_over_std=f"{error:.4f}")
    assert logits.dtype == np.float32
    assert error < 0.05


@pytest.mark.parametrize("product", [quantized_matrix._by_groups, quantized_matrix._on_cuda, quantized_matrix._on_cpu])
def test_float16_does_not_overflow_before_the_scale(product):
    (part,) = _quantized_linear(np.full((512, 3), 0.02, np.float16), "int8").parts
    y = product(jnp.full((2, 512), 10, jnp.float16), part.codes[...], part.scales[...])
    np.testing.assert_allclose(np.asarray(y, np.float32), 102.4, rtol=1e-3)


# The joint distribution of three tokens after each of three prompts; the draft is an int8 model close to the target.
LAW_PROMPTS, LAW_SETTINGS = ((5,), (2, 7), (1, 4, 4, 0, 6, 3, 2)), ({}, {"temperature": 0.5, "top_p": 0.9}, {})


@pytest.mark.slow
def test_int8_draft_keeps_target_distribution(report, draws=32_768, chunk=1024):
    target, drafts = law.llama_pair()
    draft = jspec.quantize(drafts["related"], "int8")
    tokens = np.full((3, 7), 5, np.int32)
    for row, prompt in zip(tokens, LAW_PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in LAW_PROMPTS])
    rows = [law.filled(1, **settings) for settings in LAW_SETTINGS]
    fields = {name: jnp.concatenate([getattr(row, name) for row in rows]) for name in toys.SPREAD_PARAMS}
    keys = jax.random.split(jax.random.key(300), (draws // chunk, chunk, 3))
    sampling, counts = jspec.SamplingParams(**fields), np.zeros((3, 512), np.int64)
    for part in keys:
        counts += np.asarray(law.text_counts(target, draft, tokens, lengths, part, sampling, "rejection", 2))
    laws = [law.exact_law(target, *row) for row in zip(LAW_PROMPTS, LAW_SETTINGS, strict=True)]
    p_values = [oracle.p_value(*pair) for pair in zip(counts, laws, strict=True)]
    sees = oracle.detectable(draws, counts.shape[1] - 1)
    report(
        rows=3,
        texts_each=draws,
        min_p=f"{min(p_values):.2g}",
        alpha_over_all=oracle.ALPHA,
        sees_tv=f"{sees:.4f}",
        power=oracle.POWER,
    )
    assert min(p_values) * len(p_values) > oracle.ALPHA


def test_greedy_text_with_int8_draft_equals_plain_text(toy, prompts, report):
    target = toy(3, num_key_value_heads=4)
    batch = prompts(np.arange(1, 17), seed=6)
    plain = jspec.generate(target, *batch, max_new_tokens=64, sampling=GREEDY).tokens
    for name, draft in {"itself": target, "related": toy(3, distance=0.06, num_key_value_heads=4)}.items():
        out = jspec.speculative_generate(
            target, jspec.quantize(draft, "int8"), *batch, max_new_tokens=64, sampling=GREEDY
        )
        rate = out.stats.accepted.sum() / out.stats.drafted.sum()
        report(draft=name, tokens=plain.size, accepted=f"{rate:.1%}")
        np.testing.assert_array_equal(out.tokens, plain)
        assert {"itself": 0.8, "related": 0.2}[name] < rate < 1


def test_greedy_text_of_int8_target_equals_its_plain_text(toy, prompts, report):
    full = toy(7)
    target, batch = jspec.quantize(full, "int8"), prompts(np.arange(1, 17), seed=8)
    plain = jspec.generate(target, *batch, max_new_tokens=64, sampling=GREEDY).tokens
    out = jspec.speculative_generate(target, full, *batch, max_new_tokens=64, sampling=GREEDY)
    other = jspec.generate(full, *batch, max_new_tokens=64, sampling=GREEDY).tokens
    report(tokens=plain.size, differing=int((out.tokens != plain).sum()), rounding_changes=int((other != plain).sum()))
    np.testing.assert_array_equal(out.tokens, plain)
    assert (other != plain).any(), "the text is the int8 model's own"


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("stored", [np.float32, BFLOAT16])
def test_every_way_to_load_int8_gives_same_model(tmp_path, changes, stored):
    source = make(tmp_path / "hf", stored, shards=2, **changes)
    convert.save(convert.load(source), tmp_path / "store")
    for dtype in ("float32", "bfloat16"):
        loaded = jspec.load(source, dtype, quantize="int8")
        assert loaded.dtype == dtype
        _assert_same(jspec.load(tmp_path / "store", dtype, quantize="int8"), loaded)
        _assert_same(jspec.quantize(jspec.load(source, dtype), "int8"), loaded)


def test_int8_loading_needs_quarter_memory_and_no_full_model(tmp_path, monkeypatch, report):
    source = make(tmp_path, hidden_size=256, intermediate_size=512, vocab_size=2048, head_dim=64)
    full = sum(leaf.nbytes for leaf in jax.tree.leaves(jspec.load(source, "float32")))
    live = live_arrays.watch(monkeypatch, "stream")
    quantised = jspec.load(source, "float32", quantize="int8", packed=False)
    assert {module.parts[0].format for module in matrices(quantised).values()} == {"int8"}
    size, largest = sum(leaf.nbytes for leaf in jax.tree.leaves(quantised)), 4 * 2048 * 256
    report(of_float32=f"{size / full:.1%}", peak_above_it=f"{(max(live) - size) / largest:.2f} of the largest array")
    assert 0.25 < size / full < 0.26
    assert len(live) == len(convert.shapes(quantised.config))
    assert max(live) <= size + largest


@pytest.mark.parametrize("kind", ["int3", "", "INT8", 8, True, jnp.int8])
def test_unsupported_kinds_are_rejected(tmp_path, toy, kind):
    with pytest.raises(ValueError, match=r'^quantize=.* is not supported; use "int8" or "int4", or None .*\.$'):
        jspec.load(tmp_path / "nothing here", quantize=kind)
    with pytest.raises(ValueError, match="is not supported"):
        jspec.quantize(toy(0), kind)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("hf_name", "name"),
    [("model.layers.1.mlp.up_proj.weight", "layers.1.mlp.gate_up_proj.weight"), ("lm_head.weight", "lm_head.weight")],
)
def test_non_finite_weight_is_rejected(tmp_path, value, hf_name, name):
    raw = raw_config()
    broken = tensors(raw)
    broken[hf_name][3, 4] = value
    write(tmp_path, raw, broken)
    assert hf_name in hf_shapes(raw)
    with pytest.raises(ValueError, match=rf"^{name} has a value that is not finite, .*\.$"):
        jspec.load(tmp_path, "float32", quantize="int8")
    with pytest.raises(ValueError, match=rf"^{name} has a value that is not finite, .*\.$"):
        jspec.quantize(jspec.load(tmp_path, "float32"), "int8")


def test_one_program_serves_all_int8_models_of_a_shape(toy, prompts, compilations):
    batch = prompts([3, 5], seed=9)

    @jax.jit
    def program(target, draft, tokens, lengths, keys):
        return jspec.speculative_generate(target, draft, tokens, lengths, keys, max_new_tokens=8).tokens

    pairs = [(toy(seed), jspec.quantize(toy(seed + 1), "int8")) for seed in (10, 12)]
    first = np.asarray(program(*pairs[0], *batch))
    compiled = compilations()
    second = np.asarray(program(*pairs[1], *batch))
    assert compilations() == compiled
    assert (first != second).any()


def test_weights_have_tpu_layout_on_tpu(monkeypatch):
    """Weights have the layout that TPU programs read; otherwise each call would start with a copy."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    path = PAIR / "draft"
    model = jspec.load(path, "float32")
    matrices = model.embed_tokens, model.layers[0].mlp.down_proj
    assert [matrix.weight[...].format.layout.major_to_minor for matrix in matrices] == [(1, 0), (0, 1)]
    jspec.load(path, "float32", "int4")  # has no array of that layout
