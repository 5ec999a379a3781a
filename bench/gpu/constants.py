"""Time whole rounds of plain decoding with other constants in the kernels, to replace the assumed ones."""

import concurrent.futures
from typing import Any
from unittest import mock

import jax

from bench.abstract import trace
from bench.gpu.programs import Program, plain, timed
from bench.gpu.record import Record
from bench.gpu.sizes import sizes
from bench.gpu.weights import random_model
from bench.timing import ratio, spread
from jspec.models.kernels import add_norm, decode_attention

_THREADS = 14
_SHIPPED = "as shipped"
# Name -> the kernel's module and its changed constants.
_CHANGES: dict[str, tuple[Any, dict[str, int]]] = {
    _SHIPPED: (add_norm, {"_WARPS": add_norm._WARPS}),
    "attention, 8 warps": (decode_attention, {"_WARPS": 8}),
    "attention, 2 warps": (decode_attention, {"_WARPS": 2}),
    "attention, 2 stages": (decode_attention, {"_STAGES": 2}),
    "attention, shares of 512": (decode_attention, {"_SHARE": 512}),
    "attention, shares of 256": (decode_attention, {"_SHARE": 256}),
    "attention, shares of 64": (decode_attention, {"_SHARE": 64}),
    "attention, shares of 64 in blocks of 4096": (decode_attention, {"_SHARE": 64, "_BLOCK": 4096}),
    "attention, blocks of 16384": (decode_attention, {"_BLOCK": 16384, "_STAGES": 2, "_WARPS": 8}),
    "attention, blocks of 4096": (decode_attention, {"_BLOCK": 4096}),
    "norm, 16 warps": (add_norm, {"_WARPS": 16}),
    "norm, 8 warps": (add_norm, {"_WARPS": 8}),
    "norm, 192 tiles": (add_norm, {"_TILES": 192}),
    "norm, 96 tiles": (add_norm, {"_TILES": 96}),
}


def run(record: Record, rehearse: bool) -> None:
    """Compile all programs in parallel, time them in turns, and add a row for each, the fastest first."""
    size = sizes(rehearse)
    target = random_model(size.target, size.dtype, 0)
    chosen = [*_CHANGES][:: 5 if rehearse else 1]
    programs, pending = {}, []
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for name in chosen:
            module, changes = _CHANGES[name]
            case = plain(name, target, size)
            with record.attempt(name), mock.patch.multiple(module, **changes):
                jax.clear_caches()  # the cache keys do not contain the constants
                pending.append((case, pool.submit(trace(target, None, case.setting).lower().compile)))
        for case, future in pending:
            with record.attempt(case.name):
                programs[case.name] = Program(case, future.result(), 0.0)
    lengths = size.lengths[0], size.lengths[0] + 64
    timings = timed(record, programs, size.lengths if rehearse else lengths, 3)
    for name, timing in sorted(timings.items(), key=lambda pair: spread(pair[1].seconds).median):
        taken, over = spread(timing.seconds), ratio(timing.seconds, timings[_SHIPPED].seconds)
        record.add(
            name, ms=taken.median * 1e3, ms_low=taken.low * 1e3, ms_high=taken.high * 1e3, over_shipped=over.median
        )
