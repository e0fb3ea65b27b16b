"""Does a server under a mixed load stay exact, and does it lose nothing? ``python -m paceline.bench.soak``.

Answers to a catalogue of requests are taken from a quiet server that neither speculates nor has more than one lane. Then
another server, with eight lanes and pages for a few, is asked these and wrong ones by clients that come at random, read
slowly, stop reading, or leave. Whoever gets an answer gets the quiet server's; in the end all lanes and pages are free, and
the processes have no more memory than after a warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from paceline.bench.artefact import machine, write
from paceline.bench.script import run
from paceline.bench.servers import Server, read_servers
from paceline.bench.soak_answers import Answer, events_in, folded, is_part_of
from paceline.bench.soak_cases import VERBOSE, Asked, catalogue, refused
from paceline.engine.memory import IDLE_SECONDS

LANES = 8
CLIENTS = 20
QUIET = ("--max-ctx", "896", "--no-speculation", "--threads", "1")
BUSY = (
    *("--max-ctx", "896", "--kv-pool-tokens", "928", "--max-queue", "16", "--threads", "1", "--log-format", "json"),
    *("--stream-buffer-tokens", "64", "--client-timeout", "2", "--draft-policy", "fixed"),
)
"""Pages for two or three requests; and soon somebody counts as a slow reader."""
WARM_UP = 200
GROWTH, GROWTH_BYTES = 0.02, 16 * 2**20
"""What memory may grow by: the larger of the two."""
LEFT_SECONDS = 1.0
"""After which nobody who has left may be in a round that begins: the server hears of it when it next looks."""
_PATIENCE_SECONDS = 300.0
_SILENCE_SECONDS = 60.0
FATES = {
    **{"whole": 30, "stream": 25, "slow": 8, "silent": 4},
    **{"leaves a stream": 12, "leaves": 8, "half a body": 3, "wrong": 7, "deadline": 4},
}
"""What becomes of a request, and how often."""


@dataclass
class Tally:
    """What happened: outcomes by fate, failures, when clients left."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)


def alone(url: str, asked: Sequence[Asked], advance: Callable[[], None] = lambda: None) -> list[Answer]:
    """The answers, one after another."""
    answers = []
    with httpx.Client(base_url=url, timeout=_PATIENCE_SECONDS, trust_env=False) as client:
        for one in asked:
            response = client.post(one.path, json=one.body)
            assert response.status_code == 200, f"{one}: {response.text}"
            answers.append(folded(one.path, [response.json()]))
            advance()
    return answers


