"""The drill's decoding programs: compiled in parallel, timed in turns, and reported with their predictions.

The seconds per round are the time difference of two calls of one program, divided by the difference of their rounds.
The limit on new tokens is an argument of the program. Both calls include the prefill, the dispatch and the copy of the
result, which cancel out.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np

import jspec
from bench import compiled
from bench.abstract import Setting, trace
from bench.gpu.record import Record
from bench.gpu.sizes import ACCEPTANCE, Sizes
from bench.pairs import weight_bytes
from bench.synthetic import Synthetic
from bench.timing import in_turns, ratio, spread
from jspec import theory
from jspec.core.devices import DEVICES, Device, find
from jspec.decoding.inputs import PromptBatch
from jspec.decoding.program import traced
from jspec.drafters.standalone.model import as_drafter

_WORKERS = 8  # compilations at a time
_NO_EOS = np.array([-1], np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A program to compile and time.

    Attributes:
        name: the name of its rows.
        target: the target model.
        draft: a model or a drafter; None for plain decoding.
        setting: the parameters that determine the program's shapes.
        tokens_a_round: the expected tokens per round of each row, at the acceptance rate that `setting` fixes.
    """

    name: str
    target: jspec.Llama
    draft: Any
    setting: Setting
    tokens_a_round: float = 1.0


def plain(name: str, target: jspec.Llama, sizes: Sizes, batch: int = 1) -> Case:
    """Return the case of plain decoding with `target`."""
    return Case(name, target, None, Setting(batch, sizes.width, sizes.new_tokens, 0))


def speculative(
    name: str, target: jspec.Llama, draft: Any, k: int, sizes: Sizes, batch: int = 1, acceptance: float = ACCEPTANCE
) -> Case:
    """Return the case of speculative decoding that accepts each of `k` draft tokens with probability `acceptance`."""
    setting = Setting(batch, sizes.width, sizes.new_tokens, k, Synthetic((acceptance,)))
    return Case(name, target, draft, setting, float(theory.expected_tokens(acceptance, k)))


class Program:
    """A `Case` compiled for this device.

    Attributes:
        case: the compiled case.
        executable: the executable from JAX.
        compile_or_load_seconds: how long compiling or loading took, in parallel with other compilations.
    """

    def __init__(self, case: Case, executable: Any, compile_or_load_seconds: float):
        self.case, self.executable, self.compile_or_load_seconds = case, executable, compile_or_load_seconds
        batch, width = case.setting.batch, case.setting.width
        tokens = np.random.default_rng(0).integers(1, case.target.config.vocab_size, (batch, width), np.int32)
        keys = jax.random.split(jax.random.key(0), batch)
        self._prompts = PromptBatch(tokens, np.full(batch, width, np.int32), keys)
        self._drafter = None if case.draft is None else as_drafter(case.draft)

    def __call__(self, limit: int) -> jspec.Output:
        """Decode `limit` new tokens in every row."""
        sampling = dataclasses.replace(self.case.setting.sampling, max_tokens=limit)
        return self.executable(self.case.target, self._drafter, self._prompts, traced(sampling, _NO_EOS, 0))[0]

    def rounds(self, limit: int) -> int:
        """Decode, and return the number of rounds until every row is done."""
        return int(np.max(jax.device_get(self(limit).stats.rounds)))

    @functools.cached_property
    def kernels(self) -> compiled.Program:
        """The kernels of the executable, read from its text."""
        return compiled.read(self.executable)


def compile_together(record: Record, cases: Sequence[Case]) -> dict[str, Program]:
    """Return name -> program, and record each failure.

    Tracing holds Python's GIL and compiling does not, so programs are traced in turn and compiled by several threads.
    """
    begin, programs = time.monotonic(), {}
    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        pending = []
        for case in cases:
            with record.attempt(case.name):
                lowered = trace(case.target, case.draft, case.setting).lower()
                pending.append((case, pool.submit(_compiled, lowered)))
        for case, future in pending:
            with record.attempt(case.name):
                programs[case.name] = Program(case, *future.result())
    record.add("compiled", programs=list(programs), seconds=time.monotonic() - begin)
    return programs


def _compiled(lowered: Any) -> tuple[Any, float]:
    begin = time.monotonic()
    return lowered.compile(), time.monotonic() - begin


class Decoder(Protocol):
    """A decoder to time: a `Program`, or a transformers model."""

    def __call__(self, limit: int) -> Any:
        """Decode `limit` new tokens in every row."""
        ...

    def rounds(self, limit: int) -> int:
        """Return the number of target passes that decoding takes. It is the same for every call."""
        ...


