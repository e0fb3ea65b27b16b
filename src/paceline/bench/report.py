"""What is shown of runs: a table for terminals, one in Markdown, ratios of two runs, and a page that needs nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from paceline.bench.charts import STYLE, Point, line_chart
from paceline.bench.matrix import MATRIX, read_cells, read_matrix, verdict
from paceline.errors import ConfigError

_PEER_ACCEPTANCE = 0.5
"""A row is compared with the peer's if their acceptance lengths differ by less."""
_COMPARED = ("window_throughput", "goodput", "ttft_ms.p50", "itl_ms.p50", "itl_ms.p99", "acceptance_length")

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def _median(name: str, digits: int = 1, scale: float = 1.0, spread: bool = False) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row.get(name)
        if value is None:
            return ""
        text = f"{scale * value['median']:.{digits}f}"
        if spread and row["repeats"] > 1:
            text += f" ({scale * value['min']:.{digits}f}–{scale * value['max']:.{digits}f})"
        return text

    return show


def _speed_up(name: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row["speed_up"].get(name) if row["speculation"] else None
        return f"{value['median']:.2f}x" if value else ""

    return show


def _columns(matrix: Mapping[str, Any]) -> list[Column]:
    several = len({row["workload"] for row in matrix["summary"]}) > 1
    peer = matrix.get("peer")
    columns: list[Column] = [
        ("server", lambda row: row["server"]),
        ("configuration", lambda row: row["configuration"]),
        *([("workload", lambda row: str(row["workload"]))] if several else []),
        ("C", lambda row: str(row["concurrency"])),
        ("window tok/s", _median("window_throughput", spread=True)),
        ("goodput", _median("goodput", spread=True)),
        ("on / off", _speed_up("window_throughput")),
        *([(f"x {peer['name']}", lambda row: _beside(peer, row))] if peer else []),
        ("TTFT p50 ms", _median("ttft_ms.p50")),
        ("p90", _median("ttft_ms.p90")),
        ("max", _median("ttft_ms.max")),
        ("ITL p50 ms", _median("itl_ms.p50")),
        ("p99", _median("itl_ms.p99")),
        ("acceptance", _median("acceptance_length", 2)),
        ("identical", lambda row: _identical(matrix, row)),
    ]
    return columns


def _identical(matrix: Mapping[str, Any], row: Row) -> str:
    """Of all repeats of a row."""
    names = ("server", "configuration", "workload", "concurrency")
    found = [one for one in matrix["exactness"] if all(one[name] == row[name] for name in names)]
    if not found or any(one["identical"] is None for one in found):
        return "–"
    return f"{sum(one['identical'] for one in found)} of {sum(one['compared'] for one in found)}"


def _beside(peer: Mapping[str, Any], row: Row) -> str:
    """The row's throughput by the peer's of the same C and kind."""
    accepted = row.get("acceptance_length")
    for other in peer["cells"]:
        alike = accepted is not None and abs(other["acceptance_length"] - accepted["median"]) < _PEER_ACCEPTANCE
        if other["concurrency"] == row["concurrency"] and other["speculation"] == row["speculation"] and alike:
            return f"{row['window_throughput']['median'] / other['window_throughput']:.2f}"
    return ""


def table(matrix: Mapping[str, Any]) -> str:
    """Rows in aligned columns."""
    names, rows = _cells(matrix)
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) if index < 2 else text.rjust(width) for index, (text, width) in enumerate(line)).rstrip()
        for line in (list(zip(cells, widths, strict=True)) for cells in (names, *rows))
    )


