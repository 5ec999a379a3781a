"""Metrics about the replicas."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jspec.cluster.serve.replicated_engine import ReplicatedEngine

_QUANTILES = 0.5, 0.9, 0.99


class ReplicaMetrics(Collector):
    """The metrics that only a server with replicas has."""

    def __init__(self, engine: ReplicatedEngine, model: str, prefix: str):
        self._engine, self._model, self._prefix = engine, model, prefix

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        running = self._gauge("replica_requests_running", "Number of running requests on each replica.", "replica")
        for replica, count in Counter(active.replica for active in self._engine.running_requests).items():
            running.add_metric([self._model, replica or "none"], count)
        yield running
        moved = CounterMetricFamily(
            f"{self._prefix}moved_requests",
            "Number of times that a request was moved to another replica, by reason.",
            labels=["model_name", "reason"],
        )
        for reason in ("lost", "unresponsive", "failed"):
            moved.add_metric([self._model, reason], self._engine.moved[reason])
        yield moved
        pauses = self._gauge(
            "moved_request_pause_seconds",
            "Seconds between the last token before a move and the next token, over recent moves.",
            "quantile",
        )
        if recent := [*self._engine.pauses]:
            for quantile in _QUANTILES:
                pauses.add_metric([self._model, str(quantile)], float(np.quantile(recent, quantile)))
        yield pauses

    def _gauge(self, name: str, text: str, label: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(self._prefix + name, text, labels=["model_name", label])
