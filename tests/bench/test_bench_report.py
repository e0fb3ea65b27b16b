"""What a run comes to and what is shown of it: order, summary, speed-ups, exactness, tables, ratios, the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.charts import line_chart
from paceline.bench.figures import DEFINITIONS, figures, percentile
from paceline.bench.matrix import Cell, Directory, Plan, exactness, matrix_document, summary, verdict, write_whole
from paceline.bench.report import compare, markdown, page, table
from paceline.bench.servers import Configuration, ServerKind
from paceline.bench.workloads import Fixed, Manifest
from paceline.errors import ConfigError

OFF, ON = Configuration("off", (), speculation=False), Configuration("on", (), speculation=True)
SERVER = ServerKind("paceline", (OFF, ON), command=("x",), exact=True)
PEER = {
    "name": "peer",
    "cells": [{"concurrency": 1, "speculation": True, "acceptance_length": 4.0, "window_throughput": 50}],
}


def plan_of(**fields: Any) -> Plan:
    return Plan("demo", "demo", (SERVER,), (Manifest(),), (1, 2), **fields)


def document(
    cell: Cell, rate: float, *, status: str = "complete", hashes: str = "abc", exact: bool = True
) -> dict[str, Any]:
    """A cell of three requests that took one second in all and gave ``rate`` tokens."""
    requests = [
        {
            "number": number,
            "start": 0.0,
            "arrivals": [0.25, 0.5 + number / 4],
            "end": 1.0,
            "tokens": rate / 3,
            "hash": hashes[number],
            "hash_of": "text",
        }
        for number in range(3)
    ]
    made = {
        **asdict(cell),
        "speculation": cell.configuration == "on",
        "synthetic": False,
        "exact": exact,
        "fingerprint": "pl-1",
        "status": status,
        "counters": {
            "paceline_rounds_total": 10.0,
            "paceline_verify_spans_total": 20.0,
            "paceline_emitted_in_verify_total": 80.0 if cell.configuration == "on" else 20.0,
            'paceline_drafted_tokens_total{position="0"}': 20.0,
            'paceline_accepted_tokens_total{position="0"}': 15.0,
        },
        "trace": {
            "rounds": 10,
            "us": {"draft": 100_000, "verify": 500_000},
            "by_lanes": {"1": {"rounds": 4, "kept": 12}, "2": {"rounds": 3, "kept": 24}},
        },
        "requests": requests,
    }
    return made | {"figures": figures(made) | {"peak_rss_bytes": 2**20, "gpu_memory_mib": [5]}}


def store(path: Path, rates: dict[Cell, float], plan: Plan, **head: Any) -> dict[str, Any]:
    identity = {
        "commit": "abc",
        "dirty": False,
        "hardware": {"processor": "CPU <1>", "gpus": []},
        "versions": {"torch": "2"},
        "plan": asdict(plan),
    } | head.pop("identity", {})
    directory = Directory(path, identity)
    for cell, rate in rates.items():
        directory.write(cell, document(cell, rate))
    facts = {"identity": identity, "command": ["paceline"], "time": "now", "server_versions": {}, **head}
    matrix = matrix_document(facts, directory, plan, DEFINITIONS)
    write_whole(path / "matrix.json", matrix)
    return matrix


def cells(plan: Plan) -> Iterator[Cell]:
    return (cell for group in plan.groups() for cell in group)


def rates_of(plan: Plan) -> dict[Cell, float]:
    return {cell: 30.0 * cell.concurrency * (1 + (cell.configuration == "on")) + cell.repeat for cell in cells(plan)}


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(v) for v in range(1, 101)]
    assert [percentile(values, p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert (percentile([3.0], 50), percentile([3.0], 99), percentile([], 50)) == (3.0, 3.0, None)


def test_figures_from_a_document() -> None:
    made = document(Cell("paceline", "on", "manifest", 2, 0), 30.0)["figures"]
    assert made["window_throughput"] == 30 / 0.75 and made["goodput"] == 30
    assert made["ttft_ms"] == {"p50": 250, "p90": 250, "max": 250} and made["itl_ms"] == {"p50": 500, "p99": 750}
    assert (made["acceptance_length"], made["acceptance_by_position"], made["rounds"]) == (4, [0.75], 10)
    assert made["acceptance_by_lanes"] == {"1": 3.0, "2": 4.0}
    assert made["time_share"] == pytest.approx({"draft": 0.1, "verify": 0.5, "host": 0.4})


def test_another_configuration_comes_first_from_repeat_to_repeat() -> None:
    plan = plan_of(repeats=2)
    order = [(cell.repeat, cell.concurrency, cell.configuration) for cell in cells(plan)]
    assert order == [
        (0, 1, "off"), (0, 1, "on"), (0, 2, "on"), (0, 2, "off"),
        (1, 1, "on"), (1, 1, "off"), (1, 2, "off"), (1, 2, "on"),
    ]  # fmt: skip
    groups = plan_of(repeats=2, fresh="configuration").groups()
    assert [(group[0].repeat, group[0].configuration, len(group)) for group in groups] == [
        (0, "off", 2),
        (0, "on", 2),
        (1, "on", 2),
        (1, "off", 2),
    ]


def test_the_summary_has_medians_spreads_and_speed_ups_within_a_repeat() -> None:
    plan = plan_of(repeats=3)
    rates = {cell: rate if cell.repeat < 2 else 10 * rate for cell, rate in rates_of(plan).items()}
    rows = summary([document(cell, rate) for cell, rate in rates.items()])
    assert [(row["concurrency"], row["configuration"]) for row in rows] == [(1, "off"), (1, "on"), (2, "off"), (2, "on")]
    on = rows[1]
    assert on["repeats"] == 3 and on["goodput"] == pytest.approx({"median": 61, "min": 60, "max": 620})
    # a machine that was ten times as fast in the last repeat was so for both
    assert on["speed_up"]["goodput"] == pytest.approx({"median": 61 / 31, "min": 620 / 320, "max": 2})


def test_what_is_not_complete_is_in_no_summary_and_is_told() -> None:
    plan = plan_of()
    made = [document(cell, 30.0) for cell in cells(plan)]
    made[1] = made[1] | {"status": "failed", "failures": {"status 500": 2}}
    rows = summary(made)
    assert len(rows) == 3 and len(exactness(made)) == 3
    entries = [
        {name: cell[name] for name in ("server", "configuration", "workload", "concurrency", "repeat", "status")}
        for cell in made
    ]
    entries[1]["failures"] = made[1]["failures"]
    told = verdict({"cells": entries, "cells_planned": 6, "exactness": exactness(made)})
    assert told == ["paceline on, manifest, C=1, repeat 0: failed: 2 x status 500", "2 cells not begun"]


def test_tokens_that_differ_between_cells_of_one_fingerprint() -> None:
    plan = plan_of()
    made = [document(cell, 30.0, hashes="abc" if cell.concurrency == 1 else "abX") for cell in cells(plan)]
    rows = exactness(made)
    assert [row["identical"] for row in rows] == [3, 3, 2, 2] and rows[2]["different"] == [2]
    assert any(
        "TOKENS DIFFER in requests 2" in line for line in verdict({"cells": [], "cells_planned": 0, "exactness": rows})
    )
    other = [cell | {"fingerprint": f"pl-{cell['concurrency']}"} for cell in made]
    assert [row["identical"] for row in exactness(other)] == [3, 3, 3, 3]
    assert exactness([cell | {"synthetic": True} for cell in made]) == []
    foreign = [cell | {"exact": False} for cell in made if cell["concurrency"] == 2]
    assert [row["identical"] for row in exactness(foreign)] == [None, None]


def test_tables_show_ratios_to_plain_and_to_a_peer(tmp_path: Path) -> None:
    plan = plan_of(repeats=2)
    matrix = store(tmp_path, rates_of(plan), plan, peer=PEER)
    lines = table(matrix).splitlines()
    head, *rows = (re.split(r"  +", line) for line in lines)
    on = dict(zip(head, next(row for row in rows if row[:3] == ["paceline", "on", "1"]), strict=True))
    assert (on["window tok/s"], on["on / off"], on["x peer"]) == ("80.7 (80.0–81.3)", "1.98x", "1.61")
    assert (on["identical"], on["acceptance"], on["TTFT p50 ms"]) == ("6 of 6", "4.00", "250.0")
    assert markdown(matrix).splitlines()[1].count("---") == len(markdown(matrix).splitlines()[0].split("|")) - 2


def test_ratios_of_two_runs_are_cell_by_cell_and_name_what_else_differs(tmp_path: Path) -> None:
    plan = plan_of()
    store(tmp_path / "a", rates_of(plan), plan)
    store(tmp_path / "b", {cell: 1.5 * rate for cell, rate in rates_of(plan).items()}, plan, identity={"commit": "def"})
    lines = compare(tmp_path / "a", tmp_path / "b").splitlines()
    assert 'differs in commit: "abc" against "def"' in lines
    assert "| paceline | on | manifest | 2 | 1.500 | 1.500 | 1.000 | 1.000 | 1.000 | 1.000 |" in lines
    other = Plan("demo", "demo", (SERVER,), (Fixed(),), (1,))
    store(tmp_path / "c", rates_of(other), other)
    with pytest.raises(ConfigError, match="no row in common"):
        compare(tmp_path / "a", tmp_path / "c")


class Balanced(HTMLParser):
    """Fails on tags that do not match, and collects what the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing stays open."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_needs_nothing_else_and_defines_its_figures(tmp_path: Path) -> None:
    plan = plan_of(repeats=2)
    matrix = store(tmp_path, rates_of(plan), plan)
    text = page([tmp_path])
    parser = Balanced()
    parser.feed(text)
    assert parser.open == [] and parser.fetched == [] and "url(" not in text
    assert all(f"<dt>{name}</dt><dd>{escape(definition)}</dd>" in text for name, definition in DEFINITIONS.items())
    assert all(cell["sha256"] in text for cell in matrix["cells"])
    assert "24 of 24 answers in 8 Paceline cells are identical" in text and "CPU &lt;1&gt;" in text
    assert "C = 1, 2; 60 requests of the manifest, at most 64 tokens each, natural end; temperature 0; 2 repeats" in text
    assert text.count("<svg") == 6 and "prefers-color-scheme: dark" in text
    assert '<p class="bad">' not in text


