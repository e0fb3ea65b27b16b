"""Prometheus metrics. What the text side sees is counted here; the engine's own counters are read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.errors import PacelineError
from paceline.types import EngineHandle, EngineStats

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """All metrics of one server, in a registry of their own. ``live_handle`` gives the engine, or None if there is none."""

    def __init__(self, live_handle: Callable[[], EngineHandle | None]) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "paceline_http_requests", "HTTP requests answered", ["endpoint", "status"], registry=self.registry
        )
        self.generations = Counter(
            "paceline_generations", "Choices ended", ["endpoint", "finish_reason"], registry=self.registry
        )
        self.time_to_first_token = Histogram(
            "paceline_time_to_first_token_seconds",
            "From the arrival of a request to its first token, queue and prefill included",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.inter_token_latency = Histogram(
            "paceline_inter_token_latency_seconds",
            "Time between tokens; the time between two bursts is shared among the tokens of the second",
            buckets=_ITL_BUCKETS,
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            "paceline_queue_seconds",
            "From the arrival of a request in the engine to its first lane, or to its end if it got none",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(live_handle))

    def scrape(self) -> bytes:
        """Everything in Prometheus' text format. Asks the engine, so it must not run on the event loop."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, live_handle: Callable[[], EngineHandle | None]) -> None:
        self._live_handle = live_handle

    def collect(self) -> Iterator[Metric]:
        handle = self._live_handle()
        stats = None
        if handle is not None:
            try:
                stats = handle.stats()
            except PacelineError:
                stats = None  # it died between the two calls
        yield GaugeMetricFamily("paceline_engine_up", "1 while the engine serves", value=float(stats is not None))
        if stats is not None:
            yield from _engine_metrics(stats)


def _engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    gauges = (
        ("queue_depth", "Requests that wait for a lane", stats.queued),
        ("parked", "Of these, requests that had a lane before and go on later", stats.parked),
        ("lanes", "Requests that have a lane", stats.lanes),
        ("kv_pages_free", "K/V pages that no lane owns", stats.pages_free),
        ("kv_pages_total", "K/V pages", stats.pages_total),
        ("acceptance_length", "Tokens emitted per lane per verify round since start", stats.acceptance_length),
        ("mean_drafts", "Drafts verified per lane per verify round since start", stats.mean_drafts),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(f"paceline_{name}", text, value=value)
    counters = (
        ("prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens),
        ("generated_tokens", "Tokens generated", stats.generated_tokens),
        ("rounds", "Rounds run", stats.rounds),
        ("verify_spans", "Verify spans: lanes times verify rounds", stats.verify_spans),
        ("emitted_in_verify", "Tokens emitted by verify spans", stats.emitted_in_verify),
        ("restored_tokens", "Generated tokens put into state again after their lane was parked", stats.restored_tokens),
        ("itl_out_of_reach_rounds", "Rounds that read a prompt although the bound did not allow it", stats.itl_out_of_reach),
    )
    for name, text, value in counters:
        yield CounterMetricFamily(f"paceline_{name}", text, value=value)
    labelled = (
        ("decode_rounds", "Rounds with decode rows, by how they were planned", "kind", stats.decode_rounds),
        ("engine_requests_finished", "Requests that left the engine", "finish_reason", stats.requests_finished),
        ("parkings", "Lanes taken away, for want of pages or for a higher priority", "cause", stats.parkings),
    )
    for name, text, label, by_label in labelled:
        family = CounterMetricFamily(f"paceline_{name}", text, labels=[label])
        for key, number in by_label.items():
            family.add_metric([key], number)
        yield family
    by_position = (
        ("drafted_tokens", "Tokens drafted, by draft position from 0", stats.drafted),
        ("accepted_tokens", "Drafted tokens accepted, by draft position from 0", stats.accepted),
    )
    for name, text, counts in by_position:
        family = CounterMetricFamily(f"paceline_{name}", text, labels=["position"])
        for position, count in enumerate(counts):
            family.add_metric([str(position)], count)
        yield family