class Soak:
    """Clients of one server. ``answers`` are those of ``asked``."""

    def __init__(self, url: str, asked: Sequence[Asked], answers: Sequence[Answer], seed: int) -> None:
        self.tally = Tally()
        self._url, self._asked, self._answers = url, asked, answers
        self._verbose = [index for index, one in enumerate(asked) if VERBOSE in one.kinds] or [*range(len(asked))]
        self._dice = random.Random(seed)
        self._sent = 0

    def run(self, count: int, advance: Callable[[], None] = lambda: None) -> None:
        """Send so many requests more."""
        asyncio.run(self._run(count, advance))

    async def _run(self, count: int, advance: Callable[[], None]) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=_PATIENCE_SECONDS, limits=limits, trust_env=False
        ) as client:
            numbers = iter(range(self._sent, self._sent + count))
            self._sent += count

            async def work() -> None:
                for number in numbers:
                    await asyncio.sleep(self._dice.expovariate(20))
                    await self._one(client, number)
                    advance()

            await asyncio.gather(*(work() for _ in range(CLIENTS)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        dice = random.Random(f"{self._dice.random()} {number}")
        fate = dice.choices([*FATES], [*FATES.values()])[0]
        index = dice.choice(self._verbose) if fate == "silent" else dice.randrange(len(self._asked))
        asked = self._asked[index]
        body = asked.body | {"priority": dice.choice([0, 0, 0, -5, 5])}
        visit = _Visit(client, f"soak-{number}", asked.path, body, dice, self.tally)
        try:
            outcome = await _ACTS[fate](visit, self._answers[index])
        except Exception as fault:
            outcome = f"FAILED: {type(fault).__name__}: {fault}"
        self.tally.outcomes[f"{fate}: {outcome if not outcome.startswith('FAILED') else 'FAILED'}"] += 1
        if outcome.startswith("FAILED"):
            told = {"number": number, "fate": fate, "path": asked.path, "body": body, "fault": outcome[:4000]}
            self.tally.failures.append(told)


@dataclass
class _Visit:
    """One request of one client."""

    client: httpx.AsyncClient
    name: str
    path: str
    body: dict[str, Any]
    dice: random.Random
    tally: Tally

    @property
    def headers(self) -> dict[str, str]:
        return {"x-request-id": self.name}

    async def post(self) -> httpx.Response:
        """Its answer. While the queue is full, it is asked again."""
        while True:
            response = await self.client.post(self.path, json=self.body, headers=self.headers)
            if response.status_code != 429:
                return response
            self.tally.outcomes["queue full"] += 1
            assert int(response.headers["retry-after"]) >= 1
            await asyncio.sleep(self.dice.uniform(0.1, 0.5))

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[httpx.Response]:
        """The same as a stream."""
        while True:
            async with self.client.stream(
                "POST", self.path, json=self.body | {"stream": True}, headers=self.headers
            ) as response:
                if response.status_code != 429:
                    yield response
                    return
            self.tally.outcomes["queue full"] += 1
            await asyncio.sleep(self.dice.uniform(0.1, 0.5))

    def leave(self) -> None:
        self.tally.left[self.name] = time.time()


def _compared(heard: Answer, due: Answer) -> str:
    return "exact" if heard == due else f"FAILED: not the answer\n heard {heard}\n due   {due}"


async def _whole(visit: _Visit, due: Answer) -> str:
    response = await visit.post()
    if response.status_code != 200:
        return f"FAILED: status {response.status_code}: {response.text}"
    return _compared(folded(visit.path, [response.json()]), due)


async def _stream(visit: _Visit, due: Answer) -> str:
    return await _read(visit, due, lambda: 0.0)


async def _slow(visit: _Visit, due: Answer) -> str:
    return await _read(visit, due, lambda: visit.dice.choice([0.0, 0.0, 0.02, 0.1]))


async def _read(visit: _Visit, due: Answer, pause: Callable[[], float]) -> str:
    """Read a stream to its end. Who pauses may be told to be too slow."""
    text = ""
    async with visit.stream() as response:
        if response.status_code != 200:
            return f"FAILED: status {response.status_code}: {(await response.aread()).decode()}"
        async for piece in response.aiter_text():
            text += piece
            await asyncio.sleep(pause())
    return _judged(visit.path, text, due)


def _judged(path: str, text: str, due: Answer) -> str:
    heard = folded(path, events_in(text))
    if heard.error is None:
        return _compared(heard, due)
    if heard.error in ("client_too_slow", "deadline_exceeded", "timeout_error"):  # Anthropic's have no code
        return heard.error if is_part_of(heard, due) else f"FAILED: no part of the answer: {heard}, due {due}"
    return f"FAILED: the stream ends with {heard.error}"


async def _silent(visit: _Visit, due: Answer) -> str:
    """Nothing of a stream is read for a while; what has come then is a part of the answer, or all of it."""
    content = json.dumps(visit.body | {"stream": True}).encode()
    reader, writer = await _connected(visit)
    try:
        writer.write(_head(visit, len(content)) + content)
        await asyncio.sleep(visit.dice.uniform(0.5, 8))
        answer = await asyncio.wait_for(reader.read(-1), _SILENCE_SECONDS)
    except (ConnectionError, TimeoutError):
        return "closed"  # when nothing was read for twice the client's time; the system does not always say so
    finally:
        writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    status = head.split(b" ")[1:2]
    if status == [b"429"]:
        return "queue full"
    if status != [b"200"]:
        return f"FAILED: {answer.decode(errors='replace')}"
    return _judged(visit.path, _unchunked(rest), due)


async def _connected(visit: _Visit) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that holds little of what is not read."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.connect((visit.client.base_url.host, visit.client.base_url.port))
    return await asyncio.open_connection(sock=plain, limit=4096)


def _head(visit: _Visit, length: int) -> bytes:
    return (
        f"POST {visit.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Request-Id: {visit.name}\r\n"
        f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode()


def _unchunked(body: bytes) -> str:
    """A body in chunks, each behind a line with its size in bytes."""
    whole, rest = b"", body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        whole, rest = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return whole.decode()


async def _leaves_a_stream(visit: _Visit, due: Answer) -> str:
    text, pieces = "", visit.dice.randrange(12)
    async with visit.stream() as response:
        async for piece in response.aiter_text():
            text += piece
            pieces -= 1
            if pieces < 0:
                break
        visit.leave()
    heard = folded(visit.path, events_in(text.rpartition("\n\n")[0]))
    return "left" if is_part_of(heard, due) else f"FAILED: no part of the answer: {heard}, due {due}"


async def _leaves(visit: _Visit, due: Answer) -> str:
    try:
        async with asyncio.timeout(visit.dice.choice([0.01, 0.1, 0.5, 2.0])):
            return await _whole(visit, due)
    except TimeoutError:
        visit.leave()
        return "left"


async def _half_a_body(visit: _Visit, due: Answer) -> str:
    content = json.dumps(visit.body).encode()
    _reader, writer = await _connected(visit)
    writer.write(_head(visit, len(content)) + content[: len(content) // 2])
    await writer.drain()
    await asyncio.sleep(visit.dice.uniform(0, 0.5))
    writer.close()
    return "left"


async def _wrong(visit: _Visit, due: Answer) -> str:
    path, body, status = refused(visit.dice)
    while True:
        response = await visit.client.post(path, content=body, headers={"content-type": "application/json"})
        if response.status_code != 429:
            break
        await asyncio.sleep(0.2)
    error = response.json()["error"]
    if response.status_code != status or not error["message"]:
        return f"FAILED: {path} {body[:200]!r}: {response.status_code} instead of {status}: {response.text}"
    return f"{status}"


async def _deadline(visit: _Visit, due: Answer) -> str:
    visit.body["timeout"] = visit.dice.choice([1e-6, 0.05, 0.3, 1.0])
    if visit.dice.random() < 0.5:
        async with visit.stream() as response:
            text = (await response.aread()).decode()
        if response.status_code == 200:
            return _judged(visit.path, text, due)
        return "deadline_exceeded" if response.status_code == 504 else f"FAILED: status {response.status_code}: {text}"
    response = await visit.post()
    if response.status_code == 504:
        return "deadline_exceeded"
    return _compared(folded(visit.path, [response.json()]), due)


_ACTS = {
    "whole": _whole,
    "stream": _stream,
    "slow": _slow,
    "silent": _silent,
    "leaves a stream": _leaves_a_stream,
    "leaves": _leaves,
    "half a body": _half_a_body,
    "wrong": _wrong,
    "deadline": _deadline,
}


# -- what the server says of it --------------------------------------------------------------------------------------------


def rounds_after_leaving(left: Mapping[str, float], log: Path, trace: Path) -> dict[str, Any]:
    """Of rounds that began when one of their clients had left: how many such a client had at most, and how long after that
    the last one began."""
    owners: dict[str, str] = {}
    for line in log.read_text().splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        if entry.get("message") == "request started" and entry["id"] in left:
            owners |= dict.fromkeys(entry["engine_ids"], entry["id"])
    rounds: Counter[str] = Counter()
    latest = 0.0
    for line in trace.read_text().splitlines():
        entry = json.loads(line)
        if "round" not in entry:
            continue
        began = entry["time"] - sum(entry["us"].values()) / 1e6
        clients = {owners[lane["request"]] for lane in entry["lanes"] if lane["request"] in owners}
        late = {client: began - left[client] for client in clients if began > left[client]}
        rounds.update(late.keys())
        latest = max([latest, *late.values()])
    ordered = sorted(rounds.values())
    return {
        "clients": len(left),
        "with_rounds_after": len(ordered),
        "most_rounds": max(ordered, default=0),
        "latest_ms": round(1000 * latest, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="after the warm-up")
    parser.add_argument("--catalogue", type=int, default=300, help="how many different answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/soak.json"))
    arguments = parser.parse_args()
    logs, began = arguments.out.parent / "logs", time.monotonic()
    kind, pair = read_servers()["paceline"], {"model": "demo", "draft": "demo"}
    asked = catalogue(arguments.catalogue, arguments.seed)
    with Progress() as progress:
        bar = progress.add_task("alone", total=len(asked))
        with Server(kind, QUIET, pair | {"lanes": "1"}, logs / "quiet.log", logs / "quiet.trace") as quiet:
            answers = alone(quiet.url, asked, lambda: progress.advance(bar))
        with Server(kind, BUSY, pair | {"lanes": str(LANES)}, logs / "soak.log", logs / "soak.trace") as server:
            soak = Soak(server.url, asked, answers, arguments.seed)
            bar = progress.add_task("together", total=WARM_UP + arguments.requests)
            memory, held = [], []
            for count in (WARM_UP, arguments.requests):
                soak.run(count, lambda: progress.advance(bar))
                held.append(server.still_held())
                time.sleep(IDLE_SECONDS + 1.0)  # then the engine has given back what it keeps for larger rounds
                memory.append(server.rss_bytes())
            peak, counters, status = server.peak_rss_bytes(), server.counters(), server.exit_status()
    late = rounds_after_leaving(soak.tally.left, logs / "soak.log", logs / "soak.trace")
    failures = list(soak.tally.failures)
    failures += [{"fault": f"held: {one}"} for one in held if one]
    if memory[1] - memory[0] > max(GROWTH * memory[0], GROWTH_BYTES):
        failures.append({"fault": f"memory grew from {memory[0]} to {memory[1]} bytes"})
    if late["latest_ms"] > 1000 * LEFT_SECONDS:
        failures.append({"fault": f"a lane went on {late['latest_ms']} ms after its client had left"})
    if status is not None:
        failures.append({"fault": f"the server ended with status {status}"})
    record = {
        "benchmark": "soak",
        **machine(),
        "quiet": quiet.recorded_command,
        "server": server.recorded_command,
        "seed": arguments.seed,
        "requests": {"warm_up": WARM_UP, "then": arguments.requests},
        "different": len(asked),
        "kinds": dict(Counter(name for one in asked for name in one.kinds)),
        "seconds": round(time.monotonic() - began, 1),
        "outcomes": dict(sorted(soak.tally.outcomes.items())),
        "memory_bytes": {"after_warm_up": memory[0], "at_the_end": memory[1], "peak": peak},
        "left": late,
        "counters": {
            name: value for name, value in counters.items() if name.startswith("paceline") and "_bucket" not in name
        },
        "failures": failures,
    }
    write(arguments.out, record)
    print(json.dumps({name: record[name] for name in ("seconds", "outcomes", "memory_bytes", "left")}, indent=1))
    for failure in failures:
        print(json.dumps(failure)[:1500])
    sys.exit(bool(failures))


if __name__ == "__main__":
    run(main)
