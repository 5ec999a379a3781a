"""Models with packed matrices, loaded from files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert
import jspec
from convert import CheckpointError
from jspec.engine import exported_programs
from jspec.models import matrix_parts
from jspec.models.kernels.cpu import native
from jspec.models.kernels.cpu.log_sum_exp import LogSumExpKernel
from jspec.models.kernels.cpu.masked_attention import AttentionKernel
from jspec.models.kernels.cpu.product import ProductKernel
from jspec.models.kv_cache import empty_cache
from jspec.models.llama import matrices, set_weight, widened
from jspec.training.target_states import fingerprint
from support import checkpoints, gguf_files, same_bits
from support.checkpoints import BFLOAT16
from support.gguf_files import Kind
from support.packed_matrices import needs_attention, needs_compiler, stored_rows

pytestmark = pytest.mark.usefixtures("quick_compile")
MIXED = {"q": "Q4_K", "k": "Q4_K", "v": "Q6_K", "output": "Q5_0", "gate": "Q8_0", "up": "Q8_0", "down": "Q5_K"}


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
    formats = {name: [part.format for part in module.parts] for name, module in matrices(model).items()}
    assert formats["layers.0.self_attn.qkv_proj.weight"] == ["Q4_K", "Q6_K"]
    assert formats["layers.0.mlp.gate_up_proj.weight"] == ["Q8_0"]
    for name, module in matrices(model).items():
        np.testing.assert_array_equal(matrix_parts.widen(module.parts).T, matrices(wide)[name].weight[...])
    for one, other in zip(jax.tree.leaves(widened(model)), jax.tree.leaves(wide), strict=True):
        np.testing.assert_array_equal(one, other)


def test_packed_model_computes_the_same_function(file):
    wide, model = jspec.load(file, packed=False), jspec.load(file, packed=True)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 9), np.int32)
    expected, found = (jax.jit(lambda m, t: m(t))(m, tokens) for m in (wide, model))
    exported = jax.export.export(jax.jit(lambda t: model(t)))(tokens)
    stored = jax.export.deserialize(exported.serialize()).call(tokens)
    for one in (found, stored):
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["Hugging Face", "converted"])
def test_16_bit_checkpoint_stays_packed(tmp_path, dtype, kind):
    source = checkpoints.make(tmp_path / "hf", BFLOAT16 if dtype == "bfloat16" else np.float16)
    if kind == "converted":
        source = convert.save(convert.load(source), tmp_path / "store")
    wide, model = jspec.load(source, "float32", packed=False), jspec.load(source, "float32", packed=True)
    assert model.dtype == jnp.float32
    for name, module in matrices(model).items():
        (part,) = module.parts
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


@needs_compiler
def test_stored_programs_register_their_kernels(monkeypatch, file):
    model = jspec.load(file, packed=True)
    monkeypatch.setattr(native, "register", lambda kernel: kernel != ProductKernel("Q8_0", 24))
    caches = {"float32": model.new_cache(1, 8), "bfloat16": empty_cache(1, (1, 1, 8, 8), jnp.bfloat16)}
    kernels = dict(exported_programs._native_kernels((model, caches["float32"]), "cpu"))
    products = {ProductKernel(format, 24).target: format != "Q8_0" for format in {*MIXED.values(), "Q4_0"}}
    logprobs = {LogSumExpKernel().target: True}
    assert kernels == products | logprobs | {AttentionKernel().target: True}
    assert not exported_programs._native_kernels((model, caches["float32"]), "cuda")
    assert dict(exported_programs._native_kernels((caches["bfloat16"], {"x": np.zeros(3)}), "cpu")) == logprobs


def test_rounding_of_activations_keeps_matrices_packed(file, monkeypatch):
    monkeypatch.setattr(native, "register", lambda kernel: False)
    model = jspec.load(file, activation_bits=8)
    assert {part.activation_bits for module in matrices(model).values() for part in module.parts} == {8}


def test_rounding_of_activations_without_effect_is_rejected(file, tmp_path):
    wide = checkpoints.make(tmp_path / "hf", BFLOAT16)
    for source, options in ((wide, {}), (file, {"packed": False})):
        with pytest.raises(ValueError, match=r"activation_bits=8 has no effect on .*; leave it out"):
            jspec.load(source, activation_bits=8, **options)
    with pytest.raises(ValueError, match="activation_bits is 4; expected 8, 16 or 24"):
        jspec.load(file, packed=True, activation_bits=4)


def test_training_records_the_same_weights_packed_and_widened(file):
    wide, model = jspec.load(file, packed=False), jspec.load(file, packed=True)
    assert fingerprint(model) == fingerprint(wide)
    set_weight(model.embed_tokens, wide.embed_tokens.weight[...])  # as if GGUF's type for it could not be packed
    assert fingerprint(model) == fingerprint(wide)


@pytest.mark.parametrize("option", [{"packed": True}, {"activation_bits": 8}])
def test_packed_matrices_cannot_be_sharded(file, option):
    with pytest.raises(ValueError, match="cannot be sharded; leave out packed=True and activation_bits"):
        jspec.load(file, sharding=lambda name, shape: None, **option)


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
    assert [part.format for part in drafter.model.head.parts] == ["Q6_K" if tied else "Q4_0"]
    tokens = rng.integers(0, size, (2, 9), np.int32)
    whole, few = (np.asarray(jax.jit(lambda m, t: m(t))(m, tokens)) for m in (model, drafter.model))
    ids = np.argsort(drafter.draft_ids, kind="stable")[: size // 3]
    np.testing.assert_array_equal(few, whole[..., ids])
    options = {"max_new_tokens": 12, "accept": "coupled"}
    batch = tokens, np.array([9, 4]), jax.random.split(jax.random.key(0), 2)
    out = jspec.speculative_generate(model, drafter, *batch, num_draft_tokens=3, **options)
    np.testing.assert_array_equal(out.tokens, jspec.generate(model, *batch, max_new_tokens=12).tokens)
    assert out.stats.accepted.sum() > 0


def random_batch(model, count, width):
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (count, width), np.int32)
    lengths = np.array([width, width // 4, width // 2, width, 2], np.int32)[:count]
    return tokens, lengths, jax.random.split(jax.random.key(0), count)


@needs_attention
@pytest.mark.parametrize("bits", [24, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.05])
def test_texts_and_log_probabilities_have_the_bits_of_plain_decoding(file, bits, temperature, report):
    """Drafts, trees, batches and padding change no bit, because a row's results do not depend on other rows."""
    model = jspec.load(file, packed=True, activation_bits=bits)
    accepted, judged = same_bits.assert_same_bits(model, random_batch(model, 5, 11), 20, temperature)
    report(accepted=dict(accepted), judged=dict(judged))
    assert all(0 < accepted[name] < judged[name] for name in ("model", "tree")) and judged["lookup"]


@needs_attention
def test_log_probabilities_over_a_large_vocabulary_have_the_bits_of_plain_decoding(tmp_path):
    """The kernel sums in the same order for 3 rows and for 30; XLA does not."""
    raw = gguf_files.RAW | {"num_hidden_layers": 1, "tie_word_embeddings": True, "vocab_size": 49152}
    arrays = gguf_files.tensors(raw, checkpoints.tensors(raw))
    file = gguf_files.write(tmp_path / "x.gguf", gguf_files.metadata(raw), arrays)
    model = jspec.load(file, packed=True)
    batch, options = random_batch(model, 3, 12), {"max_new_tokens": 12, "sampling": jspec.SamplingParams(temperature=0)}
    plain = jspec.generate(model, *batch, **options)
    drafted = jspec.speculative_generate(model, jspec.NGramDrafter(), *batch, num_draft_tokens=9, **options)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    np.testing.assert_array_equal(drafted.raw_logprobs, plain.raw_logprobs)


@needs_attention
def test_engine_has_the_bits_of_plain_decoding(file):
    model = jspec.load(file, packed=True, activation_bits=8)
    assert same_bits.assert_engine_has_same_bits(model, random_batch(model, 5, 24), 12, 1.0, slots=3)