@dataclasses.dataclass(frozen=True)
class Timing:
    """One decoder's readings.

    Attributes:
        seconds: the seconds per round, ``float64[repeats]``.
        rounds: the number of rounds that a reading covers.
        tokens_a_round: the tokens per round of the row that took the most rounds. It differs from the expected value by
            chance.
    """

    seconds: np.ndarray
    rounds: int
    tokens_a_round: float


def timed(record: Record, decoders: Mapping[str, Decoder], lengths: tuple[int, int], repeats: int) -> dict[str, Timing]:
    """Return the readings of all decoders, called in turns. A decoder that fails in its first calls is left out.

    Args:
        lengths: the new tokens of the two calls, with the longer call second.
    """
    rounds: dict[str, tuple[int, int]] = {}
    calls: dict[Any, Callable[[], Any]] = {}
    for name, decoder in decoders.items():
        with record.attempt(name):
            last, first = decoder.rounds(lengths[1]), decoder.rounds(lengths[0])
            rounds[name] = first, last
            calls |= {(name, limit): functools.partial(decoder, limit) for limit in lengths}
    times: dict[Any, np.ndarray] = in_turns(calls, repeats, warmup=1)
    timings = {}
    for name, (first, last) in rounds.items():
        spans = times[name, lengths[1]] - times[name, lengths[0]]
        timings[name] = Timing(spans / (last - first), last - first, (lengths[1] - lengths[0]) / (last - first))
    return timings


def add_rows(
    record: Record,
    programs: Mapping[str, Program],
    timings: Mapping[str, Timing],
    reference: str,
    bandwidth: float,
    ahead: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Add a row for every program that has none: its speed, its speed-up over `reference`, and its prediction.

    Args:
        bandwidth: the measured read bandwidth of this device, in bytes per second.
        ahead: the milliseconds per round that were predicted before anything ran.
    """
    present = {row["what"] for row in record.rows}
    for name, timing in timings.items():
        if name in present:
            continue
        case, round_ = programs[name].case, spread(timing.seconds)
        row = {
            "batch": case.setting.batch,
            "k": case.setting.draft_length,
            "ms": round_.median * 1e3,
            "ms_low": round_.low * 1e3,
            "ms_high": round_.high * 1e3,
            "rounds": timing.rounds,
            "tokens_a_round": case.tokens_a_round,
            "tokens_a_round_seen": timing.tokens_a_round,
            "tokens_per_s": case.setting.batch * case.tokens_a_round / round_.median,
        }
        if reference in timings and name != reference:
            gain = ratio(timings[reference].seconds * case.tokens_a_round, timing.seconds)
            row |= {"over": reference, "x": gain.median, "x_low": gain.low, "x_high": gain.high}
        if case.draft is None:
            row |= shares(weight_bytes(case.target), round_.median, bandwidth)
        if name in ahead:
            row |= {"ahead_ms": ahead[name], "ahead_over_measured": ahead[name] / (1e3 * round_.median)}
        with record.attempt(f"prediction of {name}"):
            row |= prediction(programs[name].kernels, round_.median)
        record.add(name, **row, compile_or_load_seconds=programs[name].compile_or_load_seconds)


def shares(size: int, seconds: float, bandwidth: float) -> dict[str, float]:
    """Return the read rate of `size` bytes of weights, as shares of the measured and the published bandwidth."""
    rate = size / seconds
    return {
        "gb_per_s": rate / 1e9,
        "share_of_measured": rate / bandwidth,
        "share_of_published": rate / device_here().bandwidth,
    }


def prediction(kernels: compiled.Program, seconds: float) -> dict[str, Any]:
    """Return the `bench.compiled` prediction for a round that took `seconds`, and the inputs for `bench.gpu.fit`."""
    device = device_here()
    published = dataclasses.replace(device, launch=0.0, bandwidth_share=1.0)
    predicted = sum(kernel.seconds(device) for kernel in kernels.kernels)
    return {
        "predicted_ms": predicted * 1e3,
        "predicted_over_measured": predicted / seconds,
        "work_ms": sum(kernel.seconds(published) for kernel in kernels.kernels) * 1e3,
        "kernels": kernels.count(),
        "device": jax.devices()[0].device_kind,
        "predicted_for": device.title,
        "temporary_mb": kernels.temporary / 1e6,
    }


def device_here() -> Device:
    """Return the device to predict for: the current device, or an H100 if the current one is unknown."""
    try:
        return find()
    except ValueError:
        return DEVICES["h100"]
