"""Errors of both kernels against float64, beside those of XLA's form of the same.

A kernel is right if its error is hardly larger than that of XLA's form. In the dtypes that have no kernel XLA's form is
held to what the dtype can do, which also shows products in float32 that are silently done in TF32.
"""

import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu import kernels
from bench.gpu.record import Record
from jspec.attention import _attend_projected
from jspec.kernels import HEAD_SIZES
from jspec.kernels.attention import decode_attention
from jspec.kernels.norm import project_add_norm
from jspec.layers import _project_add_norm

_THREADS = 8  # that compile
_EPS = 1e-5
_AS_XLA = 1.5  # times its error a kernel may have
# The error that a dtype may have, relative to the result.
_ROUNDING = {"bfloat16": 2**-7, "float16": 2**-9, "float32": 1e-5}
# As in `kernels.ATTENTION`: each size of a head with each number of tokens, contexts, and batches of Llama-3.2-3B.
_LARGE = {f"size {size}, {tokens} tokens": (1, tokens, 24, 8, size, 600, [511])
          for size, tokens in itertools.product(HEAD_SIZES, (1, 2, 3, 5, 9, 16))} | {
    f"size {size}, {tokens} tokens, context {context}": (1, tokens, 32, 8, size, context + 40, [context])
    for size, tokens, context in itertools.product(HEAD_SIZES, (1, 5), (1000, 4096, 16384))} | {
    f"batch {batch}, {tokens} tokens": (batch, tokens, 24, 8, 128, 512, list(range(0, 15 * batch, 15)))
    for batch, tokens in itertools.product((8, 32), (1, 3))}  # fmt: skip
_LARGE_NORMS = {f"{inner} to {size}, batch {batch}": (batch, 1, inner, size)
                for inner, size in ((8192, 2048), (3072, 3072), (8192, 3072), (12288, 4096))
                for batch in (1, 5, 8, 64)}  # fmt: skip


def attention(record: Record, rehearse: bool) -> None:
    """Add a row for each case in bfloat16, and a few in the other dtypes; slots that no query sees are spoiled."""
    few = dict(list(kernels.ATTENTION.items())[: 1 if rehearse else 3])
    cases = [(name, case, jnp.bfloat16) for name, case in (few if rehearse else kernels.ATTENTION | _LARGE).items()]
    cases += [(name, case, dtype) for name, case in few.items() for dtype in (jnp.float16, jnp.float32)]
    programs = {}
    for name, case, dtype in cases:
        qkv, tables, keys, values, positions, sizes = kernels.attention_arguments(*case, dtype=dtype)
        arrays = qkv, tables, *kernels.spoil(keys, values, positions), positions
        forms = {"XLA": functools.partial(_attend_projected, sizes=sizes)}
        if dtype == jnp.bfloat16:
            forms["kernel"] = functools.partial(decode_attention, sizes=sizes, interpret=_interpreted())
        programs[f"attention, {name}, {np.dtype(dtype).name}"] = forms, arrays, functools.partial(_attended, sizes)
    _add_rows(record, programs)


def norm(record: Record, rehearse: bool) -> None:
    """Add a row for each case: of the sum, and of the norm of the sum as the same form has rounded it."""
    programs = {}
    for name, case in (kernels.NORM if rehearse else kernels.NORM | _LARGE_NORMS).items():
        forms = {"XLA": functools.partial(_project_add_norm, eps=_EPS),
                 "kernel": functools.partial(project_add_norm, eps=_EPS, interpret=_interpreted())}  # fmt: skip
        programs[f"norm, {name}"] = forms, kernels.norm_arguments(*case), _normed
    _add_rows(record, programs)


def _interpreted() -> bool:
    return jax.default_backend() != "gpu"


def _add_rows(record: Record, programs: Mapping[str, tuple[Mapping[str, Callable], Sequence[Any], Callable]]) -> None:
    """Compile all programs side by side, and add what the third member of each says of the results of its forms."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        compiled = {
            name: {form: pool.submit(jax.jit(program).lower(*arrays).compile) for form, program in forms.items()}
            for name, (forms, arrays, _) in programs.items()
        }
        for name, (_, arrays, judge) in programs.items():
            with record.attempt(name):
                results = {form: future.result()(*arrays) for form, future in compiled[name].items()}
                record.add(name, **judge(arrays, results))


def _attended(sizes: tuple[int, int, int], arrays: Sequence[Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Return errors of the attention, and how the kernel's cache differs from that of XLA's form."""
    qkv, tables, _, _, positions = arrays
    keys, values = (np.asarray(part) for part in results["XLA"][1:])
    truth = kernels.exact_attention(qkv, tables, keys, values, positions, sizes)
    row = _errors({form: result[0] for form, result in results.items()}, dict.fromkeys(results, truth))
    if "kernel" not in results:
        return row
    new_keys, new_values = (np.asarray(part) for part in results["kernel"][1:])
    keys, new_keys = keys.astype(np.float32), new_keys.astype(np.float32)
    same = np.array_equal(new_values.view(np.uint16), values.view(np.uint16))  # they are copied
    near = np.allclose(new_keys, keys, rtol=2**-7, atol=1e-6, equal_nan=True)  # they are rotated, and rounded
    differing = int(np.sum((new_keys != keys) & ~(np.isnan(new_keys) & np.isnan(keys))))
    return row | {"ok": row["ok"] and same and near, "same_values": same, "keys_differing": differing}


def _normed(arrays: Sequence[Any], results: Mapping[str, Any]) -> dict[str, Any]:
    x, inner, weight, gamma = arrays
    summed = _errors({form: result[0] for form, result in results.items()},
                     dict.fromkeys(results, kernels.exact_sum(x, inner, weight)))  # fmt: skip
    row = _errors({form: result[1] for form, result in results.items()},
                  {form: kernels.exact_norm(result[0], gamma, _EPS) for form, result in results.items()})  # fmt: skip
    return row | {f"sum_{name}": error for name, error in summed.items()} | {"ok": row["ok"] and summed["ok"]}


def _errors(results: Mapping[str, Any], truths: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return ``|result - truth| / |truth|`` of each form, and whether they are as small as they should be."""
    errors = {}
    for form, result in results.items():
        error, truth = np.asarray(result, np.float64) - truths[form], truths[form]
        errors[form] = float(np.linalg.norm(error) / np.linalg.norm(truth))
    right = errors["XLA"] <= _ROUNDING[results["XLA"].dtype.name]
    if "kernel" in errors:
        right = right and errors["kernel"] <= _AS_XLA * errors["XLA"]
    return {"ok": bool(right), **errors}
