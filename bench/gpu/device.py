"""Device costs that do not depend on a model: reads, copies, products, kernels, loops and round trips to the host.

Kernels and loop iterations are measured by differences. An iteration runs few or many empty kernels. The slope over the
number of kernels is the cost of one kernel, and the remainder is the cost of the iteration. `jspec.core.devices.LAUNCH`
is an assumption about this slope.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bench.gpu.bandwidth import rates
from bench.gpu.record import Record
from bench.timing import in_turns, seconds, spread
from jspec.core.devices import LAUNCH

_NEVER = 2**30  # more kernels than any CUDA graph has
# Compiler options that determine the CUDA graphs. By default, XLA captures an iteration, but not the loop.
_GRAPHS: dict[str, dict[str, Any]] = {
    "CUDA graphs": {},
    "no CUDA graphs": {"xla_gpu_graph_min_graph_size": _NEVER},
    "loop within a CUDA graph": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,WHILE",
        "xla_gpu_graph_min_graph_size": 1,
    },
}
_KERNELS = (8, 64)  # per iteration; XLA captures five or more


def run(record: Record, rehearse: bool) -> None:
    """Measure the bandwidth first, because other steps read it. Kernel loops come last, because they take longest."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    record.add(
        "device",
        kind=device.device_kind,
        platform=device.platform,
        count=jax.device_count(),
        capability=getattr(device, "compute_capability", None),
        memory_gb=stats.get("bytes_limit", 0) / 1e9,
        client=device.client.platform_version,
    )
    for name, measure in (
        ("read bandwidth", _read),
        ("copy bandwidth", _copy),
        ("products", _products),
        ("host", _host),
    ):
        with record.attempt(name):
            measure(record, rehearse)
    for name, options in _GRAPHS.items():
        with record.attempt(f"kernel: {name}"):
            _kernels(record, name, options, rehearse)


def _read(record: Record, rehearse: bool) -> None:
    """Read one large array in several ways. The fastest gives the bandwidth."""
    found = {name: rate / 1e9 for name, rate in (rates(3, 16) if rehearse else rates(15)).items()}
    record.add("read bandwidth", gb_per_s=max(found.values()), **found)


def _copy(record: Record, rehearse: bool) -> None:
    """Copy an array within the device, counting bytes read and bytes written."""
    array = jax.random.normal(jax.random.key(1), (2**20 if rehearse else 2**30,))
    taken = in_turns({"copy": lambda: jnp.copy(array)}, 3 if rehearse else 15)["copy"]
    record.add("copy bandwidth", gb_per_s=2 * array.nbytes / spread(taken).median / 1e9, megabytes=array.nbytes / 1e6)


def _products(record: Record, rehearse: bool) -> None:
    """Multiply square bfloat16 matrices of random numbers, one after another in a loop."""
    size, turns = (256, 3) if rehearse else (8192, 20)
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in (0, 1))
    b = b / size**0.5  # preserves the magnitude of the result, which is the next input

    @jax.jit
    def multiply(a: Array, b: Array, turns: Array) -> Array:
        return lax.fori_loop(0, turns, lambda _, a: a @ b, a)

    taken = _slope(lambda count: multiply(a, b, count), turns, 2 * turns, 3 if rehearse else 7)
    record.add("bfloat16 product", teraflops=2 * size**3 / taken / 1e12, size=size, ms=taken * 1e3)


def _kernels(record: Record, name: str, options: dict[str, Any], rehearse: bool) -> None:
    """Run empty kernels in two kinds of loop. The host knows the trip count, or reads the condition from the device."""
    turns, repeats = (20, 2) if rehearse else (200, 3)
    for loop in (_counted, _open_ended):
        few, many = (_turn(loop, kernels, options, turns, repeats) for kernels in _KERNELS)
        kernel = (many - few) / (_KERNELS[1] - _KERNELS[0])
        record.add(
            f"kernel, {loop.__name__.strip('_').replace('_', '-')} loop: {name}",
            kernel_us=kernel * 1e6,
            turn_us=(few - _KERNELS[0] * kernel) * 1e6,
            assumed_kernel_us=LAUNCH * 1e6,
        )


def _turn(loop: Callable, kernels: int, options: dict[str, Any], turns: int, repeats: int) -> float:
    """Return the seconds per iteration."""
    x = jnp.zeros(32)
    compiled = {n: _compile(functools.partial(loop, turns=n, kernels=kernels), x, options) for n in (turns, 2 * turns)}
    return _slope(lambda count: compiled[count](x), turns, 2 * turns, repeats)


def _compile(program: Callable, x: Array, options: dict[str, Any]) -> Callable:
    lowered = jax.jit(program).lower(x)
    return lowered.compile(options if jax.default_backend() == "gpu" else None)


def _counted(x: Array, turns: int, kernels: int) -> Array:
    """Run a loop with a known number of iterations."""
    return lax.fori_loop(0, turns, lambda _, x: _nothing(x, kernels), x)


def _open_ended(x: Array, turns: int, kernels: int) -> Array:
    """Run a loop that continues until the numbers on the device are large enough."""
    return lax.while_loop(lambda x: x[0] < turns * kernels, lambda x: _nothing(x, kernels), x)


def _nothing(x: Array, kernels: int) -> Array:
    """Add 1 in each of `kernels` kernels; barriers keep XLA from fusing them."""
    for _ in range(kernels):
        x = lax.optimization_barrier(x + 1)
    return x


def _host(record: Record, rehearse: bool) -> None:
    """Call a compiled program that does nothing, without waiting for it, waiting for it, and fetching its result."""
    calls, x = 10 if rehearse else 500, jnp.zeros(())
    step = jax.jit(lambda x: x + 1)
    fetched = spread([seconds(lambda: np.asarray(step(x))) for _ in range(calls)])
    waited = spread([seconds(lambda: step(x)) for _ in range(calls)])

    def enqueue(count: int) -> Array:
        y = x
        for _ in range(count):
            y = step(y)
        return y

    record.add(
        "host round trip",
        fetch_us=fetched.median * 1e6,
        wait_us=waited.median * 1e6,
        enqueue_us=_slope(enqueue, calls, 2 * calls, 3) * 1e6,
    )


def _slope(call: Callable[[int], Any], few: int, many: int, repeats: int) -> float:
    """Return the seconds per repetition, from the time of `many - few` additional repetitions."""
    times = in_turns({"few": lambda: call(few), "many": lambda: call(many)}, repeats)
    return spread(times["many"] - times["few"]).median / (many - few)
