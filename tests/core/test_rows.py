"""Reads and writes at a position per row: equal on every platform, and on TPUs without a loop over rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.layout import Format

import jspec
from jspec.core import row_ops as rows
from jspec.core.row_ops import slice_rows, tally, write_rows
from jspec.models.array_layout import BY_TOKEN
from jspec.models.kv_cache import write

START = np.array([0, 5, 3, 9], np.int32)
ROWS = np.arange(4 * 12, dtype=np.int32).reshape(4, 12)
NEW = -np.arange(1, 13, dtype=np.int32).reshape(4, 3)
CACHE = np.random.default_rng(0).normal(size=(4, 2, 8, 12)).astype(np.float32)
PIECE = np.random.default_rng(1).normal(size=(4, 2, 8, 3)).astype(np.float32)


@pytest.fixture(params=["here", "on a TPU", "many rows on a TPU"])
def platform(request, monkeypatch):
    """Select the platform's program; the one for TPUs is plain JAX, which runs anywhere."""
    if request.param != "here":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arguments, tpu, default: tpu(*arguments))
    if request.param.startswith("many"):
        monkeypatch.setattr(rows, "_UNROLLED", 3)


def test_rows_are_sliced(platform):
    expected = [row[at : at + 3] for row, at in zip(ROWS, START, strict=True)]
    np.testing.assert_array_equal(slice_rows(jnp.asarray(ROWS), jnp.asarray(START), 3), expected)


def test_rows_are_written(platform):
    expected = ROWS.copy()
    for row, new, at in zip(expected, NEW, START, strict=True):
        row[at : at + 3] = new
    np.testing.assert_array_equal(write_rows(jnp.asarray(ROWS), jnp.asarray(NEW), jnp.asarray(START)), expected)


@pytest.mark.parametrize("axis", [2, 3])
def test_slots_are_written(platform, axis):
    cache, piece = (np.swapaxes(array, 3, axis) for array in (CACHE, PIECE))
    expected = cache.copy()
    for row, new, at in zip(expected, piece, START, strict=True):
        row[(slice(None),) * (axis - 1) + (slice(at, at + 3),)] = new
    written = write(jnp.asarray(cache), jnp.asarray(piece), jnp.asarray(START), axis)
    np.testing.assert_array_equal(written, expected)


def test_tokens_are_counted(platform):
    tokens, more = np.array([[1, 3, 1], [0, -1, 2], [2, 2, 2], [3, 0, 0]]), np.array([[1, 1, 1], [1, 0, 2]] * 2)
    counts = np.arange(16, dtype=np.int32).reshape(4, 4)
    expected = counts.copy()
    for row, at, added in zip(expected, tokens, more, strict=True):
        np.add.at(row, at, added)
    np.testing.assert_array_equal(tally(jnp.asarray(counts), jnp.asarray(tokens), jnp.asarray(more)), expected)


def test_writing_whole_cache_replaces_it():
    np.testing.assert_array_equal(write(jnp.zeros(PIECE.shape), jnp.asarray(PIECE), jnp.zeros(4, int), 3), PIECE)


@pytest.mark.parametrize(("platform_name", "scatters"), [("tpu", 0), ("cuda", 3), ("cpu", 3)])
def test_only_tpu_programs_update_row_by_row(platform_name, scatters):
    def program(texts, new, cache, piece, start):
        return write_rows(texts, new, start), slice_rows(texts, start, 3), write(cache, piece, start, 3)

    arguments = ROWS, NEW, CACHE, PIECE, START
    module = export.export(jax.jit(program), platforms=[platform_name])(*arguments).mlir_module()
    assert len(re.findall(r"stablehlo\.(?:scatter|gather)\"?\(", module)) == scatters
    assert len(re.findall(r"stablehlo\.dynamic_update_slice", module)) == (0 if scatters else 8)


def test_embedding_layout_is_preserved(toy, prompts, quick_compile):
    """The embedding keeps the layout that `jspec.load` gives it on a TPU."""
    model, batch = toy(0), prompts([4, 1, 6])
    expected = jspec.generate(model, *batch, max_new_tokens=8)
    embedding = model.embed_tokens.weight
    embedding.set_value(jax.device_put(embedding[...], Format(BY_TOKEN, embedding[...].sharding)))
    assert embedding[...].format.layout.major_to_minor == (1, 0)
    program = jax.jit(lambda model, *batch: jspec.generate(model, *batch, max_new_tokens=8)).lower(model, *batch)
    assert "f32[32,61]{0,1}" in program.compile().as_text().splitlines()[0]  # the input is not copied first
    np.testing.assert_array_equal(jspec.generate(model, *batch, max_new_tokens=8).tokens, expected.tokens)
