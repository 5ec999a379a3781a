"""The compilation of native kernels, and what happens without a compiler."""

import functools
import logging
import re

import jax
import numpy as np
import pytest

from jspec.models.kernels.cpu import native
from jspec.models.kernels.cpu.product import ProductKernel
from support.packed_matrices import matrix, needs_compiler

pytestmark = pytest.mark.usefixtures("quick_compile")
KERNEL = ProductKernel("Q4_0", 24)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Store compiled libraries in this test's own folder, and start without registered kernels."""
    for name in ("_register", "_warn_once"):
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
        ("false", "could not compile product.cc \\(exit status 1\\)"),
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
