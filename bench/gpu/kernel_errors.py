"""Errors of both kernels and of products with quantised weights, relative to float64.

A kernel is correct if its error is hardly larger than XLA's. For dtypes without a kernel, the XLA implementation must
reach the precision of the dtype. This also reveals float32 products that are silently computed in TF32.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu import kernels
from bench.gpu.record import Record
from jspec.models.attention import _attend_normed, _attend_projected
from jspec.models.kernels import HEAD_SIZES, AttentionForm
from jspec.models.kernels.add_norm import project_add_norm
from jspec.models.kernels.decode_attention import decode_attention
from jspec.models.layers import _project_add_norm
from jspec.models.quantized_matrix import QuantizedMatrix

_THREADS = 8  # compiler threads, one for each implementation of a few cases
_EPS = 1e-5
_AS_XLA = 1.5  # a kernel's maximum error, as a multiple of XLA's
# The maximum relative error for each dtype.
_ROUNDING = {"bfloat16": 2**-7, "float16": 2**-9, "float32": 1e-5}
# In the format of `kernels.ATTENTION`: each head size with each number of tokens, several contexts, and batches with
# the shape of Llama-3.2-3B.
_LARGE = (
    {
        f"size {size}, {tokens} tokens": (1, tokens, 24, 8, size, 600, [511])
        for size, tokens in itertools.product(HEAD_SIZES, (1, 2, 3, 5, 9, 16))
    }
    | {
        f"size {size}, {tokens} tokens, context {context}": (1, tokens, 32, 8, size, context + 40, [context])
        for size, tokens, context in itertools.product(HEAD_SIZES, (1, 5), (1000, 4096, 16384))
    }
    | {
        f"batch {batch}, {tokens} tokens": (batch, tokens, 24, 8, 128, 512, list(range(0, 15 * batch, 15)))
        for batch, tokens in itertools.product((8, 32), (1, 3))
    }
)
_LARGE_NORMS = {
    f"{inner} to {size}, batch {batch}": (batch, 1, inner, size)
    for inner, size in ((8192, 2048), (3072, 3072), (8192, 3072), (12288, 4096))
    for batch in (1, 5, 8, 64)
}

# Name -> rows, groups, inputs per group, outputs, and the type of the codes.
_PRODUCTS = {
    f"{kind}, {rows} rows": (rows, 16 if kind == "int4" else 1, 128 if kind == "int4" else 2048, 4096, kind)
    for kind, rows in itertools.product(("int8", "int4"), (1, 5, 8, 32))
}


def small(record: Record, rehearse: bool) -> None:
    """Add a row for each small kernel case, a few attention cases in the other dtypes, and quantised products."""
    few = dict(list(kernels.ATTENTION.items())[: 1 if rehearse else 3])
    cases = [(name, case, jnp.bfloat16) for name, case in (few if rehearse else kernels.ATTENTION).items()]
    cases += [(name, case, dtype) for name, case in few.items() for dtype in (jnp.float16, jnp.float32)]
    products = itertools.product([*_PRODUCTS.items()][: 1 if rehearse else None], (jnp.bfloat16, jnp.float16))
    checks = [_attention(*case) for case in cases] + [_norm(*case) for case in kernels.NORM.items()]
    checks += [_normed_block(*case) for case in few.items()]
    _add_rows(record, checks + [_product(*case, dtype) for case, dtype in products])


def large(record: Record, rehearse: bool) -> None:
    """Add a row for each realistic size. A rehearsal has no such cases."""
    if not rehearse:
        cases = [_attention(name, case, jnp.bfloat16) for name, case in _LARGE.items()]
        _add_rows(record, cases + [_norm(*case) for case in _LARGE_NORMS.items()])


@dataclasses.dataclass(frozen=True)
class _Case:
    """Implementations of a function, and its arguments. `judge` makes a row from the arguments and all results."""

    name: str
    forms: Mapping[str, Callable]
    arrays: Callable[[], Sequence[Any]]
    judge: Callable


def _attention(name: str, case: tuple, dtype: Any) -> _Case:
    """Return an attention case with spoiled slots that no query sees."""
    _, _, heads, groups, size, *_ = case
    sizes = heads, groups, size
    forms = {"XLA": functools.partial(_attend_projected, form=sizes)}
    if dtype == jnp.bfloat16:
        forms["kernel"] = functools.partial(decode_attention, form=sizes, interpret=_interpreted())

    def arrays() -> Sequence[Any]:
        qkv, tables, keys, values, positions, _ = kernels.attention_arguments(*case, dtype=dtype)
        return qkv, tables, *kernels.spoil(keys, values, positions), positions

    return _Case(f"attention, {name}, {np.dtype(dtype).name}", forms, arrays, functools.partial(_attended, sizes))


def _normed_block(name: str, case: tuple) -> _Case:
    """Return a case with normed queries and keys, whose new tokens all attend to each other."""
    _, _, heads, groups, size, *_ = case
    sizes, gammas = (heads, groups, size), np.random.default_rng(1).uniform(0.5, 2, (2, size))
    norms = jnp.asarray(gammas[0], jnp.bfloat16), jnp.asarray(gammas[1], jnp.bfloat16)
    form = AttentionForm(*sizes, _EPS, causal=False)

    def xla(*arrays: Any) -> Any:
        return _attend_normed(*arrays, *norms, form=form)

    def kernel(*arrays: Any) -> Any:
        return decode_attention(*arrays, form=form, norms=norms, interpret=_interpreted())

    def arrays() -> Sequence[Any]:
        qkv, tables, keys, values, positions, _ = kernels.attention_arguments(*case)
        return qkv, tables, *kernels.spoil(keys, values, positions), positions

    def judge(arrays: Sequence[Any], results: Mapping[str, Any]) -> dict[str, Any]:
        qkv, tables, keys, values, positions = arrays
        qkv = kernels.exact_head_norm(qkv, norms, sizes, _EPS)
        last = np.broadcast_to(positions[:, -1:], positions.shape)
        # A key is the difference of two rounded numbers, which XLA may leave unrounded.
        return _attended(sizes, (qkv, tables, keys, values, last), results, atol=2**-5)

    return _Case(f"attention, {name}, bfloat16, normed block", {"XLA": xla, "kernel": kernel}, arrays, judge)


def _norm(name: str, case: tuple) -> _Case:
    """Return a case with a block's sum, and the norm of that sum as rounded by the same implementation."""
    forms = {
        "XLA": functools.partial(_project_add_norm, eps=_EPS),
        "kernel": functools.partial(project_add_norm, eps=_EPS, interpret=_interpreted()),
    }
    return _Case(f"norm, {name}", forms, functools.partial(kernels.norm_arguments, *case), _normed)


