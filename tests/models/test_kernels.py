"""Interpreted kernels compared with XLA's versions and float64 oracles, and which programs use the kernels."""

import functools
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.gpu.kernels import ATTENTION as CASES
from bench.gpu.kernels import (
    NORM,
    attention_arguments,
    exact_attention,
    exact_head_norm,
    exact_norm,
    norm_arguments,
)
from jspec.models import load as weights
from jspec.models.attention import _attend_normed, _attend_projected
from jspec.models.kernels import AttentionForm
from jspec.models.kernels import dispatch as choice
from jspec.models.kernels.add_norm import project_add_norm
from jspec.models.kernels.decode_attention import decode_attention
from jspec.models.layers import _project_add_norm
from support import lowering
from support.few import by_default

KERNEL = jax.jit(functools.partial(decode_attention, interpret=True), static_argnums=5)
XLA = jax.jit(_attend_projected, static_argnums=5)


def _bits(array):
    return np.asarray(array).view(np.uint16)


def _by_head(mixed, size):
    return np.asarray(mixed, np.float32).reshape(*mixed.shape[:2], -1, size)


@pytest.mark.parametrize("name", by_default(CASES, ("an empty cache", "ratio 4", "eight shares")))
def test_attention_kernel_matches_xla(name, report):
    """Caches equal XLA's bit for bit, and results are about as close to the exact values."""
    arguments = attention_arguments(*CASES[name])
    qkv, tables, *_, positions, sizes = arguments
    mixed, keys, values = KERNEL(*arguments)
    expected = XLA(*arguments)
    assert mixed.dtype == jnp.bfloat16 and mixed.shape == expected[0].shape
    np.testing.assert_array_equal(_bits(keys), _bits(expected[1]))
    np.testing.assert_array_equal(_bits(values), _bits(expected[2]))
    truth = exact_attention(qkv, tables, keys, values, positions, sizes)
    errors = [np.abs(np.asarray(one, np.float64) - truth) for one in (mixed, expected[0])]
    kernel, xla = (np.sqrt(np.mean(error**2)) for error in errors)
    report(case=repr(name), rms_error=f"{kernel:.1e}", of_xla=f"{xla:.1e}", max_error=f"{errors[0].max():.1e}")
    assert kernel <= 1.5 * xla
    assert errors[0].max() <= 2**-7 * np.abs(np.asarray(values, np.float64)).max()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("name", ["ratio 3", "eight shares"])
def test_attention_kernel_with_head_norms_matches_xla(name, causal, report):
    """Queries and keys are normed before they are rotated; the new tokens attend to all of them or to earlier ones."""
    *arguments, sizes = attention_arguments(*CASES[name])
    norms = tuple(jnp.asarray(np.random.default_rng(i).uniform(0.5, 2, sizes[2]), jnp.bfloat16) for i in (1, 2))
    form = AttentionForm(*sizes, 1e-2, causal)  # a constant that matters
    kernel = functools.partial(decode_attention, form=form, norms=norms, interpret=True)
    mixed, keys, values = jax.jit(kernel)(*arguments)
    xla = functools.partial(_attend_normed, form=form)
    expected = jax.jit(xla)(*arguments, *norms)
    # A key is the difference of two rounded numbers, which XLA may leave unrounded.
    np.testing.assert_allclose(np.float32(keys), np.float32(expected[1]), rtol=2**-7, atol=2**-5)
    np.testing.assert_array_equal(_bits(values), _bits(expected[2]))
    qkv, tables, *_, positions = arguments
    seen = positions if causal else jnp.broadcast_to(positions[:, -1:], positions.shape)
    truth = exact_attention(exact_head_norm(qkv, norms, sizes, 1e-2), tables, keys, values, seen, sizes)
    errors = [np.abs(np.asarray(one, np.float64) - truth) for one in (mixed, expected[0])]
    kernel_rms, xla_rms = (np.sqrt(np.mean(error**2)) for error in errors)
    report(rms_error=f"{kernel_rms:.1e}", of_xla=f"{xla_rms:.1e}", max_error=f"{errors[0].max():.1e}")
    assert kernel_rms <= 1.5 * xla_rms
    assert errors[0].max() <= 2**-7 * np.abs(np.asarray(values, np.float64)).max()


