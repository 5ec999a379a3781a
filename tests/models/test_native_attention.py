"""The native kernel for attention, compared with float64 and with itself."""

import ctypes
import math
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jspec.models import attention
from jspec.models.kernels import dispatch
from jspec.models.kernels.cpu import native
from jspec.models.kernels.cpu.masked_attention import AttentionKernel, MaskedCache, attend
from support.packed_matrices import needs_attention

pytestmark = [needs_attention, pytest.mark.usefixtures("quick_compile")]
SHAPES = [  # heads, groups, elements
    *((4, 2, 16), (1, 1, 8), (8, 1, 64), (9, 3, 40), (14, 2, 64), (12, 2, 128), (11, 1, 24), (3, 3, 33)),
]


@pytest.fixture(scope="module", autouse=True)
def _registered():
    assert native.register(AttentionKernel())


def problem(shape, batch, tokens, slots, seed=0):
    """Return random queries, and a cache in which every query sees its own random slots."""
    (heads, groups, size), rng = shape, np.random.default_rng(seed)
    q = rng.standard_normal((batch, heads, tokens, size), np.float32)
    keys = rng.standard_normal((batch, groups, size, slots), np.float32)
    values = rng.standard_normal((batch, groups, slots, size), np.float32)
    mask = rng.random((batch, tokens, slots)) < rng.random((batch, tokens, 1))
    mask[..., rng.integers(slots)] = True
    return q, MaskedCache(keys, values, None, mask)


