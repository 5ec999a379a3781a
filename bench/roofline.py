"""The share of the memory's read bandwidth that decoding uses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench import pairs, plots
from bench.passes import Pass, pass_seconds
from bench.report import publish
from bench.timing import in_turns, spread
from jspec.models.quantized_matrix import QuantizedMatrix

PROBE_BYTES = {"cpu": 2**28, "gpu": 2**32, "tpu": 2**31}


def probes(size: int | None = None) -> tuple[int, dict[str, Callable[[], Any]]]:
    """Return a number of bytes, and calls that only read that many: a sum, and a vector-matrix product.

    Args:
        size: the number of bytes, at least 16 KiB. None chooses enough to exceed the caches of the current device.
    """
    size = size or PROBE_BYTES[jax.default_backend()]
    matrix = jax.random.normal(jax.random.key(0), (size // 4 // 4096, 4096), jnp.float32)
    vector = jnp.ones(matrix.shape[0], jnp.float32)
    add, product = jax.jit(jnp.sum), jax.jit(lambda v, m: v @ m)
    return matrix.nbytes, {"read: sum": lambda: add(matrix), "read: product": lambda: product(vector, matrix)}


def run(pair: str, batch: int, ks: list[int], context: int, repeats: int) -> None:
    """Measure the probes and the passes of both models in turns, and publish the table.

    Raises:
        ValueError: a model has quantised weights that are not packed, and the device is a CPU.
    """
    target, draft = pairs.pair(pair)
    parts = [part for model in (target, draft) for part in model.embed_tokens.parts or ()]
    if jax.default_backend() == "cpu" and any(isinstance(part, QuantizedMatrix) for part in parts):
        raise ValueError(
            f"roofline of {pair!r} on CPU would count quantised bytes, but XLA widens them to float32 before the loop, "
            "so that every pass reads at least four times as many; omit ':int8' or ':int4'."
        )
    size, calls = probes()
    passes = {
        "target, 1 row": Pass(target, 1, batch, context),
        "draft, 1 row": Pass(draft, 1, batch, context),
        "draft, 2 rows": Pass(draft, 2, batch, context),
    }
    passes |= {f"target, {k + 1} rows": Pass(target, k + 1, batch, context) for k in ks}
    times = in_turns(calls | passes, repeats)
    bandwidth = max(size / spread(times[name]).median for name in calls)
    rows = [_row(name, size, spread(times[name]).median, bandwidth) for name in calls]
    taken = pass_seconds(passes, times)
    rows += [_row(name, passes[name].bytes, taken[name], bandwidth) for name in passes]
    publish(
        f"roofline-{pair}-b{batch}-{jax.default_backend()}",
        f"{pair}: passes measured alone, batch {batch}, {context} tokens of context, {target.dtype}",
        rows,
        plots.bars("what", "% of read bandwidth"),
        notes=[
            f"Medians of {repeats} readings in turns. Bytes: weights and the whole cache, once per pass.",
            f"draft / target, 1 row: {taken['draft, 1 row'] / taken['target, 1 row']:.3f}.",
        ],
    )


def _row(name: str, size: int, taken: float, bandwidth: float) -> dict[str, Any]:
    return {
        "what": name,
        "MB": size / 1e6,
        "ms": taken * 1e3,
        "GB/s": size / taken / 1e9,
        "% of read bandwidth": 100 * size / taken / bandwidth,
    }