@pytest.mark.parametrize("name", ["ratio 3", "eight shares"])
def test_unread_slots_do_not_change_output(name):
    """NaN in the slots that the new tokens take, and in every slot after them, changes no output."""
    qkv, tables, keys, values, positions, sizes = attention_arguments(*CASES[name])
    behind = jnp.arange(keys.shape[3]) >= positions[:, :1]
    clean = KERNEL(qkv, tables, keys, values, positions, sizes)
    keys = jnp.where(behind[:, None, None, :], jnp.nan, keys)
    values = jnp.where(behind[:, None, :, None], jnp.nan, values)
    spoiled = KERNEL(qkv, tables, keys, values, positions, sizes)
    np.testing.assert_array_equal(_bits(spoiled[0]), _bits(clean[0]))
    left = jnp.broadcast_to((jnp.arange(keys.shape[3]) > positions[:, -1:])[:, None, None, :], keys.shape)
    np.testing.assert_array_equal(jnp.isnan(spoiled[1]), left)
    np.testing.assert_array_equal(jnp.isnan(spoiled[2]), left.swapaxes(2, 3))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_non_finite_value_reaches_only_tokens_that_see_it(broken):
    """A non-finite value affects only its group, from its token on, in this pass and the next, until overwritten."""
    clean = attention_arguments(*CASES["ratio 3"])
    qkv, tables, keys, _, positions, sizes = clean
    heads, groups, size = sizes
    (row, token, group), column = (1, 2, 1), (heads + groups + 1) * size + 70
    spoiled = qkv.at[row, token, column].set(broken), *clean[1:]
    before, after = KERNEL(*clean), KERNEL(*spoiled)
    found = _by_head(after[0], size)
    hit = np.zeros(found.shape[:3], bool)
    hit[row, token:, group * 3 : (group + 1) * 3] = True
    assert np.isnan(found[hit]).all()
    np.testing.assert_array_equal(found[~hit], _by_head(before[0], size)[~hit])
    at = int(positions[row, token])
    assert np.argwhere(np.isnan(np.asarray(after[1], np.float32))).tolist() == [[row, group, 70, at]]
    assert np.argwhere(_bits(after[2]) != _bits(before[2])).tolist() == [[row, group, at, 70]]
    assert after[2][row, group, at, 70] == 0

    for start, seen in ((positions[:, -1:] + 1, True), (positions[:, :1], False)):
        ahead = jnp.where(positions >= keys.shape[3] - 5, positions, start + jnp.arange(5))
        again = _by_head(KERNEL(qkv, tables, *after[1:], ahead, sizes)[0], size)
        hit[row] = False
        hit[row, :, group * 3 : (group + 1) * 3] = seen
        np.testing.assert_array_equal(np.isnan(again).all(-1), hit)
        assert np.isfinite(again[~hit]).all()


def test_tokens_that_do_not_fit_are_dropped():
    arguments = attention_arguments(3, 5, 6, 2, 128, 200, [0, 196, 210])
    mixed, keys, values = KERNEL(*arguments)
    _, expected_keys, expected_values = XLA(*arguments)
    np.testing.assert_array_equal(_bits(keys), _bits(expected_keys))
    np.testing.assert_array_equal(_bits(values), _bits(expected_values))
    np.testing.assert_array_equal(_bits(keys[1:]), _bits(arguments[2][1:]))
    assert jnp.isfinite(mixed).all()


def test_passes_in_loop_carry_one_cache():
    """Three passes of two tokens under `lax.while_loop` carry one cache and match XLA's version."""
    qkv, tables, keys, values, positions, sizes = attention_arguments(3, 2, 4, 1, 64, 64, [0, 5, 40])

    def run(form):
        def step(carry):
            i, mixed, keys, values = carry
            return i + 1, *form(qkv - 0.5 * mixed.mean(), tables, keys, values, positions + 2 * i, sizes)

        begin = 0, jnp.zeros((3, 2, 256), jnp.bfloat16), keys, values
        return jax.lax.while_loop(lambda carry: carry[0] < 3, step, begin)[1:]

    found = jax.jit(run, static_argnums=0)(functools.partial(decode_attention, interpret=True))
    expected = jax.jit(run, static_argnums=0)(_attend_projected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), atol=0.03)


