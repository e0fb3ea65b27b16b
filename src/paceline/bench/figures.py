"""The figures of a cell, from its raw stream log, the server's counters around it, and the trace of its rounds.

Everything is a function of the cell's document, so that whoever has the document can count again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

DEFINITIONS = {
    "requests": "Requests sent in the cell, without those that warm up.",
    "successes": "Answers with status 200, a whole stream, a known finish reason and the token counts that were due.",
    "failures": "Answers that were not, by what went wrong. A cell with failures has no figures.",
    "failures_beside": "The same of requests that warm up or, if none of these failed, of the long prompts.",
    "tokens": "Output tokens of all answers, as the server's usage counts them.",
    "wall_seconds": "From the start of the first request to the end of the last answer.",
    "goodput": "tokens / wall_seconds: prompts and gaps included.",
    "window_seconds": "From the first event with output of the whole cell to the last.",
    "window_throughput": "tokens / window_seconds.",
    "ttft_ms": "From sending a request to its first event with output, at the client: queue and prompt included.",
    "itl_ms": "Between two successive events with output of one answer: a round, whatever number of tokens it yields.",
    "p50, p90, p99": "Percentiles by nearest rank: the smallest value that at least so many percent do not exceed.",
    "acceptance_length": "Tokens emitted per lane and verify round, by the server's counters; where there are none, by the "
    "accepted drafts that it reports: (tokens - requests) / (tokens - requests - accepted). 1 without drafting.",
    "acceptance_by_position": "Share of the drafts verified at each position (the first is 1) that were accepted.",
    "acceptance_by_lanes": "Tokens kept per lane and verify round, by the number of lanes that decoded in the round.",
    "rounds": "Rounds that the engine ran in the cell.",
    "time_share": "Of wall_seconds: the engine's time in draft, verify, prefill and commit, by its trace; host is the rest.",
    "peak_rss_bytes": "The largest memory of each process of the server, added up; pages that they share count in each.",
    "others_cpu": "Cores that processes outside the benchmark (and a hypervisor) kept busy, on average over the cell: what "
    "disturbed it.",
    "gpu_memory_mib": "Memory in use on each GPU at the end of the cell, by nvidia-smi.",
    "long_ttft_ms": "Time to first token of the long prompts that arrived beside the measured requests.",
    "speed_up": "window_throughput or goodput divided by that of the same server without speculation, at the same C, "
    "workload and repeat of the same run; then the median over repeats.",
    "identical": "Requests whose answer has the same hash as in the reference. For Paceline the reference is the first cell "
    "of the same fingerprint, and all must be identical; for another server it is its own cell at C = 1.",
    "spread": "The least and the greatest over the repeats of a cell.",
}
"""What every name in a document means."""

_COUNTERS = ("rounds", "verify_spans", "emitted_in_verify")


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least ``percent`` of them do not exceed; None of none."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)] if values else None


def outcome(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many answers succeeded, and what befell the others."""
    failures = Counter(str(request["failure"]) for request in requests if "failure" in request)
    return {
        "requests": len(requests),
        "successes": len(requests) - failures.total(),
        "failures": dict(sorted(failures.items())),
    }


def figures(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a cell all of whose requests succeeded."""
    requests = cell["requests"]
    arrivals = [request["arrivals"] for request in requests]
    tokens = sum(request["tokens"] for request in requests)
    wall = max(request["end"] for request in requests) - min(request["start"] for request in requests)
    window = max(times[-1] for times in arrivals) - min(times[0] for times in arrivals)
    ttft = [1e3 * (request["arrivals"][0] - request["start"]) for request in requests]
    gaps = [1e3 * (later - earlier) for times in arrivals for earlier, later in pairwise(times)]
    return {
        "tokens": tokens,
        "wall_seconds": wall,
        "goodput": tokens / wall,
        "window_seconds": window,
        # a cell of one event has no window
        "window_throughput": tokens / window if window else None,
        "ttft_ms": {"p50": percentile(ttft, 50), "p90": percentile(ttft, 90), "max": max(ttft)},
        "itl_ms": {"p50": percentile(gaps, 50), "p99": percentile(gaps, 99)},
        **_acceptance(cell, tokens),
        **_by_trace(cell.get("trace"), wall),
        **_long(cell.get("long") or []),
    }


def _acceptance(cell: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    requests, counters = cell["requests"], cell.get("counters") or {}
    rounds, spans, emitted = (counters.get(f"paceline_{name}_total", 0.0) for name in _COUNTERS)
    if spans:
        positions = _by_position(counters)
        return {"acceptance_length": emitted / spans, "acceptance_by_position": positions, "rounds": round(rounds)}
    accepted = sum(request.get("accepted", 0) for request in requests)
    later = tokens - len(requests)
    reported = any("accepted" in request for request in requests)
    known = later > accepted and (reported or not cell["speculation"])
    return {"acceptance_length": later / (later - accepted) if known else None, "rounds": None}


def _by_position(counters: Mapping[str, float]) -> list[float]:
    """Up to the first position at which nothing was drafted."""
    shares: list[float] = []
    while drafted := counters.get(f'paceline_drafted_tokens_total{{position="{len(shares)}"}}'):
        shares.append(counters[f'paceline_accepted_tokens_total{{position="{len(shares)}"}}'] / drafted)
    return shares


def _by_trace(trace: Mapping[str, Any] | None, wall: float) -> dict[str, Any]:
    if trace is None or not trace["rounds"]:
        return {}
    shares = {stage: 1e-6 * microseconds / wall for stage, microseconds in sorted(trace["us"].items())}
    by_lanes = {lanes: sums["kept"] / (int(lanes) * sums["rounds"]) for lanes, sums in trace["by_lanes"].items()}
    return {"time_share": shares | {"host": 1.0 - sum(shares.values())}, "acceptance_by_lanes": by_lanes}


def _long(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not requests:
        return {}
    ttft = [1e3 * (request["arrivals"][0] - request["start"]) for request in requests]
    return {"long_ttft_ms": {"p50": percentile(ttft, 50), "max": max(ttft)}}