def _product(name: str, case: tuple, dtype: Any) -> _Case:
    """Return a case for a product with a quantised matrix.

    Products of codes and activations are exact in float32, so only sums and scaling round.
    """
    rows, groups, size, outputs, kind = case

    def arrays() -> Sequence[Any]:
        keys = jax.random.split(jax.random.key(0), 3)
        low, high = (-127, 128) if kind == "int8" else (-8, 8)
        codes = jax.random.randint(keys[0], (groups, outputs, size), low, high, jnp.int8).astype(kind)
        scales = jax.random.uniform(keys[1], (groups, outputs), minval=0.001, maxval=0.002)
        return QuantizedMatrix(codes, scales), jax.random.normal(keys[2], (rows, groups * size), dtype)

    forms = {"XLA": QuantizedMatrix.multiply}
    return _Case(f"product, {name}, {np.dtype(dtype).name}", forms, arrays, _multiplied)


def _interpreted() -> bool:
    return jax.default_backend() != "gpu"


def _add_rows(record: Record, cases: Sequence[_Case]) -> None:
    """Add a row for each case. The programs of a few cases are compiled in parallel."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for begin in range(0, len(cases), _THREADS // 2):
            pending = []
            for case in cases[begin : begin + _THREADS // 2]:
                with record.attempt(case.name):
                    arrays = case.arrays()
                    lowered = {form: jax.jit(program).lower(*arrays) for form, program in case.forms.items()}
                    pending.append((case, arrays, {form: pool.submit(one.compile) for form, one in lowered.items()}))
            for case, arrays, compiled in pending:
                with record.attempt(case.name):
                    results = {form: future.result()(*arrays) for form, future in compiled.items()}
                    record.add(case.name, **case.judge(arrays, results))


def _attended(
    sizes: tuple[int, int, int], arrays: Sequence[Any], results: Mapping[str, Any], atol: float = 1e-6
) -> dict[str, Any]:
    """Return the attention errors, and how the kernel's cache differs from XLA's."""
    qkv, tables, _, _, positions = arrays
    keys, values = (np.asarray(part) for part in results["XLA"][1:])
    truth = kernels.exact_attention(qkv, tables, keys, values, positions, sizes)
    row = _errors({form: result[0] for form, result in results.items()}, dict.fromkeys(results, truth))
    if "kernel" not in results:
        return row
    new_keys, new_values = (np.asarray(part) for part in results["kernel"][1:])
    keys, new_keys = keys.astype(np.float32), new_keys.astype(np.float32)
    same = np.array_equal(new_values.view(np.uint16), values.view(np.uint16))  # values are copied
    near = np.allclose(new_keys, keys, rtol=2**-7, atol=atol, equal_nan=True)  # keys are rotated and rounded
    differing = int(np.sum((new_keys != keys) & ~(np.isnan(new_keys) & np.isnan(keys))))
    return row | {"ok": row["ok"] and same and near, "same_values": same, "keys_differing": differing}


def _normed(arrays: Sequence[Any], results: Mapping[str, Any]) -> dict[str, Any]:
    x, inner, weight, gamma = arrays
    summed = _errors(
        {form: result[0] for form, result in results.items()},
        dict.fromkeys(results, kernels.exact_sum(x, inner, weight)),
    )
    row = _errors(
        {form: result[1] for form, result in results.items()},
        {form: kernels.exact_norm(result[0], gamma, _EPS) for form, result in results.items()},
    )
    return row | {f"sum_{name}": error for name, error in summed.items()} | {"ok": row["ok"] and summed["ok"]}


def _multiplied(arrays: Sequence[Any], results: Mapping[str, Any]) -> dict[str, Any]:
    matrix, x = arrays
    codes, scales = (np.asarray(part[...], np.float32).astype(np.float64) for part in (matrix.codes, matrix.scales))
    weights = np.moveaxis(codes * scales[..., None], 0, 1).reshape(matrix.out_size, -1)
    return _errors(results, {"XLA": np.asarray(x, np.float64) @ weights.T})


def _errors(results: Mapping[str, Any], truths: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return ``|result - truth| / |truth|`` for each implementation, and whether the errors are within their limits."""
    errors = {}
    for form, result in results.items():
        error, truth = np.asarray(result, np.float64) - truths[form], truths[form]
        errors[form] = float(np.linalg.norm(error) / np.linalg.norm(truth))
    right = errors["XLA"] <= _ROUNDING[results["XLA"].dtype.name]
    if "kernel" in errors:
        right = right and errors["kernel"] <= _AS_XLA * errors["XLA"]
    return {"ok": bool(right), **errors}