@pytest.mark.parametrize("slots", [40, 2048])
def test_kernel_lowers_with_64_bit_types(slots):
    with jax.enable_x64(True):
        qkv, tables, keys, values, positions = _shapes()
        cache = [leaf.update(shape=tuple(slots if n == 40 else n for n in leaf.shape)) for leaf in (keys, values)]
        arguments = [qkv, tables, *cache, positions]
        assert _has_kernel(_choose, arguments)
        half = [*arguments[:4], arguments[4].update(dtype=jnp.int64)]
        assert _has_kernel(_choose, half)


def test_disable_jit_works_with_kernel_choice():
    qkv, *others, sizes = attention_arguments(*CASES["one token"])
    with jax.disable_jit():
        found = choice.attention(_attend_projected, qkv, *others, sizes)
    np.testing.assert_allclose(np.float32(found[0]), np.float32(XLA(qkv, *others, sizes)[0]), atol=0.03)


@pytest.mark.parametrize("name", ["one token", "eight shares"])
def test_padding_row_changes_nothing(name):
    qkv, *others, sizes = attention_arguments(*CASES[name])
    more = jnp.concatenate([qkv, jnp.full_like(qkv[:, :1], 3)], axis=1)
    for form in (KERNEL, XLA):
        expected, found = form(qkv, *others, sizes), form(more, *others, sizes)
        assert found[0].shape[1] == qkv.shape[1] + 1
        for one, other in zip((found[0][:, :-1], *found[1:]), expected, strict=True):
            np.testing.assert_array_equal(_bits(one), _bits(other))


@pytest.mark.parametrize("name", NORM)
def test_norm_kernel_matches_xla(name, report):
    x, mixed, weight, gamma = norm_arguments(*NORM[name])
    stream, normed = project_add_norm(x, mixed, weight, gamma, eps=1e-5, interpret=True)
    added = jnp.asarray(np.asarray(mixed, np.float64) @ np.asarray(weight, np.float64), jnp.bfloat16)
    _, of_xla = _project_add_norm(x, mixed, weight, gamma, 1e-5)
    np.testing.assert_allclose(np.float64(stream), np.float64(x + added), rtol=2**-7, atol=2**-6)  # other sum order
    exact = exact_norm(stream, gamma, 1e-5)
    errors = [np.abs(np.float64(form) - exact).max() for form in (normed, of_xla)]
    report(max_error=f"{errors[0]:.1e}", of_xla=f"{errors[1]:.1e}")
    np.testing.assert_allclose(np.float64(normed), exact, rtol=2**-6)  # it is rounded twice


def test_norm_kernel_is_used_only_where_supported():
    def has_kernel(rows=2, platform="cuda", **dtypes):
        shapes = {"x": (rows, 1, 64), "inner": (rows, 1, 96), "weight": (96, 64), "gamma": (64,)}
        arguments = [jax.ShapeDtypeStruct(shape, dtypes.get(name, jnp.bfloat16)) for name, shape in shapes.items()]
        return _has_kernel(lambda *each: choice.project_add_norm(_project_add_norm, *each, 1e-5), arguments, platform)

    assert has_kernel() and has_kernel(rows=64)
    assert not has_kernel(rows=65) and not has_kernel(weight=jnp.float32) and not has_kernel(x=jnp.float16)
    assert not any(has_kernel(platform=platform) for platform in ("cpu", "tpu", "rocm"))


def _choose(*arguments):
    return choice.attention(_attend_projected, *arguments, (6, 2, 64))


