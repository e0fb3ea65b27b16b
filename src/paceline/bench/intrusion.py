"""Does a long prompt disturb those who are being served? ``python -m paceline.bench.intrusion``.

Eight clients stream from a real server without a pause; every few seconds a 400 kB prompt arrives, which is tokenised and
refused because it exceeds the context. Reported: the gaps between the bursts of a stream (one burst per round), with and
without the intruder, in alternating phases of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from paceline.bench.artefact import load_workload, provenance, write
from paceline.bench.script import run
from paceline.bench.servers import Server, read_servers
from paceline.config import EngineOptions
from paceline.engine.build import build
from paceline.errors import ConfigError, EngineDead

CLIENTS = 8
PROMPT_BYTES = 400_000


async def _client(http: httpx.AsyncClient, index: int, stop: asyncio.Event, gaps: list[tuple[float, float]]) -> None:
    """Stream one answer after another; record (time, gap) between consecutive bursts of one answer."""
    messages = [entry["messages"] for entry in load_workload()]
    turn = 0
    while not stop.is_set():
        body = {
            "messages": messages[(index * 7 + turn) % len(messages)],
            "stream": True,
            "temperature": 0,
            "max_tokens": 128,
            "ignore_eos": True,
        }
        turn += 1
        last = None
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise EngineDead(f"status {response.status_code}: {(await response.aread()).decode(errors='replace')}")
            async for line in response.aiter_lines():
                if '"content"' not in line:
                    continue
                now = time.perf_counter()
                if last is not None:
                    gaps.append((now, now - last))
                last = now


async def _intrude(http: httpx.AsyncClient) -> int:
    words = " ".join(str(number * 7919 % 100_003) for number in range(PROMPT_BYTES // 6))[:PROMPT_BYTES]
    response = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": words}]})
    return response.status_code


def measure(url: str, phases: int, seconds: float) -> dict[str, Any]:
    """Gaps in ``phases`` phases of each kind. ``EngineDead`` where the server does not answer, or with an error."""
    try:
        return asyncio.run(_measure(url, phases, seconds))
    except ExceptionGroup as group:
        lost, others = group.split((httpx.HTTPError, EngineDead))
        if lost is None or others is not None:
            raise
        first = lost.exceptions[0]
        raise EngineDead(f"the server at {url} does not answer as it should: {type(first).__name__}: {first}") from None


async def _measure(url: str, phases: int, seconds: float) -> dict[str, Any]:
    gaps: list[tuple[float, float]] = []
    periods: list[tuple[bool, float, float]] = []
    stop = asyncio.Event()
    statuses: list[int] = []
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http, asyncio.TaskGroup() as clients:
        for index in range(CLIENTS):
            clients.create_task(_client(http, index, stop, gaps))
        await asyncio.sleep(5)
        for phase in range(2 * phases):
            start = time.perf_counter()
            if phase % 2:
                statuses.append(await _intrude(http))
            await asyncio.sleep(max(0.0, seconds - (time.perf_counter() - start)))
            periods.append((bool(phase % 2), start, time.perf_counter()))
            print(f"phase {phase + 1} of {2 * phases}", flush=True)
        stop.set()
    report: dict[str, Any] = {"intruder_statuses": statuses}
    for name, intruded in (("quiet", False), ("intruded", True)):
        sample = sorted(
            gap for at, gap in gaps if any(kind == intruded and start <= at < end for kind, start, end in periods)
        )
        report[name] = {
            "gaps": len(sample),
            "median_ms": 1e3 * statistics.median(sample),
            "p99_ms": 1e3 * sample[int(0.99 * len(sample))],
            "max_ms": 1e3 * sample[-1],
        }
    report["p99_ratio"] = report["intruded"]["p99_ms"] / report["quiet"]["p99_ms"]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phases", type=int, default=6, help="of each kind")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each phase")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/intrusion-cpu.json"))
    arguments = parser.parse_args()
    if arguments.phases < 1:
        raise ConfigError(f"--phases must be at least 1, got {arguments.phases}", param="phases")
    logs = arguments.out.parent / "logs"
    values = {"model": "demo", "draft": "demo", "lanes": str(CLIENTS)}
    with Server(read_servers()["paceline"], (), values, logs / "intrusion.log", logs / "intrusion.trace") as server:
        report = measure(server.url, arguments.phases, arguments.seconds)
    info = build(EngineOptions(max_concurrency=CLIENTS)).info
    write(arguments.out, {"benchmark": "intrusion", **provenance(info), "prompt_bytes": PROMPT_BYTES, **report})
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    run(main)