def markdown(matrix: Mapping[str, Any]) -> str:
    names, rows = _cells(matrix)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(matrix: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns = _columns(matrix)
    return [name for name, _ in columns], [[show(row) for _, show in columns] for row in matrix["summary"]]


def compare(first: Path, second: Path) -> str:
    """B / A for every row that both runs have, in Markdown. Runs may differ in more than what is meant to be compared, so
    what they differ in comes first."""
    a, b = read_matrix(first), read_matrix(second)
    rows = {_key(row): row for row in a["summary"]}
    both = [(rows[_key(row)], row) for row in b["summary"] if _key(row) in rows]
    if not both:
        raise ConfigError(f"{first} and {second} have no row in common: other servers, configurations, workloads or C")
    lines = [f"A: {first}", f"B: {second}", *_differences(a["identity"], b["identity"]), ""]
    lines += ["| server | configuration | workload | C | " + " | ".join(f"{name} B / A" for name in _COMPARED) + " |"]
    lines += ["| --- " * (4 + len(_COMPARED)) + "|"]
    for old, new in both:
        ratios = [_ratio(new.get(name), old.get(name)) for name in _COMPARED]
        lines.append("| " + " | ".join([*map(str, _key(new)), *ratios]) + " |")
    return "\n".join(lines)


def _key(row: Row) -> tuple[str, str, str, int]:
    return row["server"], row["configuration"], row["workload"], row["concurrency"]


def _ratio(new: Mapping[str, float] | None, old: Mapping[str, float] | None) -> str:
    return f"{new['median'] / old['median']:.3f}" if new and old and old["median"] else ""


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [
        f"differs in {field}: {_brief(a.get(field))} against {_brief(b.get(field))}"
        for field in sorted(a.keys() | b.keys())
        if field != "plan" and a.get(field) != b.get(field)
    ]


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:120] + "…"


# -- the page --------------------------------------------------------------------------------------------------------------

_PAGE_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #59636e; --rule: #d7dce1; --bad: #b3261e;
  --series-0: #2463bf; --series-1: #c2540a; --series-2: #0f7b57;
  --series-3: #8a3ab0; --series-4: #92700c; --series-5: #a3244f; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e4e8ec; --soft: #9aa4ae; --rule: #363d44; --bad: #ff8a80;
    --series-0: #7fb2ff; --series-1: #ff9f5a; --series-2: #54cf9f;
    --series-3: #d497f2; --series-4: #e0bd4e; --series-5: #ff8cae; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1, h2 { line-height: 1.2; }
