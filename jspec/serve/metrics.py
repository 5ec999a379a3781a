"""The metrics that /metrics returns. After the prefix, their names are the same as in vLLM.

Each choice counts as one request. The tokens of each prompt count only once.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.registry import Collector

from jspec.serve.choice import Choice
from jspec.serve.parse_request import Served
from jspec.serve.usage import DraftUsage

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_GAUGES = {
    "num_requests_running": "Requests with a slot.",
    "num_requests_waiting": "Requests without a slot.",
    "kv_cache_usage_perc": "Share of the slots' capacity that tokens occupy, from 0 to 1.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens.",
    "prefix_cache_hits": "Prompt tokens that were not prefilled, because a slot held them.",
    "prompt_tokens": "Prompt tokens.",
    "generation_tokens": "Generated tokens.",
    "spec_decode_num_drafts": "Rounds with a draft.",
    "spec_decode_num_draft_tokens": "Draft tokens.",
    "spec_decode_num_accepted_tokens": "Accepted draft tokens.",
}
_TIMES = {
    "time_to_first_token_seconds": "Time from the request's arrival to its first token.",
    "inter_token_latency_seconds": "Time between two tokens of a request, averaged over tokens that arrive together.",
    "e2e_request_latency_seconds": "Time from the request's arrival to its last token.",
    "request_queue_time_seconds": "Time from the request's arrival to its slot assignment.",
    "request_prefill_time_seconds": "Time from the slot assignment to the first token.",
    "request_decode_time_seconds": "Time from the first token to the last.",
}
_SIZES = {"request_prompt_tokens": "Tokens per prompt.", "request_generation_tokens": "Generated tokens per request."}
_Metric = TypeVar("_Metric", Gauge, Counter, Histogram)


class Metrics:
    """The metrics of one server."""

    def __init__(self, served: Served, prefix: str = "jspec_"):
        disable_created_metrics()
        self.prefix, self._registry, self._served = prefix, CollectorRegistry(), served
        made: dict[str, Any] = {name: self._made(Gauge, name, text) for name, text in _GAUGES.items()}
        made |= {name: self._made(Counter, name, text) for name, text in _COUNTERS.items()}
        made |= {name: self._made(Histogram, name, text, buckets=_SECONDS) for name, text in _TIMES.items()}
        made |= {name: self._made(Histogram, name, text, buckets=_TOKENS) for name, text in _SIZES.items()}
        self._of = made
        self._ended = self._labelled("request_success", "Requests by finish reason.", "finished_reason")
        self._at = self._labelled(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in the draft; for a tree, by depth.",
            "position",
        )
        for position in range(served.num_draft_tokens):
            self._at.labels(served.name, str(position))
        self._describe()

    def _made(self, kind: Callable[..., _Metric], name: str, text: str, **options: Sequence[float]) -> _Metric:
        metric = kind(self.prefix + name, text, ["model_name"], registry=self._registry, **options)
        return metric.labels(self._served.name)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(self.prefix + name, text, ["model_name", label], registry=self._registry)

    def _describe(self) -> None:
        engine = self._served.engine
        sizes = engine.sizes
        labels = {
            "model_name": self._served.name,
            "slots": str(sizes.slots),
            "max_length": str(sizes.length),
            "num_draft_tokens": str(self._served.num_draft_tokens),
        }
        info = Gauge(self.prefix + "cache_config_info", "Sizes of the engine.", [*labels], registry=self._registry)
        info.labels(**labels).set(1)
        self._of["num_requests_running"].set_function(lambda: len(engine.running_requests))
        self._of["num_requests_waiting"].set_function(lambda: engine.num_waiting)
        room = sizes.slots * sizes.length
        self._of["kv_cache_usage_perc"].set_function(
            lambda: sum(len(active.text) for active in engine.running_requests) / room
        )

    def register(self, collector: Collector) -> None:
        """Add the metrics of `collector` to those that /metrics returns."""
        self._registry.register(collector)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def grown(self, choice: Choice, new: int, before: float) -> None:
        """Record `new` tokens of a choice. `before` is the time of its previous tokens, or 0 if there were none."""
        self._of["generation_tokens"].inc(new)
        if before:
            for _ in range(new):
                self._of["inter_token_latency_seconds"].observe((choice.last - before) / new)
        else:
            self._of["time_to_first_token_seconds"].observe(choice.first - choice.arrived)

    def finished(self, choices: Sequence[Choice], choices_per_prompt: int, usage: DraftUsage) -> None:
        """Record a request body whose choices have all ended."""
        for choice in choices:
            self._ended.labels(self._served.name, choice.finish_reason).inc()
            self._of["request_generation_tokens"].observe(choice.count)
            self._timed(choice)
            is_first = choice.index % choices_per_prompt == 0
            if is_first and choice.active_request and choice.active_request.assigned_at is not None:
                self._read(choice)
        self._drafted(usage)

    def _read(self, choice: Choice) -> None:
        count = len(choice.request.tokens)
        self._of["request_prompt_tokens"].observe(count)
        self._of["prompt_tokens"].inc(count)
        self._of["prefix_cache_queries"].inc(count)
        self._of["prefix_cache_hits"].inc(choice.cached)

    def _timed(self, choice: Choice) -> None:
        assigned_at = choice.active_request.assigned_at if choice.active_request is not None else None
        self._of["e2e_request_latency_seconds"].observe((choice.last or time.monotonic()) - choice.arrived)
        if assigned_at is not None:
            self._of["request_queue_time_seconds"].observe(max(0.0, assigned_at - choice.arrived))
        if assigned_at is not None and choice.first:
            self._of["request_prefill_time_seconds"].observe(choice.first - assigned_at)
            self._of["request_decode_time_seconds"].observe(choice.last - choice.first)

    def _drafted(self, usage: DraftUsage) -> None:
        self._of["spec_decode_num_drafts"].inc(usage.drafts)
        self._of["spec_decode_num_draft_tokens"].inc(usage.drafted)
        self._of["spec_decode_num_accepted_tokens"].inc(usage.accepted)
        for accepted, rounds in usage.by_accepted.items():
            for position in range(accepted):
                self._at.labels(self._served.name, str(position)).inc(rounds)
