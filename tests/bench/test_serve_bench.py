"""The serving benchmark end to end: against a stand-in that fails in every way, and against Paceline on the demo pair."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import serve
from paceline.bench.matrix import Cell, Plan, read_cells, read_matrix
from paceline.bench.screens import with_flags
from paceline.bench.serve import run
from paceline.bench.servers import Configuration, Server, ServerKind, read_servers
from paceline.bench.workloads import Fixed, Manifest
from paceline.errors import ConfigError

STAND_IN = Path(__file__).with_name("standin.py")
OFF = Configuration("off", (), speculation=False)
ON = Configuration("on", ("--drafts",), speculation=True)


class Silent:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.cells: list[tuple[str, int, int, int]] = []
        self.answers = 0

    def cell(self, cell: Cell, number: int, of: int, requests: int) -> None:
        self.cells.append((str(cell), number, of, requests))

    def answer(self) -> None:
        self.answers += 1

    def say(self, line: str) -> None:
        self.lines.append(line)


def stand_in(*flags: str, configurations: tuple[Configuration, ...] = (OFF,), **fields: Any) -> ServerKind:
    command = ("{python}", str(STAND_IN), "--port", "{port}", *flags)
    return ServerKind("stand-in", configurations, command=command, timeout=20, **fields)


def plan_of(*servers: ServerKind, requests: int = 6, concurrency: tuple[int, ...] = (2,), **fields: Any) -> Plan:
    workloads = fields.pop("workloads", (Manifest(requests),))
    return Plan("demo", "demo", servers, workloads, concurrency, warm_up=1, **fields)


def only_cell(directory: Path) -> dict[str, Any]:
    (cell,) = read_cells(directory, read_matrix(directory))
    return cell


@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("status", "status 500", "out of memory"),
        ("cut", "stream cut short", "without finish reason"),
        ("count", "wrong token count", "output tokens"),
        ("ids", "wrong token count", "the events hold"),
        ("event", "error in the stream", "lane failed"),
        ("unreadable", "event that is not a JSON object", "{half"),
        ("reason", "unexpected finish reason", "content_filter"),
        ("usage", "no usage", "without token counts"),
    ],
)
def test_one_failure_is_counted_and_named_and_leaves_no_figures(tmp_path: Path, fault: str, kind: str, detail: str) -> None:
    silent = Silent()
    server = stand_in("--fault", fault, "--at", "0", "--ids")
    assert run(plan_of(server), tmp_path, silent) == 1
    cell = only_cell(tmp_path)
    assert (cell["status"], cell["requests_sent"], cell["successes"], cell["failures"]) == ("failed", 6, 5, {kind: 1})
    assert "figures" not in cell and cell["server_exit_status"] is None
    (failed,) = [request for request in cell["requests"] if "failure" in request]
    assert failed["failure"] == kind and detail in failed["detail"]
    matrix = read_matrix(tmp_path)
    assert matrix["summary"] == [] and matrix["exactness"] == []
    assert f"stand-in off, manifest, C=2, repeat 0: failed: 1 x {kind}" in silent.lines


def test_a_server_that_dies_is_named_and_what_it_left_is_counted(tmp_path: Path) -> None:
    silent = Silent()
    assert run(plan_of(stand_in("--fault", "die", "--at", "3"), concurrency=(1,)), tmp_path, silent) == 1
    cell = only_cell(tmp_path)
    assert (cell["status"], cell["server_exit_status"], cell["successes"]) == ("failed", 9, 3)
    # the next one may still get hold of a socket of the dying process
    assert cell["failures"]["stream cut short"] >= 1 and sum(cell["failures"].values()) == 3
    assert set(cell["failures"]) <= {"connection refused", "stream cut short"}
    assert any("3 of 6 answers" in line and "the server ended with status 9" in line for line in silent.lines)


def test_connections_that_are_refused_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that somebody else runs, and stops after it was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(STAND_IN), "--port", str(port)])

    def stopped(*arguments: Any, **options: Any) -> dict[str, float]:
        process.kill()
        process.wait()
        return {}

    monkeypatch.setattr(Server, "counters", stopped)
    server = ServerKind("elsewhere", (OFF,), url=f"http://127.0.0.1:{port}", timeout=20)
    assert run(plan_of(server), tmp_path, Silent()) == 1
    cell = only_cell(tmp_path)
    assert (cell["failures"], cell["successes"], cell["command"]) == ({"connection refused": 6}, 0, [])
    assert cell["fresh"] == "no: it ran before"


def test_a_server_that_does_not_start_is_named_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stand-in ended with status 2: .*--no-such-flag.*\.log"):
        run(plan_of(stand_in("--no-such-flag")), tmp_path, Silent())
    with pytest.raises(ConfigError, match="no-such-program"):
        run(plan_of(replace(stand_in(), command=("no-such-program",))), tmp_path / "other", Silent())
    assert [cell["status"] for cell in read_matrix(tmp_path)["cells"]] == ["interrupted"]


def test_an_independent_count_from_the_stream_log_gives_the_same_digits(tmp_path: Path) -> None:
    """Written without a look at ``figures``: from the definitions alone."""
    server = stand_in(configurations=(OFF, ON))
    assert run(plan_of(server, requests=20, concurrency=(1, 3)), tmp_path, Silent()) == 0
    cells = read_cells(tmp_path, read_matrix(tmp_path))
    assert len(cells) == 4
    for cell in cells:
        begin = first = float("inf")
        end = last = 0.0
        tokens = accepted = 0
        waits, gaps = [], []
        for answer in cell["requests"]:
            begin, end = min(begin, answer["start"]), max(end, answer["end"])
            before = None
            for arrival in answer["arrivals"]:
                if before is None:
                    waits.append((arrival - answer["start"]) * 1000)
                else:
                    gaps.append((arrival - before) * 1000)
                before = arrival
                first, last = min(first, arrival), max(last, arrival)
            tokens += answer["tokens"]
            accepted += answer.get("accepted", 0)
        waits.sort()
        gaps.sort()

        def rank(values: list[float], percent: float) -> float:
            return next(value for at, value in enumerate(values, 1) if at >= percent / 100 * len(values))

        made = cell["figures"]
        assert made["goodput"] == tokens / (end - begin)
        assert made["window_throughput"] == tokens / (last - first)
        assert made["ttft_ms"] == {"p50": rank(waits, 50), "p90": rank(waits, 90), "max": waits[-1]}
        assert made["itl_ms"] == {"p50": rank(gaps, 50), "p99": rank(gaps, 99)}
        assert made["acceptance_length"] == (tokens - 20) / (tokens - 20 - accepted)
        assert (accepted > 0) == cell["speculation"]


def test_what_is_complete_is_not_measured_again_and_what_was_interrupted_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(stand_in(configurations=(OFF, ON)), concurrency=(1, 2))
    measure: Callable[..., dict[str, Any]] = serve._Run._measure
    silent = Silent()

    def interrupted(self: Any, cell: Cell, server: Any) -> dict[str, Any]:
        if (cell.configuration, cell.concurrency) == ("on", 2):
            raise KeyboardInterrupt
        return measure(self, cell, server)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(serve._Run, "_measure", interrupted)
        run(plan, tmp_path, silent)
    matrix = read_matrix(tmp_path)
    # from C to C another configuration comes first, so the last cell was not begun
    assert [(c["configuration"], c["concurrency"], c["status"]) for c in matrix["cells"]] == [
        ("off", 1, "complete"),
        ("on", 1, "complete"),
        ("on", 2, "interrupted"),
    ]
    assert [row["concurrency"] for row in matrix["summary"]] == [1, 1] and matrix["cells_planned"] == 4
    first = {cell["file"]: cell["sha256"] for cell in matrix["cells"] if cell["status"] == "complete"}

    again = Silent()
    assert run(plan, tmp_path, again) == 0
    matrix = read_matrix(tmp_path)
    assert [(name, number, of) for name, number, of, _ in again.cells] == [
        ("stand-in on, manifest, C=2, repeat 0", 3, 4),
        ("stand-in off, manifest, C=2, repeat 0", 4, 4),
    ]
    assert again.answers == 12
    now = {cell["file"]: cell["sha256"] for cell in matrix["cells"]}
    assert first.items() <= now.items() and len(now) == 4


def test_a_cell_that_was_disturbed_does_not_count_and_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, silent = plan_of(stand_in(), quiet=0.5), Silent()
    seconds = iter((0.0, 60.0))
    monkeypatch.setattr(serve, "machine_cpu_seconds", lambda: next(seconds))
    assert run(plan, tmp_path, silent) == 1
    assert only_cell(tmp_path)["status"] == "disturbed" and read_matrix(tmp_path)["summary"] == []
    assert "stand-in off, manifest, C=2, repeat 0: disturbed" in silent.lines and " cores busy" in silent.lines[0]
    monkeypatch.setattr(serve, "machine_cpu_seconds", lambda: 0.0)
    assert run(plan, tmp_path, Silent()) == 0
    assert only_cell(tmp_path)["status"] == "complete"


def test_a_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    run(plan_of(stand_in()), tmp_path, Silent())
    with pytest.raises(ConfigError, match="holds a run with another plan"):
        run(plan_of(stand_in(), requests=5), tmp_path, Silent())


def test_another_server_is_compared_with_its_own_run_at_one(tmp_path: Path) -> None:
    """It may answer otherwise when it is busy: that is told, and is no failure. Of ours it would be."""
    plan = plan_of(stand_in("--fault", "different", "--at", "8"), concurrency=(1, 2), fresh="configuration")
    assert run(plan, tmp_path, Silent()) == 0
    alone, busy = read_matrix(tmp_path)["exactness"]
    assert (alone["identical"], alone["compared"], alone["hash_of"]) == (6, 6, "text")
    assert (busy["identical"], busy["compared"], len(busy["different"])) == (5, 6, 1)
    silent = Silent()
    ours = replace(plan, servers=(replace(plan.servers[0], exact=True),))
    assert run(ours, tmp_path / "ours", silent) == 1
    _, busy = read_matrix(tmp_path / "ours")["exactness"]  # two that are sent at once may arrive in either order
    assert silent.lines[-1] == f"stand-in off, manifest, C=2, repeat 0: TOKENS DIFFER in requests {busy['different'][0]}"


def test_long_prompts_arrive_beside_the_others(tmp_path: Path) -> None:
    asked = Fixed(prompt_tokens=9, output_tokens=60, requests=12)
    plan = plan_of(stand_in(), workloads=(asked, replace(asked, long_tokens=40, long_seconds=0.02)), concurrency=(2,))
    assert run(plan, tmp_path, Silent()) == 0
    quiet, mixed = read_cells(tmp_path, read_matrix(tmp_path))
    assert quiet["long"] == [] and len(mixed["long"]) > 1
    assert {request["prompt_tokens"] for request in mixed["long"]} == {40}
    assert {request["prompt_tokens"] for request in mixed["requests"]} == {9} and mixed["lanes"] == 3
    assert mixed["figures"]["long_ttft_ms"]["p50"] > 0 and "long_ttft_ms" not in quiet["figures"]


def test_a_long_prompt_that_fails_fails_its_cell(tmp_path: Path) -> None:
    asked = Fixed(prompt_tokens=9, output_tokens=90, requests=6, long_tokens=40, long_seconds=0.02)
    silent = Silent()
    assert (
        run(plan_of(stand_in("--fault", "status", "--at", "3"), workloads=(asked,), concurrency=(1,)), tmp_path, silent) == 1
    )
    cell = only_cell(tmp_path)
    assert cell["status"] == "failed" and "figures" not in cell
    assert cell["failures"] | cell["failures_beside"] == {"status 500": 1}


def test_paceline_is_measured_and_its_tokens_are_identical(tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--max-ctx", "1024", "--threads", "1")
    ours = with_flags(read_servers()["paceline"], flags)
    silent = Silent()
    plan = plan_of(
        ours, workloads=(Manifest(3, max_tokens=6), Fixed(11, 5, requests=4)), concurrency=(2,), fresh="configuration"
    )
    assert run(plan, tmp_path, silent) == 0
    matrix = read_matrix(tmp_path)
    cells = read_cells(tmp_path, matrix)
    assert [(cell["configuration"], cell["successes"]) for cell in cells] == [("off", 3), ("off", 4), ("on", 3), ("on", 4)]
    for cell in cells:
        made = cell["figures"]
        assert made["window_throughput"] > made["goodput"] > 0 and made["rounds"] > 0
        assert set(made["time_share"]) == {"draft", "verify", "prefill", "commit", "host"}
        assert sum(made["time_share"].values()) == pytest.approx(1) and made["peak_rss_bytes"] > 50e6
        assert "--trace" in cell["command"] and str(tmp_path) not in json.dumps(cell)
        assert cell["fingerprint"].startswith("pl-") and cell["arithmetic"].startswith("device=cpu")
        assert -0.5 < cell["others_cpu"] <= (os.cpu_count() or 1)
        drafting = cell["configuration"] == "on"
        assert (made["acceptance_length"] > 1) == bool(made["acceptance_by_position"]) == drafting
        assert set(made["acceptance_by_lanes"]) <= {"1", "2"}
    assert [(row["identical"], row["compared"]) for row in matrix["exactness"]] == [(3, 3), (4, 4), (3, 3), (4, 4)]
    assert matrix["identity"]["manifest"]["requests"] == 60 and matrix["identity"]["target"]["sha256"]
    speed_ups = [row["speed_up"]["goodput"]["median"] for row in matrix["summary"]]
    assert speed_ups[::2] == [1, 1] and len(speed_ups) == 4
    assert "4 of 4" in silent.lines[-1]
