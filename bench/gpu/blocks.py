"""Decoding with a block drafter of DSpark's shapes, with random weights and a fixed acceptance rate."""

import jax.numpy as jnp

from bench import abstract
from bench.gpu.bandwidth import read_bandwidth
from bench.gpu.programs import add_rows, compile_together, plain, shares, speculative, timed
from bench.gpu.record import Record
from bench.gpu.sizes import sizes
from bench.gpu.weights import filled, random_model
from bench.pairs import dspark, weight_bytes
from bench.timing import spread
from jspec.planning.block_costs import BlockWeights

_PLAIN = "8B plain"
_ACCEPTANCE = 0.925  # 6.2 tokens per round, as published for DSpark on GSM8K


def run(record: Record, rehearse: bool) -> None:
    """Time rounds and plain decoding of the target, alternately, and record the rounds' share of the bandwidth."""
    size = sizes(rehearse)
    bandwidth = read_bandwidth(record)
    target, config = random_model(size.large, size.dtype, 2), dspark(size.large)
    drafter, k = filled(abstract.block_drafter(config, size.dtype), 3), config.num_draft_tokens
    name = f"8B, a block drafts K={k}"
    cases = [plain(_PLAIN, target, size), speculative(name, target, drafter, k, size, acceptance=_ACCEPTANCE)]
    programs = compile_together(record, cases)
    timings = timed(record, programs, size.lengths, size.repeats)
    add_rows(record, programs, timings, _PLAIN, bandwidth)
    if name in timings:
        read = weight_bytes(target) + BlockWeights(config, jnp.dtype(size.dtype).itemsize).bytes_read(k)
        seconds = spread(timings[name].seconds).median
        record.add(f"{name}: bandwidth", mb=read / 1e6, rounds_per_s=1 / seconds, **shares(read, seconds, bandwidth))
