from __future__ import annotations

import contextlib
import signal
import socket
import textwrap
from collections.abc import Callable, Iterator

import httpx
import pytest
from forked import Parent, Program
from scripted import eventually

from paceline.errors import LoadError
from paceline.server.run import serve
from paceline.server.service import Backend

PROGRAM = """
import os, signal, sys, threading, time
from scripted import *
from paceline.errors import LoadError
from paceline.server import run
from paceline.server.options import ServerOptions

engine = ScriptedEngine(until_cancelled("Hello"))

def backend():
    return Backend(engine, ByteTokenizer(), PlainTemplate())

{load}
options = ServerOptions(drain_timeout={drain})
code = run.serve(load, port={port}, options=options, say=lambda line: print(line, flush=True))
print("closed", engine.closed, flush=True)
sys.exit(code)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


Serving = Callable[..., contextlib.AbstractContextManager[Program]]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Runs ``PROGRAM`` with this ``load``."""
    parent = Parent(tmp_path_factory.mktemp("outputs"))

    @contextlib.contextmanager
    def run(load: str, port: int, drain: float = 0.3) -> Iterator[Program]:
        process = Program(parent, PROGRAM.format(load=textwrap.dedent(load), port=port, drain=drain))
        try:
            yield process
        finally:
            process.kill()

    yield run
    parent.close()


def health(port: int) -> int | None:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code
    except httpx.TransportError:
        return None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_closes_the_engine_and_exits_with_0(number: signal.Signals, serving: Serving) -> None:
    port = free_port()
    with serving("load = backend", port) as process:
        assert eventually(lambda: health(port) == 200, 20)
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=10) as response:
            lines = (line for line in response.iter_lines() if line)
            assert "role" in next(lines) and "Hello" in next(lines)
            process.send_signal(number)
            assert [line for line in lines if "shutting down" in line]
        out, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")
    listening, closed = out.splitlines()
    assert f"http://127.0.0.1:{port}/v1" in listening and "fp_scripted" in listening
    assert closed == "closed True"


def test_a_signal_lets_a_running_answer_end(serving: Serving) -> None:
    """The client hears all of it, and nobody new is let in."""
    port = free_port()
    slow = """
    def script(request):
        for letter in b"Hello":
            time.sleep(0.2)
            yield Emission(request.id, (letter,))
        yield Emission(request.id, (END,), "stop")

    engine.script = script
    load = backend
    """
    with serving(slow, port, drain=20) as process:
        assert eventually(lambda: health(port) == 200, 20)
        body = {"prompt": "hi", "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=10) as response:
            lines = (line for line in response.iter_lines() if line)
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            assert eventually(lambda: health(port) is None)
            rest = list(lines)
        _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")
    assert "error" not in first and rest[-1] == "data: [DONE]"
    assert sum('"text": "' in line or '"text":"' in line for line in [first, *rest]) >= 5


def test_a_body_that_does_not_come_does_not_hold_up_the_end(serving: Serving) -> None:
    port = free_port()
    with serving("load = backend", port) as process:
        assert eventually(lambda: health(port) == 200, 20)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
            )
            assert health(port) == 200  # so the server has seen what was sent before
            process.send_signal(signal.SIGTERM)
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")
    assert answer.startswith(b"HTTP/1.1 503") and b"shutting down" in answer


def test_health_is_503_while_the_engine_loads(serving: Serving) -> None:
    port = free_port()
    with serving("load = threading.Event().wait", port) as process:
        assert eventually(lambda: health(port) == 503, 20)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert process.returncode == 0


def test_an_engine_that_is_loaded_too_late_is_closed(serving: Serving) -> None:
    load = """
    def load():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        return backend()

    import atexit
    atexit.register(lambda: print("in the end", eventually(lambda: engine.closed)))
    """
    with serving(load, free_port()) as process:
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert "Serving" not in out and "in the end True" in out


def test_a_load_that_fails_because_of_a_signal_is_no_fault(serving: Serving) -> None:
    load = """
    def load():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        raise LoadError("the engine process ended")
    """
    with serving(load, free_port()) as process:
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ("def load(): raise LoadError('model.gguf: wrong magic')", "error: cannot load: model.gguf: wrong magic\n"),
        ("def load(): raise MemoryError('no room')", "error: cannot load: no room\n"),
    ],
)
def test_a_failed_load_is_one_line_and_exit_code_1(load: str, expected: str, serving: Serving) -> None:
    with serving(load, free_port()) as process:
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (1, expected)


def test_a_port_in_use_is_one_line_and_exit_code_1(serving: Serving) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with serving("def load(): raise AssertionError('nothing may be loaded')", port) as process:
            _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (1, f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n")


def test_a_dead_engine_ends_the_process_with_1(serving: Serving) -> None:
    port = free_port()
    load = """
    def load():
        threading.Timer(0.3, lambda: setattr(engine, "dead", True)).start()
        return backend()
    """
    with serving(load, port) as process:
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (1, "error: the engine has stopped\n")
    assert "closed True" in out


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("256.0.0.1", 8000), ("a..b", 8000)])
def test_an_address_that_cannot_be_is_one_line(host: str, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> Backend:
        raise LoadError("nothing may be loaded")

    assert serve(load, host=host, port=port) == 1
    assert capsys.readouterr().err.startswith(f"error: cannot listen on {host}:{port}: ")
