"""Packed matrices: stored weights, native kernels compared with float64 and XLA, and models loaded from files."""

import ctypes
import functools
import logging
import platform
import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert
import jspec
from convert import CheckpointError, blocks
from jspec.engine import exported_programs
from jspec.models import packed
from jspec.models.kernels.cpu import native
from jspec.models.llama import matrices, widened
from jspec.models.packed import PackedMatrix
from jspec.training.target_states import fingerprint
from support import checkpoints, gguf_files
from support.checkpoints import BFLOAT16
from support.gguf_files import Kind

pytestmark = pytest.mark.usefixtures("quick_compile")
FORMATS = sorted(blocks.FORMATS)
MIXED = {"q": "Q4_K", "k": "Q4_K", "v": "Q6_K", "output": "Q5_0", "gate": "Q8_0", "up": "Q8_0", "down": "Q5_K"}
KERNEL = native.Kernel("Q4_0", 24)
needs_compiler = pytest.mark.skipif(native._compiler() is None, reason="there is no C++ compiler")


def stored_rows(name, count, width, seed=0):
    """Return random rows as a file stores them, with scales near 0.01, and the weights that they hold."""
    rng, kind = np.random.default_rng(seed), Kind[name]
    if name in ("BF16", "F16"):
        rows = gguf_files.stored(rng.standard_normal((count, width)).astype(np.float32) * 0.02, kind).view(np.uint8)
        return rows, gguf.dequantize(rows, kind)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    rows = rng.integers(0, 256, (count, width // values, size), np.uint8)
    for field in blocks.FORMATS[name].fields:
        if field.name in ("d", "dmin", "m"):
            scale = rng.uniform(0.005, 0.01, rows.shape[:2]).astype(np.float16)
            rows[..., field.offset : field.offset + 2] = scale[..., None].view(np.uint8)
    rows = rows.reshape(count, -1)
    return rows, gguf.dequantize(rows, kind)


def matrix(name, count, width, bits=24):
    """Return a random packed matrix and its weights."""
    rows, weights = stored_rows(name, count, width)
    return PackedMatrix(jnp.asarray(blocks.interleave(name, rows)), name, (count, width), bits), weights


def rounded(x, bits):
    """Return `x` in float64, with every 32 values rounded to `bits` bits as `jspec.load` describes."""
    runs = x.astype(np.float64).reshape(len(x), -1, 32)
    step = np.abs(runs).max(axis=-1, keepdims=True) / {8: 127, 16: 127 * 257}[bits]
    return (np.round(runs / np.where(step == 0, 1, step)) * step).reshape(x.shape)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [16, 39])
def test_weights_equal_those_of_the_gguf_library(name, count):
    one, weights = matrix(name, count, 512)
    np.testing.assert_array_equal(one.widen(), weights)
    np.testing.assert_array_equal(jax.jit(PackedMatrix.widen)(one), weights)
    rows = np.array([[0, count - 1], [count, 7]])
    np.testing.assert_array_equal(one.take(rows), weights[np.minimum(rows, count - 1)])
    chosen = [3, 3, 11, 0, 15, *range(1, 15)]
    np.testing.assert_array_equal(one.select(chosen).widen(), weights[chosen])


@needs_compiler
@pytest.mark.parametrize("name", FORMATS)
def test_native_kernel_is_as_accurate_as_float32(name, report):
    one, weights = matrix(name, 100, 1024)
    x = np.random.default_rng(1).standard_normal((9, 1024)).astype(np.float32)
    x[0] *= np.exp(np.random.default_rng(2).uniform(-20, 2, 1024))  # values of very different sizes in one run
    x[1], x[2] = 0, 1e-28
    expected = x.astype(np.float64) @ weights.T.astype(np.float64)
    multiply = jax.jit(PackedMatrix.multiply)
    assert "jspec_product" in multiply.lower(one, x).as_text()
    found = np.asarray(multiply(one, x), np.float64)
    (other,) = jax.jit(packed.multiply_widened, static_argnums=(2, 3))(x, one.tiles[...], one.kernel, 100)
    scale = np.abs(x).astype(np.float64) @ np.abs(weights).T + 1e-30
    errors = [np.sqrt(np.mean(np.square((result - expected) / scale)[3:])) for result in (found, np.asarray(other))]
    report(native=f"{errors[0]:.1e}", xla=f"{errors[1]:.1e}")
    assert errors[0] <= errors[1]
    assert (np.abs(found - expected) <= 1e-6 * scale).all()


@needs_compiler
def test_activations_are_rounded_in_proportion_to_the_largest_of_32(report):
    one, weights = matrix("Q8_0", 16, 32)
    x = np.random.default_rng(1).uniform(-1, 1, (64, 32)).astype(np.float32)
    x[:, 0] = np.exp2(np.arange(64) / 4)  # from 1 to 55,000
    # The large activation contributes the same to both products, so that only the rounding of the others is seen.
    only = np.zeros_like(x)
    only[:, 0] = x[:, 0]
    found = np.asarray(one.multiply(x), np.float64) - np.asarray(one.multiply(only), np.float64)
    expected = x[:, 1:].astype(np.float64) @ weights[:, 1:].T.astype(np.float64)
    bound = 2**-22 * x[:, :1] * np.abs(weights).sum(axis=1, dtype=np.float64)
    report(largest_error_over_bound=round(float((np.abs(found - expected) / bound).max()), 2))
    assert (np.abs(found - expected) <= bound).all()


@needs_compiler
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("native_kernel", [True, False], ids=["native", "XLA"])
def test_activations_are_rounded_to_fewer_bits_on_request(name, bits, native_kernel):
    one, weights = matrix(name, 100, 512, bits)
    x = np.random.default_rng(1).standard_normal((9, 512)).astype(np.float32)
    x[1], x[2, 7] = 0, 1e4
    activations = x if name in ("BF16", "F16") else rounded(x, bits)
    expected = activations.astype(np.float64) @ weights.T.astype(np.float64)
    found = one.multiply(x) if native_kernel else packed.multiply_widened(x, one.tiles[...], one.kernel, 100)[0]
    scale = np.abs(x).astype(np.float64) @ np.abs(weights).T + 1e-30
    # The largest step is 1e4 / 127. A value halfway between two integers may be rounded either way.
    assert (np.abs(found - expected) <= 1e-6 * scale).mean() > 0.99
    np.testing.assert_allclose(found, expected, rtol=0, atol=1.01 * 1e4 / {8: 127, 16: 127 * 257}[bits])


@needs_compiler
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bits", [8, 16, 24])
def test_bits_of_a_row_do_not_depend_on_other_rows(name, bits):
    one, _ = matrix(name, 100, 512, bits)
    x = np.random.default_rng(1).standard_normal((19, 512)).astype(np.float32)
    multiply = jax.jit(PackedMatrix.multiply)
    whole = np.asarray(multiply(one, x))
    for count in range(1, 14):
        for start in (0, 5):
            part = np.asarray(multiply(one, x[start : start + count]))
            assert part.tobytes() == whole[start : start + count].tobytes()


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these instruction sets are for x86-64")
@pytest.mark.parametrize(("processor", "name"), [("haswell", "Q6_K"), ("haswell", "F16"), ("x86-64", "Q4_K")])
def test_other_instruction_sets_give_the_same_product(monkeypatch, tmp_path, name, processor):
    flags = [f"-march={processor}" if flag.startswith("-march") else flag for flag in native._FLAGS]
    monkeypatch.setattr(native, "_FLAGS", tuple(flags))
    native._compile(native._compiler(), native.Kernel(name, 24), tmp_path / "product.so")
    loaded = jax.ffi.pycapsule(ctypes.CDLL(str(tmp_path / "product.so")).product)
    jax.ffi.register_ffi_target(f"test_product_{name}_{processor}", loaded, platform="cpu")
    one, _ = matrix(name, 40, 512)
    x = np.random.default_rng(1).standard_normal((7, 512)).astype(np.float32)
    call = jax.ffi.ffi_call(f"test_product_{name}_{processor}", jax.ShapeDtypeStruct((7, 40), jnp.float32))
    found, expected = np.asarray(jax.jit(call)(x, one.tiles[...])), np.asarray(one.multiply(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "BF16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_row_does_not_change_other_rows(name, bad):
    one, _ = matrix(name, 20, 256)
    x = np.ones((3, 256), np.float32)
    clean = np.asarray(one.multiply(x))
    x[1, 77] = bad
    found = np.asarray(jax.jit(PackedMatrix.multiply)(one, x))
    assert not np.isfinite(found[1]).any()
    assert found[[0, 2]].tobytes() == clean[[0, 2]].tobytes()


@pytest.mark.parametrize("name", ["Q5_0", "Q6_K", "F16"])
def test_transformations_use_the_widened_matrix(name):
    one, weights = matrix(name, 20, 256)
    x = np.random.default_rng(1).standard_normal((2, 3, 256)).astype(np.float32)
    expected = x @ weights.T
    np.testing.assert_allclose(one.multiply(x), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.vmap(one.multiply)(x), expected, rtol=1e-4, atol=1e-4)
    gradient = jax.grad(lambda x: jnp.square(one.multiply(x)).sum())(x)
    np.testing.assert_allclose(gradient, 2 * expected @ weights, rtol=1e-4, atol=1e-6 * np.abs(gradient).max())


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Store compiled libraries in this test's own folder, and start without registered kernels."""
    for name in ("register", "_warn_once"):
        monkeypatch.setattr(native, name, functools.cache(getattr(native, name).__wrapped__))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JSPEC_NATIVE", raising=False)
    return monkeypatch


@needs_compiler
def test_library_is_compiled_once_and_damaged_files_are_replaced(fresh, tmp_path):
    library = native.library(KERNEL)
    assert library.is_relative_to(tmp_path / "cache")
    written = library.stat().st_mtime_ns
    assert native.library(KERNEL) == library and library.stat().st_mtime_ns == written
    library.write_bytes(b"damaged")
    assert native.library(KERNEL) == library and library.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("/does/not/exist", "no C\\+\\+ compiler was found; install g\\+\\+ or clang\\+\\+, or set CXX"),
        ("false", "could not compile products.cc \\(exit status 1\\)"),
    ],
)
def test_without_compiler_xla_is_used_with_one_warning(fresh, caplog, compiler, said):
    fresh.setenv("CXX", compiler)
    one, weights = matrix("Q4_1", 20, 256)
    x = np.ones((1, 256), np.float32)
    with caplog.at_level(logging.WARNING, "jspec"):
        found = [jax.jit(lambda x, scale=scale: one.multiply(x) * scale)(x) for scale in (1, 2)]
    np.testing.assert_allclose(found[0], x @ weights.T, rtol=1e-5)
    (record,) = caplog.records
    assert re.search(said, record.getMessage())


@needs_compiler
def test_unwritable_cache_folder_is_named(fresh, caplog, tmp_path):
    (tmp_path / "cache").write_text("a file, where a folder should be")
    with caplog.at_level(logging.WARNING, "jspec"):
        assert not native.register(KERNEL)
    assert str(tmp_path / "cache") in caplog.text


def test_native_kernels_can_be_turned_off(fresh, caplog):
    fresh.setenv("JSPEC_NATIVE", "0")
    assert not native.is_default() and not native.register(KERNEL) and not caplog.records


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Return a GGUF file whose fused matrices mix formats."""
    raw = gguf_files.RAW | {"num_hidden_layers": 2}
    arrays = gguf_files.tensors(raw, checkpoints.tensors(raw))
    formats = {name: _format_of(name) for name, array in arrays.items() if array.ndim == 2}
    rows = {name: stored_rows(format, *arrays[name].shape, i)[0] for i, (name, format) in enumerate(formats.items())}
    path = tmp_path_factory.mktemp("packed") / "mixed.gguf"
    kinds = {name: Kind[format] for name, format in formats.items()}
    return gguf_files.write(path, gguf_files.metadata(raw), arrays | rows, kinds)


def _format_of(name):
    return next((format for part, format in MIXED.items() if f"_{part}." in name), "Q4_0")


def test_packed_model_has_the_weights_of_the_file(file):
    wide, model = jspec.load(file, packed=False), jspec.load(file, packed=True)
    formats = {name: [part.format for part in module.packed] for name, module in matrices(model).items()}
    assert formats["layers.0.self_attn.qkv_proj.weight"] == ["Q4_K", "Q6_K"]
    assert formats["layers.0.mlp.gate_up_proj.weight"] == ["Q8_0"]
    for name, module in matrices(model).items():
        np.testing.assert_array_equal(packed.widen(module.packed).T, matrices(wide)[name].weight[...])
    for one, other in zip(jax.tree.leaves(widened(model)), jax.tree.leaves(wide), strict=True):
        np.testing.assert_array_equal(one, other)


def test_packed_model_computes_the_same_function(file):
    wide, model = jspec.load(file, packed=False), jspec.load(file, packed=True)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 9), np.int32)
    expected, found = (jax.jit(lambda m, t: m(t))(m, tokens) for m in (wide, model))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["Hugging Face", "converted"])
def test_16_bit_checkpoint_stays_packed(tmp_path, dtype, kind):
    source = checkpoints.make(tmp_path / "hf", BFLOAT16 if dtype == "bfloat16" else np.float16)
    if kind == "converted":
        source = convert.save(convert.load(source), tmp_path / "store")
    wide, model = jspec.load(source, "float32", packed=False), jspec.load(source, "float32", packed=True)
    assert model.dtype == jnp.float32
    for name, module in matrices(model).items():
        (part,) = module.packed
        assert part.format == {"bfloat16": "BF16", "float16": "F16"}[dtype]
        np.testing.assert_array_equal(part.widen().T, matrices(wide)[name].weight[...])


@pytest.mark.parametrize("packed", [False, True])
def test_16_bit_weights_that_are_not_finite_are_loaded(tmp_path, packed):
    raw = checkpoints.raw_config()
    weights = checkpoints.tensors(raw, BFLOAT16)
    weights["lm_head.weight"][3, 5] = np.inf
    model = jspec.load(checkpoints.write(tmp_path / "x", raw, weights), "float32", packed=packed)
    assert np.asarray(model.head.wide())[5, 3] == np.inf


def test_non_finite_scales_are_rejected(tmp_path):
    raw = gguf_files.RAW | {"num_hidden_layers": 1}
    arrays = gguf_files.tensors(raw, checkpoints.tensors(raw))
    rows, _ = stored_rows("Q4_0", *arrays["blk.0.attn_output.weight"].shape)
    rows[3, 18:20] = np.array([np.inf], np.float16).view(np.uint8)
    file = tmp_path / "x.gguf"
    arrays["blk.0.attn_output.weight"] = rows
    gguf_files.write(file, gguf_files.metadata(raw), arrays, {"blk.0.attn_output.weight": Kind.Q4_0})
    with pytest.raises(CheckpointError, match=r"^blk\.0\.attn_output\.weight has a scale that is not finite; "):
        jspec.load(file, packed=True)


@pytest.mark.parametrize("name", FORMATS)
def test_strict_promotion_of_ranks_and_dtypes_is_supported(name):
    one, weights = matrix(name, 20, 256)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(one.widen(), weights)
        np.testing.assert_array_equal(one.take(np.array([3])), weights[[3]])
        assert one.multiply(jnp.ones((2, 256))).shape == (2, 20)


@needs_compiler
def test_vmap_uses_the_kernel():
    one, _ = matrix("Q4_K", 20, 256)
    x = np.random.default_rng(1).standard_normal((4, 3, 256)).astype(np.float32)
    mapped = jax.jit(jax.vmap(one.multiply, in_axes=1, out_axes=1))
    assert "jspec_product" in mapped.lower(x).as_text()
    np.testing.assert_array_equal(mapped(x), one.multiply(x))


@needs_compiler
def test_stored_programs_register_their_kernels(monkeypatch, file):
    model = jspec.load(file, packed=True)
    monkeypatch.setattr(native, "register", lambda kernel: kernel.format != "Q8_0")
    kernels = dict(exported_programs._native_kernels((model, {"x": np.zeros(3)})))
    expected = {*MIXED.values(), "Q4_0"}
    assert kernels == {native.Kernel(format, 24).target: format != "Q8_0" for format in expected}


def test_rounding_of_activations_needs_packed_matrices(file):
    assert {part.activation_bits for part in jspec.load(file, packed=True, activation_bits=8).head.packed} == {8}
    with pytest.raises(ValueError, match="activation_bits=8 needs packed matrices, but this model has none; "):
        jspec.load(file, packed=False, activation_bits=8)
    with pytest.raises(ValueError, match="activation_bits is 4; expected 8, 16 or 24"):
        jspec.load(file, packed=True, activation_bits=4)


def test_gradient_ignores_the_rounding_of_activations():
    one, weights = matrix("Q4_0", 20, 256, 8)
    x = np.random.default_rng(1).standard_normal((1, 256)).astype(np.float32)
    np.testing.assert_allclose(
        jax.grad(lambda x: one.multiply(x).sum())(x)[0], weights.sum(axis=0), rtol=1e-4, atol=1e-5
    )


def test_training_records_the_same_weights_packed_and_widened(file):
    wide, model = jspec.load(file, packed=False), jspec.load(file, packed=True)
    assert fingerprint(model) == fingerprint(wide)


@pytest.mark.parametrize("option", [{"quantize": "int8"}, {"sharding": lambda name, shape: None}])
def test_packed_cannot_be_combined_with_int8_or_sharding(file, option):
    with pytest.raises(ValueError, match="neither quantised nor sharded"):
        jspec.load(file, packed=True, **option)


@needs_compiler
@pytest.mark.parametrize("tied", [False, True])
def test_reduced_vocabulary_has_the_bits_of_the_whole_one(tmp_path, file, tied):
    if tied:
        raw = gguf_files.RAW | {"num_hidden_layers": 1, "tie_word_embeddings": True}
        arrays = gguf_files.tensors(raw, checkpoints.tensors(raw))
        rows, _ = stored_rows("Q6_K", *arrays["token_embd.weight"].shape)
        file = gguf_files.write(
            tmp_path / "tied.gguf",
            gguf_files.metadata(raw),
            arrays | {"token_embd.weight": rows},
            {"token_embd.weight": Kind.Q6_K},
        )
    model = jspec.load(file, packed=True)
    size, rng = model.config.vocab_size, np.random.default_rng(0)
    drafter = jspec.ModelDrafter.with_vocabulary(model, rng.permutation(size)[: size // 3])
    assert [part.format for part in drafter.model.head.packed] == ["Q6_K" if tied else "Q4_0"]
    tokens = rng.integers(0, size, (2, 9), np.int32)
    whole, few = (np.asarray(jax.jit(lambda m, t: m(t))(m, tokens)) for m in (model, drafter.model))
    ids = np.argsort(drafter.draft_ids, kind="stable")[: size // 3]
    np.testing.assert_array_equal(few, whole[..., ids])
    options = {"max_new_tokens": 12, "accept": "coupled"}
    batch = tokens, np.array([9, 4]), jax.random.split(jax.random.key(0), 2)
    out = jspec.speculative_generate(model, drafter, *batch, num_draft_tokens=3, **options)
    np.testing.assert_array_equal(out.tokens, jspec.generate(model, *batch, max_new_tokens=12).tokens)
    assert out.stats.accepted.sum() > 0


@needs_compiler
def test_greedy_text_does_not_depend_on_drafting_or_batching(file):
    model = jspec.load(file, packed=True)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (5, 6), np.int32)
    lengths, keys = np.full(5, 6, np.int32), jax.random.split(jax.random.key(0), 5)
    options = {"max_new_tokens": 24, "sampling": jspec.SamplingParams(temperature=0.0)}
    plain = jspec.generate(model, tokens, lengths, keys, **options)
    for drafter, rows in (
        (jspec.NGramDrafter(), slice(0, 5)),
        (jspec.NGramDrafter(), slice(2, 3)),
        (None, slice(1, 2)),
    ):
        run = jspec.generate if drafter is None else jspec.speculative_generate
        models = (model,) if drafter is None else (model, drafter)
        other = run(*models, tokens[rows], lengths[rows], keys[rows], **options)
        assert np.asarray(other.tokens).tobytes() == np.asarray(plain.tokens[rows]).tobytes()
