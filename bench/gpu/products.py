"""Products with int8 matrices as XLA compiles them, and as candidates for a kernel (`bench.gpu.int8_kernels`).

A reading runs a chain of products with several matrices, which together exceed the device's cache. Between two
products, a kernel makes the next product wait. The time of a chain without products is subtracted.
"""

import concurrent.futures
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bench.gpu import int8_kernels as kernels
from bench.gpu.record import Record
from bench.timing import in_turns, spread

_THREADS = 12
_LOOPS = 10
_ERROR = 5e-3  # the error of a bfloat16 product relative to float64
# Name -> rows, contracted size, result size, and matrices. The first ones are those of Llama-3.2-1B's draft steps.
_CASES = {
    "1B gate and up, 2 rows": (2, 2048, 16384, 6),
    "1B output, 2 rows": (2, 2048, 2048, 32),
    "1B down, 2 rows": (2, 8192, 2048, 12),
    "3B gate and up, 5 rows": (5, 3072, 16384, 4),
}
_TINY = {"tiny, 2 rows": (2, 2048, 256, 2)}
_NOTHING, _BFLOAT16 = "no product", "XLA, bfloat16"


def run(record: Record, rehearse: bool) -> None:
    """Measure every candidate with every case."""
    for name, case in (_TINY if rehearse else _CASES).items():
        with record.attempt(name):
            _measure(record, name, *case, few=rehearse)


def candidates(rows: int, inner: int, size: int) -> dict[str, tuple[Callable, bool]]:
    """Return name -> (product, whether its weight is stored as ``[out, in]``)."""
    found: dict[str, tuple[Callable, bool]] = {
        "XLA": (kernels.by_xla, False),
        "XLA, [out, in]": (kernels.by_xla_transposed, True),
    }
    for parts in (1, 2) if size > 4096 else (4, 8) if inner <= 4096 else (8, 16):
        for tile, stages in (((64, 64), 4), ((128, 64), 4), ((64, 128), 4), ((128, 32), 5)):
            options = {"tile": tile, "stages": stages, "parts": parts}
            found[f"tensor cores, {_text(options)}"] = functools.partial(kernels.by_tensor_cores, **options), False
        for tile, stages in (((128, 64), 4), ((256, 64), 3), ((128, 128), 4), ((128, 32), 4)):
            options = {"tile": tile, "stages": stages, "parts": parts}
            product = functools.partial(kernels.by_tensor_cores_transposed, **options)
            found[f"tensor cores, [out, in], {_text(options)}"] = product, True
        for tile, unroll in (((8, 256), 4), ((16, 128), 4), ((16, 256), 4), ((32, 64), 8)) if rows <= 3 else ():
            options = {"tile": tile, "unroll": unroll, "parts": parts}
            found[f"scalar units, {_text(options)}"] = functools.partial(kernels.by_scalar_units, **options), False
    return found


def _text(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _measure(record: Record, case: str, rows: int, inner: int, size: int, count: int, few: bool) -> None:
    """Compile all candidates in parallel, compare their results with float64, time them in turns, and add rows."""
    weights = [_bytes(key, (inner, size)) for key in jax.random.split(jax.random.key(0), count)]
    transposed = [jnp.copy(weight.T) for weight in weights]
    wide = [weight.astype(jnp.bfloat16) for weight in weights]
    x = jax.random.normal(jax.random.key(1), (rows, inner), jnp.bfloat16)
    forms = candidates(rows, inner, size)
    forms = dict([*forms.items()][:: 9 if few else 1])
    arguments = {name: transposed if swapped else weights for name, (_, swapped) in forms.items()}
    arguments |= {_NOTHING: weights, _BFLOAT16: wide}
    products = {name: product for name, (product, _) in forms.items()}
    products[_BFLOAT16] = kernels.by_xla
    products[_NOTHING] = lambda x, _: jnp.broadcast_to(x[:, :1], (rows, size)).astype(jnp.float32)
    exact = np.asarray(x, np.float64) @ np.asarray(weights[0], np.float64)
    calls, errors = _checked(record, case, products, x, arguments, exact)
    times = in_turns(calls, 2 if few else 5)
    base = spread(times.pop(_NOTHING)).median
    for name, taken in times.items():
        seconds = (spread(taken).median - base) / (_LOOPS * count)
        record.add(
            f"{case}: {name}",
            us=seconds * 1e6,
            gb_per_s=arguments[name][0].nbytes / seconds / 1e9,
            relative_error=errors[name],
        )


@functools.partial(jax.jit, static_argnums=1)
def _bytes(key: Array, shape: tuple[int, int]) -> Array:
    return lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), jnp.int8)


def _checked(
    record: Record,
    case: str,
    products: Mapping[str, Callable],
    x: Array,
    weights: Mapping[str, list[Array]],
    exact: np.ndarray,
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Return a call of every product's chain, and the product's error. Record products that fail or are wrong."""
    calls, errors = {}, {}
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        pending = []
        for name, product in products.items():
            with record.attempt(f"{case}: {name}"):
                chain = jax.jit(functools.partial(_chain, product)).lower(x, weights[name])
                alone = jax.jit(product).lower(x, weights[name][0])
                pending.append((name, pool.submit(chain.compile), pool.submit(alone.compile)))
        for name, chain, alone in pending:
            with record.attempt(f"{case}: {name}"):
                found = np.asarray(alone.result()(x, weights[name][0]), np.float64)
                errors[name] = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
                if name != _NOTHING and not errors[name] < _ERROR:
                    raise ValueError(f"The result is off by {errors[name]:.2g}.")
                calls[name] = functools.partial(chain.result(), x, weights[name])
    return calls, errors


def _chain(product: Callable, x: Array, weights: list[Array]) -> Array:
    """Multiply with each of `weights` in turn, `_LOOPS` times, and change a number of x by every result."""

    def turn(_: Array, x: Array) -> Array:
        for weight in weights:
            x = x.at[0, 0].add((1e-30 * product(x, weight)[0, 0]).astype(x.dtype))
        return x

    return lax.fori_loop(0, _LOOPS, turn, x)