def _shapes(batch=2, steps=3, heads=6, size=64, dtype=jnp.bfloat16):
    """Return the arguments of `_choose` as shapes."""
    table = jax.ShapeDtypeStruct((batch, 1, steps, size // 2), jnp.float32)
    shapes = (batch, steps, (heads + 4) * size), (batch, 2, size, 40), (batch, 2, 40, size)
    qkv, keys, values = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return qkv, (table, table), keys, values, jax.ShapeDtypeStruct((batch, steps), jnp.int32)


def _lowered(program, arguments, platform="cuda"):
    return lowering.lowered(jax.jit(lambda *arguments: program(*arguments)).trace(*arguments), platform)


def _has_kernel(program, arguments, platform="cuda"):
    return "xla.gpu.triton" in _lowered(program, arguments, platform)


def test_attention_kernel_is_used_only_where_supported():
    def shaped(heads=6, size=64, **shape):
        def program(*arguments):
            return choice.attention(_attend_projected, *arguments, (heads, 2, size))

        return _has_kernel(program, _shapes(heads=heads, size=size, **shape))

    assert shaped() and shaped(steps=16) and shaped(size=128) and shaped(steps=8, heads=16)
    assert not shaped(steps=17) and not shaped(size=32) and not shaped(steps=9, heads=16)
    assert not shaped(dtype=jnp.float16) and not shaped(dtype=jnp.float32)
    assert not any(_has_kernel(_choose, _shapes(), platform) for platform in ("cpu", "tpu", "rocm"))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_attention_kernel_supports_head_norms_in_its_own_dtype(dtype):
    def program(*arguments):
        *others, gamma = arguments
        return choice.attention(_attend_normed, *others, AttentionForm(6, 2, 64, 1e-6), (gamma, gamma))

    assert _has_kernel(program, [*_shapes(), jax.ShapeDtypeStruct((64,), dtype)]) == (dtype == jnp.bfloat16)


def test_several_devices_use_kernel_only_under_shard_map():
    """Under `shard_map`, a cache that starts the same on every device is written differently on each."""
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))  # as the program sees it; see `on_any_mesh`
    rows = NamedSharding(mesh, P("data"))
    divided = [jax.tree.map(lambda leaf: leaf.update(sharding=rows), part) for part in _shapes()]
    assert not _has_kernel(_choose, divided)

    def alone(qkv, tables, positions):
        keys, values = jnp.zeros((1, 2, 64, 40), jnp.bfloat16), jnp.zeros((1, 2, 40, 64), jnp.bfloat16)
        results = _choose(qkv, tables, keys, values, positions)
        assert all(jax.typeof(result).manual_axis_type.varying == {"data"} for result in results)
        return results

    mapped = jax.shard_map(alone, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert _has_kernel(mapped, (divided[0], divided[1], divided[4]))


def test_gpu_without_triton_uses_xla(monkeypatch):
    def has_kernel(*capabilities):
        found = [SimpleNamespace(compute_capability=capability) for capability in capabilities]
        monkeypatch.setattr(jax, "local_devices", lambda backend: found)
        return _has_kernel(_choose, _shapes())

    assert has_kernel("8.0") and not has_kernel("7.5") and not has_kernel("8.6", "7.5")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert weights.default_dtype() == jnp.float16  # for the last two devices
    has_kernel("9.0")
    assert weights.default_dtype() == jnp.bfloat16


def test_environment_variable_disables_kernels(monkeypatch):
    monkeypatch.setenv("JSPEC_KERNELS", "0")
    assert not _has_kernel(_choose, _shapes())
    monkeypatch.setenv("JSPEC_KERNELS", "1")
    assert _has_kernel(_choose, _shapes())


def test_jax_without_triton_compiles_without_kernels(monkeypatch):
    monkeypatch.setattr(choice, "_TRITON", "jax.experimental.pallas.was_removed")
    assert not _has_kernel(_choose, _shapes())


def test_cpu_program_is_unaffected_by_kernel():
    def without(*arguments):
        return _attend_projected(*arguments, (6, 2, 64))

    def text(program):
        return re.sub(
            r"@(\w+?)(_\d+)?\b", r"@\1", _lowered(program, _shapes(), "cpu").replace(program.__name__, "program")
        )

    assert text(_choose) == text(without)


def test_pallas_is_imported_lazily():
    code = "import sys, jspec; jspec.Llama, jspec.generate; print('jax.experimental.pallas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False"], done.stderr


def test_transformations_use_xla():
    """XLA's version is used without `jax.jit`, under `jax.grad`, and under `jax.vmap`."""
    qkv, *others, sizes = attention_arguments(*CASES["one token"])

    def chosen(qkv):
        return choice.attention(_attend_projected, qkv, *others, sizes)

    def plain(qkv):
        return XLA(qkv, *others, sizes)

    def slope(form):
        return jax.jit(jax.grad(lambda qkv: form(qkv)[0].astype(jnp.float32).sum()))

    two = jnp.stack([qkv, -qkv])
    pairs = [
        (chosen(qkv), plain(qkv)),
        (slope(chosen)(qkv), slope(plain)(qkv)),
        (jax.jit(jax.vmap(chosen))(two), jax.jit(jax.vmap(plain))(two)),
    ]
    for found, expected in pairs:
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(_bits(one), _bits(other))
    assert not _has_kernel(jax.vmap(chosen), [two]) and not _has_kernel(slope(chosen), [qkv])
