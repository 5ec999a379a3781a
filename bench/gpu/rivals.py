"""transformers on the same shapes and device, in turns with jspec: plain with a static cache, compiled, and assisted.

The transformers models have the same configurations, and random weights generated on the device, because speed does not
depend on the weights. Acceptance does depend on them and cannot be set in transformers. Both libraries are therefore
compared by the cost of a round, with the same K. The target's passes are counted, and tokens per second are computed
from one acceptance rate. jspec samples at temperature 1 with a fixed acceptance rate. transformers decodes greedily, at
a lower cost.
"""

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bench import rivals
from bench.gpu.programs import Case, Timing, compile_together, plain, speculative, timed
from bench.gpu.record import Record
from bench.gpu.sizes import ACCEPTANCE, Sizes, sizes
from bench.gpu.weights import random_model
from bench.timing import ratio, spread
from convert.config import LlamaConfig
from jspec import theory

_K = 2  # the fastest K for a 1B draft and a 3B target, in both libraries
_COMPILE_SECONDS = 120.0  # torch.compile may take a minute or two; without it, the uncompiled results remain
_OURS, _OURS_DRAFTED = "jspec 3B plain", f"jspec 3B, 1B drafts K={_K}"
_UNCOMPILED, _COMPILED = "transformers 3B plain, static cache", "transformers 3B plain, static cache, compiled"
_ASSISTED = f"transformers 3B, 1B assists K={_K}"


class Generator:
    """A transformers model that decodes one prompt greedily.

    Args:
        model: the target.
        width: the number of tokens in the prompt.
        options: options for ``generate``.
    """

    def __init__(self, model: Any, width: int, **options: Any):
        prompt = np.random.default_rng(0).integers(1, model.config.vocab_size, width)
        self._model, self._options = model, options
        self._tokens, self._mask = rivals.padded([prompt], model.device)

    def __call__(self, limit: int) -> tuple[()]:
        """Decode `limit` tokens, and wait for them."""
        import torch

        with torch.no_grad():
            text = self._model.generate(
                self._tokens, attention_mask=self._mask, do_sample=False, max_new_tokens=limit, **self._options
            )
        if text.shape[1] != self._tokens.shape[1] + limit:
            raise ValueError(f"transformers wrote {text.shape[1] - self._tokens.shape[1]} tokens instead of {limit}.")
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()
        return ()

    def rounds(self, limit: int) -> int:
        """Decode, and count the target's passes."""
        if "assistant_model" not in self._options:  # a hook would break the compiled graph
            self(limit)
            return limit
        passes = 0

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        hook = self._model.register_forward_pre_hook(count)
        try:
            self(limit)
        finally:
            hook.remove()
        return passes


def run(record: Record, rehearse: bool) -> None:
    """Measure the uncompiled models first, because torch.compile may use up the remaining time."""
    size = sizes(rehearse)
    target, assistant = (_random(config, size) for config in (size.target, size.draft))
    cases = _ours(size)
    programs = compile_together(record, cases)
    assistant.generation_config.num_assistant_tokens = _K
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    static = {"cache_implementation": "static"}
    others = {
        _UNCOMPILED: Generator(target, size.width, disable_compile=True, **static),
        _ASSISTED: Generator(target, size.width, assistant_model=assistant),
    }
    _add_rows(record, timed(record, programs | others, size.few, size.few_repeats))
    with record.attempt(_COMPILED):
        _compiled(record, size, Generator(target, size.width, **static), {_OURS: programs[_OURS]})


def _compiled(record: Record, size: Sizes, generator: Generator, ours: Mapping[str, Any]) -> None:
    """Time the torch-compiled model. The result is valid only if torch compiled nothing during the timing."""
    import torch._dynamo.utils

    torch._dynamo.config.fail_on_recompile_limit_hit = True  # raise an error instead of silently running uncompiled
    counts = torch._dynamo.utils.counters["stats"]
    begin = time.monotonic()
    with _within(_COMPILE_SECONDS):
        generator(size.lengths[1])  # the longer length first, because it fixes the cache size
        generator(size.lengths[0])
    graphs = counts["unique_graphs"]
    record.add("torch.compile", seconds=time.monotonic() - begin, graphs=graphs)
    _add_rows(record, timed(record, {**ours, _COMPILED: generator}, size.lengths, size.repeats))
    record.add(
        "torch.compile: graphs while timed",
        ok=counts["unique_graphs"] == graphs,
        graphs=counts["unique_graphs"] - graphs,
    )


def _ours(size: Sizes) -> list[Case]:
    target, draft = random_model(size.target, size.dtype, 0), random_model(size.draft, size.dtype, 1)
    return [plain(_OURS, target, size), speculative(_OURS_DRAFTED, target, draft, _K, size)]


def _random(config: LlamaConfig, size: Sizes) -> Any:
    """Return a transformers model with random weights, created on the device where it decodes."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            rivals.hf_config(config), dtype=getattr(torch, np.dtype(size.dtype).name)
        )
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.eval()


def _add_rows(record: Record, timings: Mapping[str, Timing]) -> None:
    """Add a row with each decoder's cost and, for transformers, jspec's speed-up in the same turns."""
    for name, timing in timings.items():
        round_, drafted = spread(timing.seconds), name in (_ASSISTED, _OURS_DRAFTED)
        tokens = float(theory.expected_tokens(ACCEPTANCE, _K)) if drafted else 1.0
        row: dict[str, Any] = {
            "ms": round_.median * 1e3,
            "ms_low": round_.low * 1e3,
            "ms_high": round_.high * 1e3,
            "rounds": timing.rounds,
            "tokens_a_round": tokens,
            "tokens_a_round_seen": timing.tokens_a_round,
            "tokens_per_s": tokens / round_.median,
        }
        ours = _OURS_DRAFTED if drafted else _OURS
        if name != ours and ours in timings:
            gain = ratio(timing.seconds, timings[ours].seconds)
            row |= {"by": ours, "jspec_x": gain.median, "jspec_x_low": gain.low, "jspec_x_high": gain.high}
        record.add(name, **row)


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block once `seconds` have passed. Use it in the main thread only."""

    def expire(*_: Any) -> None:
        raise TimeoutError(f"torch.compile took more than {seconds:g} s; the uncompiled results stand.")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
