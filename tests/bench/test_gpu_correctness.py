"""The drill detects wrong kernels and wrong distributions: every planted bug gives a row that is not ok."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bench.gpu import kernel_errors, kernels, law, texts
from bench.gpu.record import Record
from bench.pairs import random_llama
from jspec.models.kernels.add_norm import project_add_norm
from jspec.models.kernels.decode_attention import decode_attention
from jspec.models.quantized_matrix import QuantizedMatrix


def _late(qkv, tables, keys, values, positions, **options):
    """Planted bug: the new tokens are one slot late."""
    return decode_attention(qkv, tables, keys, values, positions + 1, **options)


def _turned_back(qkv, tables, keys, values, positions, **options):
    """Planted bug: queries and keys are rotated the other way."""
    return decode_attention(qkv, (tables[0], -tables[1]), keys, values, positions, **options)


def _unwritten(qkv, tables, keys, values, positions, **options):
    """Planted bug: the cache is not written."""
    return decode_attention(qkv, tables, keys, values, positions, **options)[0], keys, values


def _coarse(*arguments, **options):
    """Planted bug: the result has two fewer digits."""
    mixed, *caches = decode_attention(*arguments, **options)
    return (mixed.astype(jnp.float8_e4m3fn).astype(mixed.dtype), *caches)


def _unweighted(x, inner, weight, gamma, **options):
    return project_add_norm(x, inner, weight, jnp.ones_like(gamma), **options)


def _without_residual(x, inner, weight, gamma, **options):
    return project_add_norm(jnp.zeros_like(x), inner, weight, gamma, **options)


@pytest.mark.parametrize("wrong", [_late, _turned_back, _unwritten, _coarse, _unweighted, _without_residual, None])
def test_wrong_kernel_is_detected(wrong, monkeypatch, tmp_path, quick_compile):
    """Every planted bug is detected; None stands for the kernel as it is, which is ok."""
    record, norms = Record(tmp_path / "step.json"), wrong in (_unweighted, _without_residual)
    monkeypatch.setattr(kernels, "ATTENTION", {"several tokens": (2, 3, 4, 2, 64, 40, [7, 0])})
    monkeypatch.setattr(kernels, "NORM", {"several rows": kernels.NORM["several rows"]})
    if wrong:
        monkeypatch.setattr(kernel_errors, "project_add_norm" if norms else "decode_attention", wrong)
    kernel_errors.small(record, True)
    found = {row["what"]: row["ok"] for row in record.rows}
    assert len(found) == 7
    expected = [name for name in found if name.startswith("norm" if norms else "attention, several tokens, bfloat16")]
    assert [name for name, ok in found.items() if not ok] == (expected if wrong else [])


def test_product_with_shifted_codes_is_detected(monkeypatch, tmp_path, quick_compile):
    def wrong(matrix, x):
        return multiply(QuantizedMatrix(jnp.roll(matrix.codes[...], 1, axis=2), matrix.scales[...]), x)

    multiply = QuantizedMatrix.multiply
    monkeypatch.setattr(QuantizedMatrix, "multiply", wrong)
    record = Record(tmp_path / "step.json")
    for case in kernel_errors._PRODUCTS.items():
        kernel_errors._add_rows(record, [kernel_errors._product(*case, jnp.bfloat16)])
    assert len(record.rows) == 8 and not any(row["ok"] for row in record.rows)


def test_products_in_tf32_are_not_ok(monkeypatch, tmp_path, quick_compile):
    """Products that use ten bits of each operand, as a GPU does by default, are detected."""

    def rough(qkv, *arguments, **options):
        bits = np.uint32(0xFFFFE000)
        return attend(
            (qkv.view(jnp.uint32) & bits).view(jnp.float32) if qkv.dtype == jnp.float32 else qkv, *arguments, **options
        )

    attend = kernel_errors._attend_projected
    monkeypatch.setattr(kernel_errors, "_attend_projected", rough)
    monkeypatch.setattr(kernels, "ATTENTION", {"one token": kernels.ATTENTION["one token"]})
    record = Record(tmp_path / "step.json")
    monkeypatch.setattr(kernels, "NORM", {})
    monkeypatch.setattr(kernel_errors, "_PRODUCTS", {})
    kernel_errors.small(record, True)
    assert [row["ok"] for row in record.rows] == [True, True, False, True]


@pytest.mark.slow
def test_wrong_distribution_is_detected(quick_compile):
    """A model's counts fit its own distribution but not that of its draft model."""
    target, draft = (random_llama(law._SHAPE, jnp.float32, seed) for seed in (0, 1))
    counts, rate = law._counts(target, draft, 4096, 4096, "rejection", 2)
    assert counts.sum() == 4096 and 0.1 < rate < 0.9
    exact = law.exact(target)
    assert exact.sum() == pytest.approx(1, abs=1e-6)
    same, other = (stats.chi2.sf(*law.chi_square(counts, one)) for one in (exact, law.exact(draft)))
    assert same > law._ALPHA > other
    statistic, freedom = law.chi_square(counts, law.exact(draft))
    assert (statistic - freedom) / counts.sum() > 10 * law._ROUNDED


def test_texts_may_differ_only_at_ties(tmp_path, monkeypatch):
    record, request = Record(tmp_path / "step.json"), (np.zeros((2, 1), np.int32), np.ones(2, np.int32), None)
    ours, theirs = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[1, 2, 3], [4, 0, 6]])
    for lead in (1e-6, 0.1):
        monkeypatch.setattr(texts, "_lead", lambda *_, lead=lead: lead)
        texts._compare(record, "texts", ours, theirs, object(), request)
    texts._compare(record, "texts", ours, theirs)
    texts._compare(record, "texts", ours, ours)
    assert [row["ok"] for row in record.rows] == [True, False, False, True]
    assert record.rows[0]["first"] == {1: 1} and record.rows[0]["differing"] == 1
