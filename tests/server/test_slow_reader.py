"""A client that stops reading, over a socket: its lane ends, it alone, with a typed error."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted import Running, bursts, eventually, running

from paceline.types import Emission, Request

SLOW, STEADY = "slow", "steady"
WORDS = "0123456789" * 10
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def endless(server: Running) -> None:
    """An engine that speaks to slow clients until it is told to stop, and to others for a while."""

    def script(request: Request) -> Iterator[Emission]:
        if bytes(request.prompt).decode() == STEADY:
            yield from paced(bursts(*[WORDS] * 40)(request), 0.005)
        else:
            while request.id not in server.engine.cancelled:
                yield Emission(request.id, tuple(WORDS.encode()))
                time.sleep(0.0005)
            yield Emission(request.id, (), "cancelled")

    server.engine.script = script


def paced(emissions: Iterator[Emission], seconds: float) -> Iterator[Emission]:
    for emission in emissions:
        time.sleep(seconds)
        yield emission


def silent(server: Running) -> socket.socket:
    """A client that asks for a stream and reads nothing of it."""
    content = json.dumps({"prompt": SLOW, "stream": True}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    )
    client.sendall(head.encode() + b"Connection: close\r\n\r\n" + content)
    client.settimeout(10)
    return client


def rest(client: socket.socket) -> str:
    return b"".join(iter(lambda: client.recv(65536), b"")).decode()


def texts(response: httpx.Response) -> str:
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_a_full_buffer_ends_the_lane_of_a_silent_client_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.server")
    with running(stream_buffer_tokens=5000, client_timeout=30) as server:
        endless(server)
        steady: list[httpx.Response] = []
        body = {"prompt": STEADY, "stream": True}
        other = threading.Thread(
            target=lambda: steady.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=20))
        )
        with silent(server) as client:
            other.start()
            assert eventually(lambda: server.engine.cancelled), "the lane was not cancelled"
            other.join()
            assert texts(steady[0]) == WORDS * 40
            (slow,) = [request.id for request in server.engine.submitted if bytes(request.prompt).decode() == SLOW]
            assert set(server.engine.cancelled) == {slow}
            answer = rest(client)  # whoever reads on sees what was kept, and why there is no more
        last = answer.split("data: ")[-1].split("\n")[0]
        error = json.loads(last)["error"]
        assert error["code"] == "client_too_slow" and "5000" in error["message"]
        assert answer.count(WORDS) >= 50
        assert eventually(lambda: not server.service._generations)
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'paceline_generations_total{endpoint="completions",finish_reason="error"} 1.0' in metrics
    ended: list[Any] = [record.fields for record in caplog.records if record.message == "request ended"]  # type: ignore[attr-defined]
    assert [fields["error"] for fields in ended if fields["finish_reason"] == "error"] == ["client_too_slow"]


def test_time_ends_the_lane_of_a_silent_client_and_later_its_connection() -> None:
    with running(stream_buffer_tokens=10**9, client_timeout=0.3) as server:
        endless(server)
        began = time.monotonic()
        with silent(server) as client:
            assert eventually(lambda: server.engine.cancelled), "the lane was not cancelled"
            assert time.monotonic() - began > 0.3
            assert eventually(lambda: not server.service._generations), "the connection was not given up"
            assert "[DONE]" not in received_before_the_reset(client)


def received_before_the_reset(client: socket.socket) -> str:
    received = b""
    try:
        while piece := client.recv(65536):
            received += piece
    except OSError:
        pass
    return received.decode()


def test_a_client_that_reads_slowly_but_steadily_gets_everything() -> None:
    with running(stream_buffer_tokens=5000, client_timeout=0.3) as server:
        server.engine.script = bursts(*[WORDS] * 40)
        body = {"prompt": STEADY, "stream": True}
        received = ""
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as response:
            for piece in response.iter_text(1024):
                received += piece
                time.sleep(0.02)
        assert received.count(WORDS) == 40 and "[DONE]" in received
        assert server.engine.cancelled == []


def test_a_body_that_stops_coming_is_a_408() -> None:
    with running(client_timeout=0.1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            head = (
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            client.sendall(head)
            answer = rest(client)
    assert answer.startswith("HTTP/1.1 408") and "client_too_slow" in answer and "0.1 s" in answer
