"""int8 and int4 weights in packed form: stored values, loading, decoding, and what the form excludes."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from convert import blocks
from jspec.bundled import PAIR
from jspec.models import groups, packed
from jspec.models.kernels.cpu import native
from jspec.models.llama import matrices, widened
from support import checkpoints, gguf_files, live_arrays
from support.checkpoints import BFLOAT16
from support.gguf_files import Kind
from support.packed_matrices import needs_compiler, stored_rows

pytestmark = pytest.mark.usefixtures("quick_compile")
FORMATS = {"int8": "Q8_0", "int4": "Q4_1"}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
GREEDY = jspec.SamplingParams(temperature=0.0)


@pytest.fixture
def packs_by_default(monkeypatch):
    monkeypatch.setattr(native, "is_default", lambda: True)


def _formats(model):
    return {part.format for module in matrices(model).values() for part in module.parts}


def _random_weights():
    """Return ``float32[39, 96]`` with groups of zeros, of equal values, of tiny and huge ones, and with an outlier."""
    weight = np.random.default_rng(0).standard_normal((39, 96)).astype(np.float32) * 0.02
    weight[0, :32], weight[1, :32] = 0, 0.3
    weight[2] *= 1e-7
    weight[3] *= 1e5
    weight[4, 40] = -7
    weight[5] = np.abs(weight[5]) + 1
    return weight


def _stored_rows(part):
    """Return the rows ``uint8[out, bytes]`` of a packed matrix as GGUF stores them."""
    fields = packed._fields(part.tiles[...], part.format)
    rows = [np.asarray(fields[field.name]) for field in blocks.FORMATS[part.format].fields]
    rows = np.concatenate(rows, axis=-1).reshape(len(part.tiles) * blocks.LANES, -1)[: part.out_size]
    tiles = np.empty(part.tiles.shape, np.uint8)
    blocks.interleave(part.format, rows, tiles)
    np.testing.assert_array_equal(tiles, part.tiles[...])
    return rows


def _halves(rows, format):
    """Return the scales, and minimums if there are any, of stored rows: ``float16[out, groups, 1 or 2]``."""
    stored = rows.reshape(len(rows), -1, blocks.FORMATS[format].nbytes)
    return stored[..., : 4 if format == "Q4_1" else 2].copy().view(np.float16)


def _nearest(weight, rows, format):
    """Return the smallest error ``float64[out, in]`` of any codes, with the scales in the gguf library's rows."""
    halves = _halves(rows, format).astype(np.float64)[..., None]
    codes = np.arange(16) if format == "Q4_1" else np.arange(-128, 128)
    values = halves[..., 0, :] * codes + (halves[..., 1, :] if format == "Q4_1" else 0)
    groups = weight.astype(np.float64).reshape(*values.shape[:2], 32, 1)
    return np.abs(groups - values[:, :, None]).min(axis=-1).reshape(weight.shape)


@pytest.mark.parametrize("format", FORMATS.values())
@pytest.mark.parametrize("source", ["array", "packed"])
def test_codes_are_the_nearest_for_ggml_scales(format, source, report, monkeypatch):
    monkeypatch.setattr(groups, "_CHUNK", 16 * 96)  # several chunks, of which the last is not whole
    weight = _random_weights()
    if source == "packed":
        weight = weight.astype(BFLOAT16)
        (stored,) = blocks.from_array(weight)
        one = packed.PackedMatrix(jnp.asarray(stored.tiles), stored.format, stored.shape)
        part, weight = groups.quantized_part(one, format, 24, "w"), weight.astype(np.float32)
    else:
        part = groups.quantized_matrix(weight, format, 24, "w")
    assert (part.format, part.out_size, part.in_size) == (format, 39, 96)
    rows, theirs = _stored_rows(part), gguf.quantize(weight, Kind[format])
    np.testing.assert_array_equal(np.asarray(part.widen()), gguf.dequantize(rows, Kind[format]))
    np.testing.assert_array_equal(_halves(rows, format), _halves(theirs, format))
    error = np.abs(weight.astype(np.float64) - np.asarray(part.widen()))
    other = np.abs(weight.astype(np.float64) - gguf.dequantize(theirs, Kind[format]))
    slack = 1e-6 * np.abs(weight)  # the weight that a code stands for is rounded to float32
    report(of_ggml_error=round(float((error[6:] ** 2).sum() / (other[6:] ** 2).sum()), 4))
    assert (error <= _nearest(weight, theirs, format) + slack).all()
    assert (error <= other + slack).all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("stored", [np.float32, BFLOAT16])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}])
