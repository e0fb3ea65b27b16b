"""How long a connection waits for the head of a request."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from paceline.server.connection import Connection

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = PlainTextResponse("fine")
    config = uvicorn.Config(app, http=Connection, timeout_keep_alive=1, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join()


def read_answer(client: socket.socket) -> None:
    answer = b""
    while not answer.endswith(b"fine"):
        piece = client.recv(4096)
        assert piece, "the connection was closed"
        answer += piece


def seconds_until_closed(client: socket.socket, drip: bytes) -> float:
    """Send the drip again and again; how long that goes well."""
    began = time.monotonic()
    client.settimeout(0.1)
    while time.monotonic() - began < 5:
        try:
            if drip:
                client.sendall(drip)
            if not client.recv(4096):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - began


@pytest.mark.parametrize("drip", [b"", b"x"], ids=["silent", "dripping"])
@pytest.mark.parametrize("before", [b"", REQUEST], ids=["new", "kept-alive"])
def test_a_head_that_does_not_come_closes_the_connection(address: tuple[str, int], drip: bytes, before: bytes) -> None:
    with socket.create_connection(address, timeout=5) as client:
        if before:
            client.sendall(before)
            read_answer(client)
        if drip:
            client.sendall(b"GET / HTTP/1.1\r\nX-Long: ")
        assert 0.5 < seconds_until_closed(client, drip) < 3


def test_requests_within_the_time_go_on_and_on(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=5) as client:
        for _ in range(8):
            client.sendall(REQUEST[:10])
            time.sleep(0.2)
            client.sendall(REQUEST[10:])
            read_answer(client)
