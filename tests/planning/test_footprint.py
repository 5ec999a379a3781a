"""Planned bytes of weights, caches and temporaries match real models' arrays and XLA's memory analysis."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

import jspec
from bench import abstract
from bench.pairs import SHAPES, llama, nbytes, weight_bytes
from jspec.core.sampling import SamplingParams
from jspec.decoding.program import start
from jspec.drafters.draft_length import Fixed
from jspec.drafters.standalone.model import as_drafter
from jspec.models.kernels.cpu import native
from jspec.planning import memory as footprint
from jspec.planning.memory import Weights, slots_of
from support import toys
from support.few import by_default

BIG, SMALL = SHAPES["llama-3.2-3b"], SHAPES["llama-3.2-1b"]
UNTIED = SHAPES["llama-3.1-8b"]
TINY = llama(vocab=64, hidden=64, inner=64, layers=2, heads=4, groups=1, size=16)

GROUPED = {"hidden_size": 32, "intermediate_size": 192, "head_dim": 32}  # int4 has groups of 32 and 64


@pytest.mark.parametrize(
    "details", [{}, {"qkv_bias": True, "qk_norm": True}, {"vocab_size": 24}], ids=["llama", "qwen", "wide"]
)
@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
def test_weight_and_cache_sizes_match_model(monkeypatch, details, quantized):
    monkeypatch.setattr(native, "is_default", lambda: False)
    model = toys.tiny_llama(0, **GROUPED, **details)
    model = jspec.quantize(model, quantized) if quantized else model
    weights = Weights(model.config, 4, quantized)
    assert weights.bytes == nbytes(nnx.state(model))
    assert weights.bytes_read == weights.bytes - nbytes(nnx.state(model.embed_tokens))  # the head is a separate matrix
    assert weights.cache_bytes(3, 64) == nbytes(model.new_cache(3, 64))


@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
def test_a_share_of_the_weights_is_that_of_tensor_parallel(quantized):
    model, place = abstract.model(UNTIED, "bfloat16", quantized), jspec.tensor_parallel(AbstractMesh((4,), ("model",)))
    size = {"bfloat16": 2, "float32": 4, "int8": 1, "int4": 0.5}
    expected = 0
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        name, shape = ".".join(map(str, path)), leaf.shape
        share = shape if "norm" in name else place(name, shape).shard_shape(shape)
        expected += math.prod(share) * size[str(leaf.dtype)]
    assert Weights(UNTIED, 2, quantized, num_devices=4).bytes == expected


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
def test_reduced_vocabulary_counts_as_separate_head(monkeypatch, tied, quantized):
    monkeypatch.setattr(native, "is_default", lambda: False)
    model = toys.tiny_llama(0, tie_word_embeddings=tied, **GROUPED)
    model = jspec.ModelDrafter.with_vocabulary(
        jspec.quantize(model, quantized) if quantized else model, [1, 5, 3]
    ).model
    weights = Weights(model.config, 4, quantized, 3)
    assert weights.bytes == nbytes(nnx.state(model))
    assert weights.bytes_read == weights.bytes - nbytes(nnx.state(model.embed_tokens)) == weight_bytes(model)
    plan, halves = (
        jspec.plan(toys.tiny_llama(0, **GROUPED), model, device="h100"),
        dataclasses.replace(weights, itemsize=2),
    )
    assert plan.draft.footprint.weights - plan.plain_footprint.weights == halves.bytes


def test_tied_embedding_counts_as_head():
    weights = Weights(TINY, 2)
    assert weights.bytes_read == weights.bytes == 2 * weights.parameters_read
    assert Weights(UNTIED, 2).bytes_read == Weights(UNTIED, 2).bytes - 2 * UNTIED.vocab_size * UNTIED.hidden_size


@pytest.mark.parametrize(("width", "new", "k"), [(5, 20, 6), (5, 20, 7), (8, 55, 0), (8, 56, 0)])
def test_planned_caches_equal_allocated_caches(width, new, k):
    target, draft = toys.tiny_llama(0), toys.tiny_llama(1, num_layers=1)

    def begin():
        keys = jax.random.split(jax.random.key(0), 2)
        lengths, tokens = np.full(2, width, np.int32), np.zeros((2, width), np.int32)
        asked = toys.request(keys, lengths, new, *toys.both_transforms(SamplingParams(), 2))
        state, _ = start(target, as_drafter(draft) if k else None, asked, jax.numpy.asarray(tokens), new, Fixed(k))
        return state.cache, state.drafter

    models = tuple(Weights(model.config, 4) for model in (target, draft)[: 1 + bool(k)])
    allocated = sum(leaf.size * 4 for leaf in jax.tree.leaves(jax.eval_shape(begin)))
    assert footprint.footprint(models, 2, width + new, width, k).caches == allocated


WIDE = dataclasses.replace(TINY, vocab_size=50_000)
SHAPED = {
    "laws": (WIDE, WIDE, (4, 8, 16, 3)),
    "laws of plain decoding": (WIDE, None, (4, 8, 16, 0)),
    "scores": (TINY, dataclasses.replace(TINY, num_attention_heads=1), (2, 512, 16, 2)),
    "MLP": (dataclasses.replace(TINY, intermediate_size=8192), None, (8, 64, 16, 0)),
}


@pytest.mark.parametrize("name", by_default(SHAPED, ("MLP",)))
def test_planned_temporaries_are_within_factor_two_of_xla(name, report):
    """This test covers float32 on CPU; tests/core/test_devices.py covers GPUs."""
    target, draft, (batch, width, new, k) = SHAPED[name]
    models = tuple(Weights(config, 4) for config in (target, draft) if config)
    made = [abstract.model(config, "float32") for config in (target, draft or target)]
    program = abstract.trace(*made, abstract.Setting(batch, width, new, k)).lower().compile()
    planned = footprint.footprint(models, batch, width + new, width, k)
    allocated = program.memory_analysis().temp_size_in_bytes - planned.caches
    report(planned=planned.temporaries, allocated=allocated)
    assert allocated > planned.caches  # otherwise the comparison proves nothing
    assert allocated / 2 <= planned.temporaries <= 2 * allocated


def test_sizes_match_published_models():
    big, small = Weights(BIG, 2), Weights(SMALL, 2)
    assert [round(model.bytes / 1e9, 2) for model in (big, small)] == [6.43, 2.47]
    assert (big.cache_bytes(1, 1), small.cache_bytes(1, 1)) == (114_688, 32_768)


def test_slots_are_whole_tiles():
    assert [slots_of(length, k) for length, k in ((31, 0), (32, 0), (60, 3), (60, 4))] == [32, 40, 64, 72]