def test_the_page_refuses_documents_that_were_changed(tmp_path: Path) -> None:
    plan = plan_of()
    matrix = store(tmp_path, rates_of(plan), plan)
    path = tmp_path / matrix["cells"][0]["file"]
    path.write_text(path.read_text().replace("30.0", "31.0"))
    with pytest.raises(ConfigError, match="its hash is not the one in matrix.json"):
        page([tmp_path])
    (tmp_path / "matrix.json").write_text(json.dumps({"benchmark": "ops"}))
    with pytest.raises(ConfigError, match="not a run"):
        page([tmp_path])


def test_charts_place_their_points_and_use_the_colours_of_the_page() -> None:
    root = ET.fromstring(line_chart("tok/s <&>", "C", {"off": [(1, 10, 9, 12), (2, 20, 20, 20)], "on": [(1, 40, 40, 40)]}))
    dots = {(dot.get("cx"), float(dot.get("cy") or "")) for dot in root.iter("circle")}
    assert len(dots) == 3 and {x for x, _ in dots} == {"155.5", "350.5"}
    (ten, twenty, forty) = sorted((y for _, y in dots), reverse=True)
    assert ten - twenty == pytest.approx(50, abs=0.1) and twenty - forty == pytest.approx(100, abs=0.1)
    assert all("var(--series-" in (dot.get("style") or "") for dot in root.iter("circle"))
    assert line_chart("nothing", "C", {}) == line_chart("nothing", "C", {"off": []}) == ""
    second = line_chart("speed-up", "C", {"off": [], "on": [(1, 2, 2, 2)]})
    assert "var(--series-1)" in second and "var(--series-0)" not in second and "off" not in second


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_chromium_renders_the_page(tmp_path: Path, scheme: str) -> None:
    plan = plan_of()
    store(tmp_path, rates_of(plan), plan)
    (tmp_path / "report.html").write_text(page([tmp_path]), encoding="utf-8")
    shot = tmp_path / "shot.png"
    preferred = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", preferred, f"--screenshot={shot}"]
    subprocess.run([*command, (tmp_path / "report.html").as_uri()], check=True, timeout=60, capture_output=True)
    assert shot.stat().st_size > 10_000
    assert (sum(corner(shot)) > 3 * 200) == (scheme == "light")


def corner(png: Path) -> bytes:
    """The first pixel, which no filter changes."""
    data, at, packed = png.read_bytes(), 8, b""
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        packed += data[at + 8 : at + 8 + length] if data[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    return zlib.decompress(packed)[1:4]
