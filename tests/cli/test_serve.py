"""A real ``paceline serve`` on the demo pair: processes, signals, sockets and OpenAI's own client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

QUESTION = [{"role": "user", "content": "Tom has 3 boxes with 4 pencils each. How many pencils does he have?"}]


class Server:
    """``paceline serve`` with these options, on a free port, up and answering."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "paceline.cli", "serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        found = eventually(lambda: next((m for m in map(address, list(self.log)) if m), None), 60)
        assert found, f"the server did not start: {self.log}"
        self.base: str = found

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.base + path, json=body, timeout=60)

    def metric(self, name: str) -> float:
        text = httpx.get(self.base.removesuffix("/v1") + "/metrics", timeout=10).text
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name + " ")))

    @property
    def engine(self) -> int:
        """The process id of the engine."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for file in children for pid in file.read_text().split()]
        return next(pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def end(self) -> int:
        """Wait for the process to end by itself."""
        status = self.process.wait(timeout=20)
        self._reader.join(timeout=10)
        return status

    def close(self) -> None:
        self.process.terminate()
        self.end()


def address(line: str) -> str | None:
    found = re.search(r"Serving .* on (http://\S+/v1) ", line)
    return found[1] if found else None


def eventually(condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base, api_key="none", max_retries=0)


def test_the_log_says_what_is_served(server: Server) -> None:
    log = "".join(server.log)
    for part in ("SWA layers: 3/3 (window=2048)", "fixed DFlash2 width=8", "6 lanes x 8192 tokens", "arithmetic pl-"):
        assert part in log
    assert all(re.match(r"[\d-]+ [\d:,]+ INFO paceline\.(engine|server) ", line) for line in server.log), log


def test_openai_client(server: Server, client: Any) -> None:  # Any: OpenAI's types leave out what the server may omit
    whole = client.chat.completions.create(model="any", messages=QUESTION, temperature=0, max_tokens=32)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens <= 32 and whole.system_fingerprint.startswith("pl-")
    stream = client.chat.completions.create(
        model="any", messages=QUESTION, temperature=0, max_tokens=32, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == whole.usage
    completion = client.completions.create(model="any", prompt="def add(a, b):", temperature=0, max_tokens=8)
    assert completion.usage.completion_tokens == 8
    assert [model.id for model in client.models.list()] == [whole.model]


def test_several_answers_with_logprobs(server: Server, client: Any) -> None:
    """Through the engine's process: whole, streamed, and the first alone."""
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": QUESTION,
        "seed": 5,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked, n=3)
    alone = client.chat.completions.create(**asked)
    assert alone.choices[0] == whole.choices[0] and alone.usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({choice.message.content for choice in whole.choices}) > 1
    assert all(len(choice.logprobs.content) == 12 for choice in whole.choices)
    texts, entries = ["", "", ""], list[list[Any]]([[], [], []])
    for chunk in client.chat.completions.create(**asked, n=3, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        entries[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert entries == [choice.logprobs.content for choice in whole.choices]
    echoed = client.completions.create(
        model="demo", prompt="The quick brown", echo=True, logprobs=1, max_tokens=2, seed=5, n=2
    )
    for choice in echoed.choices:
        assert choice.text.startswith("The quick brown") and choice.logprobs.token_logprobs[0] is None
        ends = [*choice.logprobs.text_offset[1:], len(choice.text)]
        pieces = [choice.text[a:b] for a, b in zip(choice.logprobs.text_offset, ends, strict=True)]
        assert pieces == choice.logprobs.tokens


def test_a_client_that_leaves_frees_its_lane(server: Server) -> None:
    body = {"prompt": "x = [", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.base + "/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # httpx closes the connection when nobody holds this any more
        assert '"text":' in next(lines)
        assert server.metric("paceline_lanes") == 1
    assert eventually(lambda: server.metric("paceline_lanes") == 0, 5)
    assert server.metric('paceline_engine_requests_finished_total{finish_reason="cancelled"}') == 1


def test_bad_requests_are_refused_while_another_streams_unharmed(server: Server, client: Any) -> None:
    good = {
        "model": "any",
        "messages": QUESTION,
        "temperature": 0.9,
        "seed": 5,
        "max_tokens": 120,
        "extra_body": {"ignore_eos": True},
    }
    expected = client.chat.completions.create(**good).choices[0].message.content
    pieces: list[str] = []

    def stream() -> None:
        for chunk in client.chat.completions.create(**good, stream=True):
            pieces.append(chunk.choices[0].delta.content or "")

    thread = threading.Thread(target=stream)
    thread.start()
    assert eventually(lambda: server.metric("paceline_lanes") == 1, 10)
    url = server.base + "/chat/completions"
    malformed = httpx.post(url, content=b'{"messages": [', headers={"content-type": "application/json"}, timeout=60)
    hot = server.post("/chat/completions", messages=QUESTION, temperature="hot")
    none = server.post("/chat/completions", messages=QUESTION, n=0)
    long = server.post("/chat/completions", messages=[{"role": "user", "content": "word " * 1_000_000}])
    still_running = thread.is_alive()
    thread.join(timeout=60)

    answers = [malformed, hot, none, long]
    assert [answer.status_code for answer in answers] == [400] * 4
    errors = [answer.json()["error"] for answer in answers]
    assert [error["param"] for error in errors] == [None, "temperature", "n", "messages"]
    assert errors[3]["code"] == "context_length_exceeded" and "8192" in errors[3]["message"]
    assert still_running, "the stream ended before the bad requests did: raise max_tokens"
    assert "".join(pieces) == expected


def test_a_key_from_the_environment_and_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "sesame")
    server = Server("--no-speculation", "--max-ctx", "256", "--max-concurrency", "1", "--model-name", "tiny/name")
    engine = server.engine
    assert httpx.get(server.base + "/models", timeout=10).status_code == 401
    listed = openai.OpenAI(base_url=server.base, api_key="sesame", max_retries=0).models.list()
    assert [model.id for model in listed] == ["tiny/name"]
    assert any("speculation off" in line for line in server.log)

    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert not Path(f"/proc/{engine}").exists()
    assert not [line for line in server.log if "INFO" not in line]


def test_a_killed_engine_is_a_503_and_ends_the_server_with_status_1() -> None:
    server = Server("--max-concurrency", "1", "--max-ctx", "2048")
    waiting: list[httpx.Response] = []
    body = {"prompt": "x = [", "max_tokens": 2000, "ignore_eos": True}
    thread = threading.Thread(target=lambda: waiting.append(server.post("/completions", **body)))
    thread.start()
    assert eventually(lambda: server.metric("paceline_lanes") == 1, 10)
    os.kill(server.engine, signal.SIGKILL)
    thread.join(timeout=20)
    assert server.end() == 1
    assert waiting[0].status_code == 503
    assert waiting[0].json()["error"]["code"] == "engine_dead"
    assert server.log[-1] == "error: the engine has stopped\n"
    assert "Traceback" not in "".join(server.log)
