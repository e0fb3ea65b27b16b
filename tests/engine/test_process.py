"""The engine in a process of its own: it answers, and each side notices the other's death."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.config import EngineOptions
from paceline.engine.engine import Engine
from paceline.engine.process import EngineProcess
from paceline.errors import EngineDead, LoadError
from paceline.types import Emission, EngineHandle, Request, SamplingParams

OPTIONS = EngineOptions(max_concurrency=2, max_ctx=256, threads=1)
PATIENCE = 60.0


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    process = EngineProcess(OPTIONS)
    yield process
    process.close()


def requests(handle: EngineHandle, max_tokens: int) -> list[Request]:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=max_tokens, ignore_eos=True)
    return [Request.create(range(100 + i, 150 + i), params, handle.info) for i in range(3)]


def answers(handle: EngineHandle) -> list[tuple[int, ...]]:
    heard: queue.SimpleQueue[Emission] = queue.SimpleQueue()
    asked = requests(handle, 12)
    for request in asked:
        handle.submit(request, heard.put)
    tokens: dict[str, tuple[int, ...]] = {request.id: () for request in asked}
    ended = 0
    while ended < len(asked):
        emission = heard.get(timeout=PATIENCE)
        tokens[emission.request_id] += emission.tokens
        ended += emission.finish_reason is not None
    return list(tokens.values())


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def exists(pid: int) -> bool:
    """Whether the process runs (one that has ended and was not waited for does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_gives_the_tokens_of_an_engine_in_a_thread(process: EngineProcess) -> None:
    engine = Engine(OPTIONS)
    try:
        assert process.info == engine.info
        assert answers(process) == answers(engine)
        assert eventually(lambda: process.stats().requests_finished == {"length": 3})
        assert process.alive()
    finally:
        engine.close()


def test_cancel(process: EngineProcess) -> None:
    heard: queue.SimpleQueue[Emission] = queue.SimpleQueue()
    request = requests(process, 200)[0]
    process.submit(request, heard.put)
    heard.get(timeout=PATIENCE)
    process.cancel(request.id)
    while (emission := heard.get(timeout=PATIENCE)).finish_reason is None:
        pass
    assert emission.finish_reason == "cancelled"


def test_notices_that_the_engine_was_killed(process: EngineProcess) -> None:
    """The last test of the shared process."""
    heard: queue.SimpleQueue[Emission] = queue.SimpleQueue()
    waiting = requests(process, 200)
    for request in waiting:
        process.submit(request, heard.put)
    heard.get(timeout=PATIENCE)
    os.kill(process.pid, signal.SIGKILL)
    told: set[str] = set()
    while told != {request.id for request in waiting}:
        emission = heard.get(timeout=PATIENCE)
        if emission.finish_reason is not None:
            assert emission.finish_reason == "error" and "exit code -9" in (emission.error or "")
            told.add(emission.request_id)
    assert not process.alive()
    with pytest.raises(EngineDead, match="exit code -9"):
        process.submit(requests(process, 1)[0], heard.put)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_engine_ends_with_its_server() -> None:
    """The server is killed while its engine generates; the engine sees the closed pipe and ends by itself."""
    script = """
import sys, time
from paceline.config import EngineOptions
from paceline.engine.process import EngineProcess
from paceline.types import Request, SamplingParams
if __name__ == "__main__":
    process = EngineProcess(EngineOptions(max_concurrency=2, max_ctx=256, threads=1))
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    process.submit(Request.create([5, 6, 7], params, process.info), lambda emission: None)
    print(process.pid, flush=True)
    time.sleep(600)
"""
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        pid = int(server.stdout.readline())
        assert exists(pid)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert eventually(lambda: not exists(pid)), "the engine outlived its server"


def test_signals_to_the_group_do_not_reach_an_engine_that_loads() -> None:
    script = """
import os, signal, threading, time
from paceline.config import EngineOptions
from paceline.engine.process import EngineProcess
if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    stop = threading.Event()
    def signals():
        while not stop.wait(0.05):
            os.killpg(0, signal.SIGINT)
            os.killpg(0, signal.SIGTERM)
    threading.Thread(target=signals).start()
    try:
        EngineProcess(EngineOptions(max_concurrency=2, max_ctx=256, threads=1)).close()
    finally:
        stop.set()
"""
    program = [sys.executable, "-c", script]
    ended = subprocess.run(program, capture_output=True, text=True, start_new_session=True, timeout=PATIENCE)
    assert ended.returncode == 0 and "KeyboardInterrupt" not in ended.stderr, ended.stderr


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_a_program_that_does_not_close_its_engine_ends() -> None:
    script = """
from paceline.config import EngineOptions
from paceline.engine.process import EngineProcess
if __name__ == "__main__":
    process = EngineProcess(EngineOptions(max_concurrency=2, max_ctx=256, threads=1))
    print(process.pid, flush=True)
"""
    program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    try:
        assert program.wait(timeout=20) == 0
        assert not exists(pid)
    finally:
        program.kill()
        program.wait()
        program.stdout.close()
        if exists(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_model_that_cannot_be_loaded_is_this_side_s_error(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    with pytest.raises(LoadError, match="missing.gguf"):
        EngineProcess(EngineOptions(target=str(missing)))


def test_how_an_engine_died_is_one_line_of_its_log() -> None:
    script = """
import paceline.engine.process as process
def lost(*args):
    raise RuntimeError("the device is lost")
process._run = lost
process._main(None, None, 20, "json", None)
"""
    died = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    line = json.loads(died.stderr)
    assert (died.returncode, line["message"]) == (1, "the engine died")
    assert line["exception"].endswith("RuntimeError: the device is lost")
