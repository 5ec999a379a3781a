"""Decoding without the kernels in `jspec.models.kernels`, to show their gain and to get results even if they fail.

The step runs with ``JSPEC_KERNELS=0``. Its rows have the same names as those of the step `decoding`.
"""

from bench.gpu.bandwidth import read_bandwidth
from bench.gpu.decoding import PLAIN
from bench.gpu.programs import add_rows, compile_together, plain, speculative, timed
from bench.gpu.record import Record
from bench.gpu.sizes import sizes
from bench.gpu.weights import random_model


def run(record: Record, rehearse: bool) -> None:
    """Measure plain decoding and K = 2."""
    size = sizes(rehearse)
    bandwidth = read_bandwidth(record)
    target, draft = random_model(size.target, size.dtype, 0), random_model(size.draft, size.dtype, 1)
    programs = compile_together(record, [plain(PLAIN, target, size)])
    if not rehearse:  # the rest is the same code
        programs |= compile_together(record, [speculative("3B, 1B drafts K=2", target, draft, 2, size)])
    add_rows(record, programs, timed(record, programs, size.lengths, size.repeats), PLAIN, bandwidth)