.soft { color: var(--soft); }
.bad { color: var(--bad); font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; margin: 1.5rem 0; }
dt { font-weight: 600; }
dd { margin: 0 0 .4rem 1rem; }
pre { font-size: 12px; overflow-wrap: anywhere; white-space: pre-wrap; }
"""


def page(directories: Sequence[Path]) -> str:
    """All runs on one page, without anything from elsewhere."""
    runs = [_run(directory) for directory in directories]
    definitions = read_matrix(directories[0])["definitions"]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Paceline benchmark</title><style>{_PAGE_STYLE}{STYLE}</style></head><body><h1>Paceline benchmark</h1>"
        + "".join(runs)
        + "<h2>What the figures mean</h2><dl>"
        + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in definitions.items())
        + "</dl></body></html>\n"
    )


def _run(directory: Path) -> str:
    matrix = read_matrix(directory)
    cells = read_cells(directory, matrix)
    wrong = verdict(matrix)
    identity = matrix["identity"]
    hardware = ", ".join([identity["hardware"]["processor"], *identity["hardware"]["gpus"]])
    parts = [
        f"<h2>{escape(str(directory))}</h2>",
        f'<p class="soft">{escape(matrix["time"])} · commit {escape(str(identity["commit"]))}'
        f"{' with changes' if identity['dirty'] else ''} · {escape(hardware)} · torch "
        f"{escape(str(identity['versions']['torch']))}</p>",
        f"<p>{escape(_planned(identity['plan']))}</p>",
        *(f'<p class="bad">{escape(line)}</p>' for line in wrong),
        f"<p>{escape(_exactness(matrix))}</p>",
        _html_table(*_cells(matrix)),
        f'<div class="charts">{"".join(_charts(matrix["summary"]))}</div>',
        _engine_table(cells),
        "<h3>Artefacts</h3>",
        _html_table(["file", "status", "SHA-256"], _artefacts(directory, matrix)),
        "<details><summary>Provenance</summary><pre>",
        escape(json.dumps(_provenance(matrix, cells), indent=1)),
        "</pre></details>",
    ]
    return "".join(parts)


def _planned(plan: Mapping[str, Any]) -> str:
    asked = "; ".join(
        f"{one['requests'] or '3 C + 3'} requests of the manifest, at most {one['max_tokens']} tokens each, natural end"
        if one["kind"] == "manifest"
        else f"{one['requests'] or '3 C + 3'} requests of {one['prompt_tokens']} + {one['output_tokens']} tokens"
        + (f", prompts of {one['long_tokens']} tokens beside them" if one["long_tokens"] else "")
        for one in plan["workloads"]
    )
    heat = sorted({one["temperature"] for one in plan["workloads"]})
    quiet = "" if plan["quiet"] is None else f", others on at most {plan['quiet']:g} cores"
    return (
        f"C = {', '.join(map(str, plan['concurrency']))}; {asked}; temperature {', '.join(f'{one:g}' for one in heat)}; "
        f"{plan['repeats']} repeat{'s' * (plan['repeats'] > 1)}; a new server for each {plan['fresh']}{quiet}."
    )


def _exactness(matrix: Mapping[str, Any]) -> str:
    rows = [row for row in matrix["exactness"] if row["exact"]]
    if not rows:
        return "No cells whose tokens must be identical."
    same, compared = sum(row["identical"] for row in rows), sum(row["compared"] for row in rows)
    return f"Tokens: {same} of {compared} answers in {len(rows)} Paceline cells are identical to the first cell's."


def _charts(summary: Sequence[Row]) -> Iterable[str]:
    """Over C, a line for each server, configuration and workload, of the same colour in every chart."""
    several = len({row["workload"] for row in summary}) > 1

    def name(row: Row) -> str:
        return " ".join([row["server"], row["configuration"], *([row["workload"]] if several else [])])

    for title, get in (
        ("Output window, tok/s", lambda row: row.get("window_throughput")),
        ("Goodput, tok/s", lambda row: row.get("goodput")),
        ("Speed-up of the window by speculation", _charted_speed_up),
        ("TTFT, median, ms", lambda row: row.get("ttft_ms.p50")),
        ("ITL, p99, ms", lambda row: row.get("itl_ms.p99")),
        ("Acceptance length", lambda row: row.get("acceptance_length")),
    ):
        series: dict[str, list[Point]] = {name(row): [] for row in summary}
        for row in summary:
            if value := get(row):
                series[name(row)].append((row["concurrency"], value["median"], value["min"], value["max"]))
        yield line_chart(title, "requests at a time (C)", series)


def _charted_speed_up(row: Row) -> Mapping[str, float] | None:
    return row["speed_up"].get("window_throughput") if row["speculation"] else None


def _engine_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Where the time went and how drafts did, as far as each cell knows, and how quiet the machine was."""
    rows = []
    for cell in cells:
        if made := cell.get("figures"):
            shares, lanes = made.get("time_share"), made.get("acceptance_by_lanes", {})
            rows.append(
                [
                    cell["server"],
                    cell["configuration"],
                    cell["workload"],
                    *(str(cell[name]) for name in ("concurrency", "repeat")),
                    str(made["rounds"] or ""),
                    *(f"{100 * shares.get(stage, 0.0):.0f} %" if shares else "" for stage in _STAGES),
                    " ".join(f"{share:.2f}" for share in made.get("acceptance_by_position", ())),
                    " ".join(f"{count}: {length:.2f}" for count, length in lanes.items()),
                    "" if cell.get("others_cpu") is None else f"{cell['others_cpu']:.2f}",
                    f"{(made['peak_rss_bytes'] or 0) / 2**20:.0f}",
                    " ".join(map(str, made["gpu_memory_mib"])),
                ]
            )
    names = ["server", "configuration", "workload", "C", "repeat", "rounds", *_STAGES]
    names += ["accepted by position", "acceptance by lanes", "others' cores", "peak RSS MiB", "GPU MiB"]
    return f"<h3>Inside the cells</h3>{_html_table(names, rows)}" if rows else ""


_STAGES = ("draft", "verify", "prefill", "commit", "host")


def _artefacts(directory: Path, matrix: Mapping[str, Any]) -> list[list[str]]:
    whole = hashlib.sha256((directory / MATRIX).read_bytes()).hexdigest()
    return [[MATRIX, "", whole], *([cell["file"], cell["status"], cell["sha256"]] for cell in matrix["cells"])]


def _provenance(matrix: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    commands = {f"{cell['server']} {cell['configuration']}": cell["command"] for cell in cells if "command" in cell}
    arithmetic = {cell["fingerprint"]: cell.get("arithmetic") for cell in cells if cell.get("fingerprint")}
    return {
        "command": matrix["command"],
        "servers": commands,
        "server_versions": matrix["server_versions"],
        "fingerprints": arithmetic,
        **matrix["identity"],
    }


def _html_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
