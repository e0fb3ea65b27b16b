"""Does any request make the server fail? ``python -m paceline.bench.fuzz``.

Requests are made by schemathesis from the server's own OpenAPI document: as it says, the same with few fields (so that more
of them are answered), and not as it says. Whatever comes, the answer has a status below 500 and the document's shape, no
stream ends with a fault of the server, and in the end nobody has a lane or a page. A real server with the demo pair is
started for it.

A deadline that a request sets is met with a 504, as it has to be: valid ones are made longer than any answer takes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema_rs
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, strategies
from rich.progress import Progress
from schemathesis import Case, GenerationMode

from paceline.bench.artefact import machine, write
from paceline.bench.script import run
from paceline.bench.servers import Server, read_servers

FLAGS = ("--max-queue", "4", "--threads", "1", "--log-format", "json")
"""The queue bounds what a request with many choices costs, and the context one that names no ``max_tokens``."""
CONTEXT = 192
LANES = 4
SLICE = 10
"""Requests of one operation and mode in a row."""
DEADLINE_SECONDS = 600.0
_PATIENCE_SECONDS = 120.0
_SERVERS_FAULTS = ("server_error", "lane_failed", "engine_dead", "loading")
_SHOWN = 20_000


@dataclass
class Findings:
    """What was answered, by operation and status; requests whose answers were wrong, and why."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0


def fuzz(url: str, count: int, seed: int, advance: Callable[[], None] = lambda: None) -> Findings:
    """Send ``count`` requests to a server."""
    document = requests.get(f"{url}/openapi.json", timeout=_PATIENCE_SECONDS).json()
    schemathesis.openapi.format("json", strategies.dictionaries(strategies.text(), strategies.integers()).map(json.dumps))
    operations = [*map(_operation, schemathesis.openapi.from_dict(document).get_all_operations())]
    findings = Findings()
    for turn in _turns(seed):
        for operation in operations:
            posts = operation.method.upper() == "POST"
            as_said, not_so = (
                operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
            )
            few = strategies.builds(_with_few_fields, as_said, strategies.randoms(use_true_random=False))
            for strategy in (as_said, few, not_so) if posts else (as_said,):
                left = min(SLICE if posts else 1, count - findings.sent)
                if left <= 0:
                    return findings
                _send_some(url, document, strategy, left, turn, findings, advance)
    return findings


def _operation(found: Any) -> Any:
    return found.ok()


def _turns(seed: int) -> Iterator[int]:
    while True:
        yield seed
        seed += 1


def _send_some(
    url: str,
    document: dict[str, Any],
    strategy: Any,
    count: int,
    seed: int,
    findings: Findings,
    advance: Callable[[], None],
) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def send(case: Case) -> None:
        if findings.sent - before >= count:
            return
        findings.sent += 1
        _without_deadline(case)
        began = time.monotonic()
        try:
            answer = case.call(base_url=url, timeout=_PATIENCE_SECONDS)
            findings.statuses[f"{case.operation.label} {answer.status_code}"] += 1
            fault = _fault(document, case, answer)
        except requests.RequestException as error:
            fault = f"no answer: {error}"
        if fault:
            shown = repr(case.body)[:_SHOWN]
            findings.failures.append(
                {"operation": case.operation.label, "fault": fault, "body": shown, "seconds": time.monotonic() - began}
            )
        advance()

    before = findings.sent
    send()


def _with_few_fields(case: Case, dice: random.Random) -> Case:
    """The same with what must be there, and up to four fields that need not."""
    body: Any = case.body
    required = case.operation.definition.raw["requestBody"]["content"]["application/json"]["schema"].get("required", ())
    others = [name for name in body if name not in required]
    kept = {*required, *dice.sample(others, min(len(others), dice.randrange(5)))}
    case.body = {name: value for name, value in body.items() if name in kept}
    return case


def _without_deadline(case: Case) -> None:
    body: Any = case.body
    timeout = body.get("timeout") if isinstance(body, dict) else None
    if isinstance(timeout, (int, float)) and 0 < timeout < DEADLINE_SECONDS:
        case.body = body | {"timeout": DEADLINE_SECONDS}


def _fault(document: dict[str, Any], case: Case, answer: Any) -> str | None:
    """What is wrong with an answer."""
    text = answer.content.decode(errors="replace")
    if answer.status_code >= 500:
        return f"status {answer.status_code}: {text[:_SHOWN]}"
    kind = answer.headers.get("content-type", [""])[0].partition(";")[0]
    if kind == "text/event-stream":
        return _fault_of_stream(text)
    described = document["paths"][case.operation.path][case.operation.method.lower()]["responses"]
    content = described["200" if answer.status_code == 200 else "4XX"]["content"].get(kind)
    if content is None:
        return f"status {answer.status_code} of type {kind!r}, which the document does not have"
    if kind != "application/json":
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"status {answer.status_code}, no JSON: {error}: {text[:_SHOWN]}"
    schema = content["schema"] | {"components": document["components"]}
    wrong = next(jsonschema_rs.Draft202012Validator(schema).iter_errors(value), None)
    return f"status {answer.status_code}: {wrong.message}: {text[:_SHOWN]}" if wrong else None


def _fault_of_stream(text: str) -> str | None:
    """Streams that began well may end with an error, which may be the client's fault only."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not events:
        return "a stream without events"
    for event in events:
        if event == "[DONE]":
            continue
        value = json.loads(event)
        error = value.get("error") or (value.get("response") or {}).get("error")
        if error and (error.get("code") in _SERVERS_FAULTS or error.get("type") in ("server_error", "api_error")):
            return f"the stream has {event}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/fuzz.json"))
    arguments = parser.parse_args()
    kind = read_servers()["paceline"]
    values = {"model": "demo", "draft": "demo", "lanes": str(LANES)}
    logs, flags = arguments.out.parent / "logs", (*FLAGS, "--max-ctx", str(CONTEXT))
    began = time.monotonic()
    with Server(kind, flags, values, logs / "fuzz.log", logs / "fuzz.trace") as server, Progress() as progress:
        bar = progress.add_task("requests", total=arguments.requests)
        findings = fuzz(server.url, arguments.requests, arguments.seed, lambda: progress.advance(bar))
        held, status, command = server.still_held(), server.exit_status(), server.recorded_command
    record = {
        "benchmark": "fuzz",
        **machine(),
        "server": command,
        "schemathesis": schemathesis.__version__,
        "seed": arguments.seed,
        "requests": findings.sent,
        "seconds": round(time.monotonic() - began, 1),
        "statuses": dict(sorted(findings.statuses.items())),
        "failures": findings.failures,
        "still_held": held,
        "server_ended_with": status,
    }
    write(arguments.out, record)
    print(json.dumps({name: record[name] for name in ("requests", "seconds", "statuses", "still_held")}, indent=1))
    for failure in findings.failures:
        print(f"{failure['operation']}: {failure['fault'][:500]}\n  {failure['body'][:500]}")
    sys.exit(bool(findings.failures or held or status is not None))


if __name__ == "__main__":
    run(main)
