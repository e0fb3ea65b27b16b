"""Time of GPU work without the time of launching it, and what the device could do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_REPLAY_SECONDS = 1.5e-3
"""About how long a graph of launches runs: long beside the launch of the graph, short beside the patience of a reader."""
_MOST_LAUNCHES = 256
_REPLAYS = 15
_L2_BYTES = 64 << 20
"""Where torch does not know the size."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Bytes read per second and 16-bit operations per second, as measured, not as printed on the box."""

    bytes_per_second: float
    operations_per_second: float
    source: str


CEILINGS = {"NVIDIA H200": (4.57e12, 790e12)}
"""By name of the device: a read-only reduction, and a bfloat16 matrix product."""


def ceiling(device: torch.device) -> Ceiling:
    """From the table, or measured now."""
    known = CEILINGS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Ceiling(*known, "table") if known else _measured(device)


def _measured(device: torch.device) -> Ceiling:
    on_gpu = device.type == "cuda"
    source = torch.ones(1 << (28 if on_gpu else 24), device=device)
    read = source.nbytes / seconds(lambda copy: source.sum(), 1, device)
    size = 8192 if on_gpu else 1024
    dtype = torch.bfloat16 if on_gpu else torch.float32
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return Ceiling(read, 2 * size**3 / seconds(lambda copy: matrix @ matrix, 1, device), "measured")


def rotation(nbytes: int, device: torch.device, most: int = 64) -> int:
    """How many copies of what one launch reads are needed so that the last-level cache does not hold the next one: all
    others together are twice its size."""
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", _L2_BYTES) if device.type == "cuda" else 0
    return max(1, min(most, 1 + 2 * cache // max(1, nbytes)))


def seconds(run: Callable[[int], object], copies: int, device: torch.device) -> float:
    """Median time of one ``run(copy)`` over rotating copies. On a GPU many of them are one CUDA graph; what compiles or
    allocates once does so before."""
    for copy in range(copies):
        run(copy)
    if device.type != "cuda":
        return min(_on_host(run, turn % copies) for turn in range(3))
    torch.cuda.synchronize()
    started = time.perf_counter()
    for copy in range(copies):
        run(copy)
    torch.cuda.synchronize()
    once = (time.perf_counter() - started) / copies
    turns = max(1, min(_MOST_LAUNCHES // copies, round(_REPLAY_SECONDS / (once * copies))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in range(turns * copies):
            run(launch % copies)
    return _replay_seconds(graph) / (turns * copies)


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _on_host(run: Callable[[int], object], copy: int) -> float:
    started = time.perf_counter()
    run(copy)
    return time.perf_counter() - started