@needs_compiler
def test_load_and_quantize_agree(tmp_path, packs_by_default, kind, stored, changes):
    source = checkpoints.make(tmp_path / "hf", stored, **SIZES | changes)
    one = jspec.load(source, "float32", quantize=kind)
    for other in (
        jspec.load(source, "float32", quantize=kind, packed=True),
        jspec.quantize(jspec.load(source, "float32"), kind),
        jspec.quantize(jspec.load(source, "float32", packed=False), kind),
    ):
        assert jax.tree.structure(other) == jax.tree.structure(one)
        for leaf, expected in zip(jax.tree.leaves(other), jax.tree.leaves(one), strict=True):
            np.testing.assert_array_equal(leaf, expected)
    wide = jspec.load(source, "float32", packed=False)
    for name, module in matrices(one).items():
        (part,) = module.parts
        assert part.format == FORMATS[kind]
        weights_and_padding = -(-part.out_size // 16) * 16 * part.in_size
        assert part.tiles.nbytes * 8 == {"int8": 8.5, "int4": 5}[kind] * weights_and_padding
        rows = gguf.quantize(np.asarray(matrices(wide)[name].weight[...]).T.copy(), Kind[part.format])
        reach = np.abs(gguf.dequantize(rows, Kind[part.format])).max()
        np.testing.assert_allclose(part.widen(), gguf.dequantize(rows, Kind[part.format]), atol=reach / 7)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Return a GGUF file with formats below and above 5 and 8.5 bits per weight."""
    raw = gguf_files.RAW | {"num_hidden_layers": 1}
    arrays = gguf_files.tensors(raw, checkpoints.tensors(raw))
    formats = {"attn_q": "Q4_K", "attn_k": "Q6_K", "attn_v": "F16", "attn_output": "Q8_0", "ffn_down": "Q4_1"}
    rows, kinds = {}, {}
    for i, (name, array) in enumerate(arrays.items()):
        if array.ndim == 2:
            format = next((formats[part] for part in formats if part in name), "BF16")
            stored, _ = stored_rows(format, *array.shape, i)
            rows[name], kinds[name] = stored, Kind[format]
    path = tmp_path_factory.mktemp("packed") / "mixed.gguf"
    return gguf_files.write(path, gguf_files.metadata(raw), arrays | rows, kinds)


@pytest.mark.parametrize("kind", FORMATS)
def test_matrices_that_are_no_larger_stay_as_they_are(file, kind):
    before, model = jspec.load(file, packed=True), jspec.load(file, packed=True, quantize=kind)
    formats = {name: [part.format for part in module.parts] for name, module in matrices(model).items()}
    expected = {"int8": ["Q4_K", "Q6_K", "Q8_0"], "int4": ["Q4_K", "Q4_1", "Q4_1"]}[kind]
    assert formats["layers.0.self_attn.qkv_proj.weight"] == expected
    assert formats["layers.0.self_attn.o_proj.weight"] == {"int8": ["Q8_0"], "int4": ["Q4_1"]}[kind]
    assert formats["layers.0.mlp.down_proj.weight"] == ["Q4_1"]
    assert formats["embed_tokens.weight"] == [FORMATS[kind]]
    for name, module in matrices(model).items():
        for old, new in zip(matrices(before)[name].parts, module.parts, strict=True):
            if old.format == new.format:
                np.testing.assert_array_equal(old.tiles[...], new.tiles[...])
            else:
                rows = gguf.quantize(np.asarray(old.widen()), Kind[new.format])
                np.testing.assert_array_equal(_halves(_stored_rows(new), new.format), _halves(rows, new.format))
    again = jspec.quantize(before, kind)
    if native._compiler() is not None:
        assert [leaf.tobytes() for leaf in map(np.asarray, jax.tree.leaves(again))] == [
            leaf.tobytes() for leaf in map(np.asarray, jax.tree.leaves(model))
        ]
        np.testing.assert_array_equal(*(jax.tree.leaves(one)[0] for one in (jspec.quantize(again, kind), again)))


@pytest.mark.parametrize("kind", FORMATS)
def test_rounded_activations_are_kept(file, tmp_path, kind):
    source = checkpoints.make(tmp_path / "hf", BFLOAT16, **SIZES)
    for one in (source, file):
        model = jspec.load(one, quantize=kind, activation_bits=8)
        assert {part.activation_bits for module in matrices(model).values() for part in module.parts} == {8}
    again = jspec.quantize(jspec.load(file, activation_bits=8), kind)
    if native._compiler() is not None:
        assert {part.activation_bits for module in matrices(again).values() for part in module.parts} == {8}


@needs_compiler
def test_int8_without_packing_becomes_packed_int4(tmp_path, packs_by_default):
    source = checkpoints.make(tmp_path / "hf", **SIZES)
    columns = jspec.load(source, quantize="int8", packed=False)
    assert _formats(jspec.quantize(columns, "int8")) == _formats(columns) == {"int8"}
    model = jspec.quantize(columns, "int4")
    assert model.quantized == "int4" and _formats(model) == {"Q4_1"}
    for name, module in matrices(model).items():
        old = matrices(columns)[name]
        wide = np.asarray(old.parts[0].widen())
        groups = wide.reshape(len(wide), -1, 32)
        steps = (groups.max(-1) - groups.min(-1)) / 15
        error = np.abs(module.parts[0].widen() - wide).reshape(groups.shape).max(-1)
        assert (error <= 0.51 * steps + 1e-4).all()


@needs_compiler
@pytest.mark.parametrize("kind", FORMATS)
def test_decoding_does_not_depend_on_drafting(kind, report):
    """A target gives the same text with a draft of its kind, a few draft tokens or none, alone and in a batch."""
    target = jspec.load(PAIR / "target", quantize=kind, packed=True)
    draft = jspec.load(PAIR / "draft", quantize=kind, activation_bits=8)
    few = jspec.ModelDrafter.with_vocabulary(draft, range(0, 2048, 2))
    tokens = np.random.default_rng(0).integers(0, 2048, (4, 6), np.int32)
    lengths, keys = np.array([6, 3, 5, 6], np.int32), jax.random.split(jax.random.key(0), 4)
    for sampling, rule in ((GREEDY, "rejection"), (jspec.SamplingParams(), "coupled")):
        options = {"max_new_tokens": 24, "sampling": sampling}
        plain = jspec.generate(target, tokens, lengths, keys, **options)
        for drafter, rows in ((draft, slice(0, 4)), (few, slice(1, 3)), (jspec.NGramDrafter(), slice(2, 3))):
            batch = tokens[rows], lengths[rows], keys[rows]
            out = jspec.speculative_generate(target, drafter, *batch, num_draft_tokens=3, accept=rule, **options)
            np.testing.assert_array_equal(out.tokens, plain.tokens[rows])
            accepted = int(out.stats.accepted.sum())
            report(rule=rule, drafter=type(drafter).__name__, accepted=accepted)
            assert accepted or drafter is not draft


@needs_compiler
@pytest.mark.parametrize("kind", FORMATS)
def test_logits_are_those_of_the_stored_weights(tmp_path, kind, report):
    model = jspec.load(checkpoints.make(tmp_path / "hf", **SIZES), quantize=kind, packed=True)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 9), np.int32)
    found, expected = (np.asarray(jax.jit(lambda m, t: m(t))(one, tokens)) for one in (model, widened(model)))
    report(farthest=f"{np.abs(found - expected).max():.1e}")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_loading_holds_one_matrix_unquantised(tmp_path, monkeypatch, report):
    source = checkpoints.make(tmp_path, hidden_size=256, intermediate_size=512, vocab_size=2048, head_dim=64)
    live = live_arrays.watch(monkeypatch, "stream_packed")
    model = jspec.load(source, quantize="int4", packed=True)
    size, largest = sum(leaf.nbytes for leaf in jax.tree.leaves(model)), 4 * 2048 * 256
    report(peak_above_it=f"{(max(live) - size) / largest:.2f} of the largest array")
    assert max(live) <= size + largest


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("kind", FORMATS)
def test_non_finite_weight_is_rejected(tmp_path, value, kind):
    raw = checkpoints.raw_config(**SIZES)
    broken = checkpoints.tensors(raw)
    broken["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    checkpoints.write(tmp_path, raw, broken)
    with pytest.raises(
        ValueError, match=r"^layers\.1\.mlp\.gate_up_proj\.weight has a value that is not finite or exc"
    ):
        jspec.load(tmp_path, "float32", quantize=kind, packed=True)


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_packed_only_by_default_or_on_request(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(native, "is_default", lambda: False)
    source = checkpoints.make(tmp_path / "hf", **SIZES)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for options in ({}, {"packed": False}, {"dtype": "bfloat16"}, {"sharding": sharding}):
        assert _formats(jspec.load(source, quantize=kind, **options)) == {kind}
    assert _formats(jspec.quantize(jspec.load(source), kind)) == {kind}
    assert _formats(jspec.load(source, quantize=kind, packed=True)) == {FORMATS[kind]}


@pytest.mark.parametrize("kind", FORMATS)
def test_sizes_that_are_not_whole_groups(tmp_path, packs_by_default, kind):
    source = checkpoints.make(tmp_path / "hf")  # intermediate_size is 48
    message = r"^layers\.0\.mlp\.down_proj\.weight has 48 inputs, but {}int. weights need a multiple of 32; use "
    with pytest.raises(ValueError, match=message.format("packed ")):
        jspec.load(source, quantize=kind, packed=True)
    ways = (lambda: jspec.load(source, quantize=kind), lambda: jspec.quantize(jspec.load(source, packed=False), kind))
    for way in ways:
        if kind == "int8":
            assert _formats(way()) == {"int8"}
        else:
            with pytest.raises(ValueError, match=message.format("")):
                way()


@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_models_are_neither_saved_nor_trained(tmp_path, kind):
    model = jspec.load(checkpoints.make(tmp_path / "hf", **SIZES), quantize=kind, packed=True)
    with pytest.raises(ValueError, match=f"^The model is {kind} and cannot be saved"):
        jspec.ModelDrafter(model).save(tmp_path / "saved")
    with pytest.raises(ValueError, match=f"the target's layers are {kind}; load it without quantising"):
        jspec.train_drafter(model, np.zeros((4, 16), np.int32), "model", folder=tmp_path / "run")


def test_plan_counts_packed_models_as_quantised():
    target, draft = (jspec.load(PAIR / name) for name in ("target", "draft"))
    packed_draft = jspec.load(PAIR / "draft", quantize="int8", packed=True)
    expected = jspec.plan(target, draft, device="h100")
    assert jspec.plan(target, packed_draft, device="h100").draft == expected.int8
    int4 = jspec.load(PAIR / "draft", quantize="int4", packed=True)
    assert jspec.plan(target, int4, device="h100") == jspec.plan(target, draft, device="h100", quantize="int4")