def exact(q, caches):
    """Return softmax attention in float64."""
    q = q.astype(np.float64)
    own = [np.arange(len(q)) if cache.rows is None else cache.rows for cache in caches]
    keys = np.concatenate([cache.keys[rows] for cache, rows in zip(caches, own, strict=True)], axis=3)
    values = np.concatenate([cache.values[rows] for cache, rows in zip(caches, own, strict=True)], axis=2)
    mask = np.concatenate([cache.mask for cache in caches], axis=2)
    shared = q.shape[1] // keys.shape[1]
    keys, values = (np.repeat(part.astype(np.float64), shared, axis=1) for part in (keys, values))
    scores = np.where(mask[:, None], q @ keys / math.sqrt(q.shape[3]), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ values / weights.sum(axis=-1, keepdims=True)


def run(q, *caches):
    return np.asarray(jax.jit(attend)(q, caches))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_result_is_softmax_attention(shape, report):
    worst = np.zeros(2)
    for batch, tokens, slots in ((1, 1, 1), (2, 3, 7), (1, 8, 16), (3, 1, 31), (2, 5, 32), (1, 2, 33), (1, 17, 300)):
        q, cache = problem(shape, batch, tokens, slots)
        found = run(10 * q, cache), jax.jit(attention._attend)(10 * q, [cache])
        worst = np.maximum(worst, [np.abs(part - exact(10 * q, [cache])).max() for part in found])
    report(shape=shape, error=f"{worst[0]:.1e}", xla=f"{worst[1]:.1e}")
    assert worst[0] < 3e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_result_has_the_same_bits_however_it_is_computed(shape):
    """One query at a time, a smaller cache, a prefix in a second cache and selected cache rows change no bit."""
    q, (keys, values, _, mask) = problem(shape, 2, 9, 90)
    mask[..., 70:] = False
    whole = run(q, MaskedCache(keys, values, None, mask))
    for token in range(9):
        alone = run(q[:, :, token : token + 1], MaskedCache(keys, values, None, mask[:, token : token + 1]))
        assert alone.tobytes() == whole[:, :, token : token + 1].tobytes()
    short = MaskedCache(keys[..., :70], values[:, :, :70], None, mask[..., :70])
    assert run(q, short).tobytes() == whole.tobytes()
    for end in (1, 16, 45):
        prefix = MaskedCache(keys[..., :end], values[:, :, :end], None, mask[..., :end])
        rest = MaskedCache(keys[..., end:], values[:, :, end:], None, mask[..., end:])
        assert run(q, prefix, rest).tobytes() == whole.tobytes()
    rows = np.array([3, 1], np.int32)
    wide_keys, wide_values = (np.full((4, *part.shape[1:]), np.nan, np.float32) for part in (keys, values))
    wide_keys[rows], wide_values[rows] = keys, values
    assert run(q, MaskedCache(wide_keys, wide_values, rows, mask)).tobytes() == whole.tobytes()


def test_tree_node_has_the_bits_of_a_sequence():
    q, (keys, values, _, _) = problem((4, 2, 16), 1, 1, 50)
    path = [*range(20), 20, 23, 31, 47]
    mask = np.zeros((1, 1, 50), bool)
    mask[..., path] = True
    sequence = MaskedCache(keys[..., path], values[:, :, path], None, np.ones((1, 1, len(path)), bool))
    assert run(q, MaskedCache(keys, values, None, mask)).tobytes() == run(q, sequence).tobytes()


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_more_threads_give_the_same_bits(groups):
    """Compare many queries on all threads, one query whose heads the threads divide, and few slots on one thread.

    Test workers have one thread each, but ``-n 0`` uses all cores.
    """
    q, (keys, values, _, mask) = problem((8, groups, 64), 1, 64, 3000)
    mask[..., 40:] = False
    mask[..., 0] = True
    whole = run(q, MaskedCache(keys, values, None, mask))
    short = MaskedCache(keys[..., :40], values[:, :, :40], None, mask[..., :40])
    for token in range(64):
        one = slice(token, token + 1)
        alone = run(q[:, :, one], MaskedCache(keys, values, None, mask[:, one]))
        serial = run(q[:, :, one], short._replace(mask=short.mask[:, one]))
        assert alone.tobytes() == serial.tobytes() == whole[:, :, one].tobytes()


def test_nan_keys_affect_only_the_queries_that_see_them():
    q, (keys, values, _, mask) = problem((4, 2, 16), 2, 5, 40)
    mask[..., 8], mask[0, 3, 8] = False, True
    expected = run(q, MaskedCache(keys, values, None, mask))
    keys[:, :, :, 8] = np.nan
    values[:, :, 8] = 1e38
    found = run(q, MaskedCache(keys, values, None, mask)).copy()
    assert np.isnan(found[0, :, 3]).all()
    found[0, :, 3] = expected[0, :, 3]
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("factor", [1e-30, 1e3, 1e12])
def test_extreme_scores_and_values(factor):
    q, cache = problem((4, 2, 16), 1, 3, 40)
    q, huge = np.float32(factor) * q, np.float32(5e37) * np.sign(cache.values)
    np.testing.assert_allclose(run(q, cache), exact(q, [cache]), atol=1e-4)
    cache = cache._replace(values=huge)
    np.testing.assert_allclose(run(q, cache) / 5e37, exact(q, [cache]) / 5e37, atol=1e-4)


def test_softmax_weights_are_accurate():
    """Query i sees slot i, whose value is 1, and the last slot, whose score and value are 0: the result is a weight."""
    scores = np.linspace(-90, 0, 4001, dtype=np.float32)
    values = np.append(np.ones(4000, np.float32), np.float32(0))
    mask = np.zeros((1, 4000, 4001), bool)
    mask[0, np.arange(4000), np.arange(4000)] = mask[..., 4000] = True
    q = np.ones((1, 1, 4000, 1), np.float32)
    weight = run(q, MaskedCache(scores[None, None, None], values[None, None, :, None], None, mask))[0, 0, :, 0]
    x = scores[:4000].astype(np.float64)
    np.testing.assert_allclose(weight, np.where(x < -87, 0, np.exp(x) / (1 + np.exp(x))), rtol=3e-7)


def test_query_that_sees_no_slot_returns_zero():
    q, cache = problem((4, 2, 16), 1, 3, 40)
    cache.mask[0, 1] = False
    found = run(q, cache)
    assert (found[0, :, 1] == 0).all() and (found[0, :, 0] != 0).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these instruction sets are for x86-64")
@pytest.mark.parametrize(("processor", "bound"), [("haswell", 0), ("x86-64", 1e-6)])
def test_other_instruction_sets_give_the_same_result(monkeypatch, tmp_path, processor, bound):
    flags = [f"-march={processor}" if flag.startswith("-march") else flag for flag in native._FLAGS]
    monkeypatch.setattr(native, "_FLAGS", tuple(flags))
    native._compile(native._compiler(), AttentionKernel(), tmp_path / "attention.so")
    loaded = jax.ffi.pycapsule(ctypes.CDLL(str(tmp_path / "attention.so")).masked_attention)
    jax.ffi.register_ffi_target(f"test_attention_{processor}", loaded, platform="cpu")
    for shape in ((7, 1, 40), (12, 2, 128)):
        q, cache = problem(shape, 2, 3, 75)
        call = jax.ffi.ffi_call(f"test_attention_{processor}", jax.ShapeDtypeStruct(q.shape, q.dtype))
        cache.keys[0, 0, :, 5] = np.nan
        found = jax.jit(call)(q, cache.keys, cache.values, np.arange(2, dtype=np.int32), cache.mask)
        np.testing.assert_allclose(found, run(q, cache), rtol=0, atol=bound)


def attended(q, cache):
    last = jnp.full(cache.mask.shape[:2], cache.mask.shape[2] - 1)
    return dispatch.masked_attention(attention._attend_filled, q, [cache], last)


def test_transformations_use_xla():
    """`jax.vmap`, `jax.grad` and `jax.export` use XLA's operations instead of the kernel."""
    q, cache = problem((4, 2, 64), 2, 3, 40)
    xla = jax.jit(lambda q: attention._attend(q, [cache]))
    assert "custom_call" in jax.jit(attended).lower(q, cache).as_text()
    mapped = jax.jit(jax.vmap(attended, in_axes=(0, None)))
    np.testing.assert_allclose(mapped(q[None], cache)[0], xla(q), atol=1e-6)
    gradients = [jax.grad(lambda q, f=f: (f(q) ** 2).sum())(q) for f in (lambda q: attended(q, cache), xla)]
    np.testing.assert_allclose(*gradients, atol=1e-5)
    exported = jax.export.export(jax.jit(lambda q: attended(q, cache)))(q)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(q), xla(q), atol=1e-6)
    with (
        dispatch.allow_kernels_in_exports(),
        pytest.raises(ValueError, match="Cannot serialize code with custom calls"),
    ):
        jax.export.export(jax.jit(lambda q: attended(q, cache)))(q)


@pytest.mark.parametrize(
    ("shape", "tokens", "native"), [((2, 2, 8), 513, False), ((2, 2, 8), 512, True), ((2, 1, 8), 513, True)]
)
def test_long_prefill_without_shared_keys_uses_xla(shape, tokens, native):
    q, cache = problem(shape, 1, tokens, 8)
    assert ("custom_call" in jax.jit(attended).lower(q, cache).as_text()) == native


def test_kernel_runs_under_shard_map():
    q, cache = problem((4, 2, 16), 2, 3, 40)
    cache = cache._replace(rows=np.arange(2, dtype=np.int32))
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.jit(jax.shard_map(attended, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()))
    assert "custom_call" in sharded.lower(q, cache).as_text()
    assert np.asarray(sharded(q, cache)).tobytes() == run(q, cache).tobytes()
