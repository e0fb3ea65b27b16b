"""An engine in a process of its own: the same dataclasses over one pipe, and each side notices the other's death.

A busy Python thread beside the loop slows every small torch call, so a server must not share its process with the engine.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

from paceline.config import EngineOptions
from paceline.engine.build import build
from paceline.engine.engine import Sinks
from paceline.engine.loop import Cancel, EngineLoop, Message, Stop, Submit
from paceline.engine.trace import Trace
from paceline.errors import EngineDead, PacelineError
from paceline.logs import LogFormat, start_logging
from paceline.types import Emission, EngineInfo, EngineStats, Request

SERVER_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Often sent to the whole process group; but the server decides when its engine stops, so the engine ignores them."""

log = logging.getLogger("paceline.engine")


@dataclass(frozen=True, slots=True)
class Ready:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Refused:
    """Loading failed: the error to raise on the other side."""

    error: PacelineError


@dataclass(frozen=True, slots=True)
class Turn:
    emissions: list[Emission]
    stats: EngineStats


class EngineProcess:
    """An ``EngineHandle`` over a pipe. The constructor returns when the engine is loaded, or raises why it is not.

    ``trace`` names a file to which a line per round is added.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        log_level: int = logging.INFO,
        log_format: LogFormat = "text",
        trace: str | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_main, args=(options, theirs, log_level, log_format, trace), name="paceline-engine", daemon=True
        )
        atexit.register(self._kill)
        with _signals_blocked():
            self._process.start()
        theirs.close()
        self.info = self._wait_until_ready()
        self._sinks = Sinks(self.cancel)
        self._stats = EngineStats()
        self._outgoing: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="paceline-engine-writer", daemon=True).start()
        self._reader = threading.Thread(target=self._read, name="paceline-engine-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def submit(self, request: Request, sink: Callable[[Emission], None]) -> None:
        self._sinks.add(request.id, sink)
        self._outgoing.put(Submit(request))

    def cancel(self, request_id: str) -> None:
        self._outgoing.put(Cancel(request_id))

    def stats(self) -> EngineStats:
        return self._stats

    def alive(self) -> bool:
        return self._sinks.dead is None

    def close(self) -> None:
        self._outgoing.put(Stop())
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
        self._reader.join(timeout=10)
        atexit.unregister(self._kill)

    def _kill(self) -> None:
        """At the end of a program that has not closed its engine, or not loaded it yet, multiprocessing would send
        SIGTERM, which the engine ignores, and wait."""
        if self._process.pid is not None:
            self._process.kill()

    def _write(self) -> None:
        """Callers must not block, and a prompt may be larger than the pipe's buffer. A message to a dead engine is
        dropped: the reader tells everybody."""
        message: Message | None = None
        while not isinstance(message, Stop):
            message = self._outgoing.get()
            try:
                self._pipe.send(message)
            except OSError:
                return

    def _wait_until_ready(self) -> EngineInfo:
        try:
            message = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise EngineDead(f"the engine process ended while loading, exit code {self._process.exitcode}") from None
        if isinstance(message, Refused):
            self._process.join()
            raise message.error
        assert isinstance(message, Ready)
        return message.info

    def _read(self) -> None:
        try:
            while True:
                turn: Turn = self._pipe.recv()
                self._stats = turn.stats
                self._sinks.deliver(turn.emissions)
        except (EOFError, OSError):
            self._process.join()
            self._sinks.die(f"the engine process ended, exit code {self._process.exitcode}")


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process started here has these signals blocked: its imports take seconds, in which it cannot ignore them yet."""
    resource_tracker.ensure_running()  # starting it would unblock them again
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SERVER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _main(options: EngineOptions, pipe: Connection, log_level: int, log_format: LogFormat, trace: str | None) -> None:
    """The engine process."""
    for number in SERVER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    start_logging(log_level, log_format)
    try:
        _run(options, pipe, trace)
    except BrokenPipeError:
        os._exit(1)  # the server is gone: nobody is left to answer
    except Exception:
        log.exception("the engine died")
        sys.exit(1)


def _run(options: EngineOptions, pipe: Connection, trace_path: str | None) -> None:
    try:
        trace = Trace(trace_path) if trace_path else None
        parts = build(options)
    except PacelineError as error:
        pipe.send(Refused(error))
        return
    pipe.send(Ready(parts.info))
    if trace is not None:
        trace.begin(parts.info)

    def outbox(emissions: list[Emission], stats: EngineStats) -> None:
        pipe.send(Turn(emissions, stats))
        if trace is not None:
            trace.write()

    EngineLoop(
        parts.runner,
        parts.scheduler,
        PipeInbox(pipe),
        outbox,
        coalesce_seconds=options.admission_coalesce_ms / 1000,
        observe=trace.observe if trace is not None else None,
    ).run()


class PipeInbox:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def get(self, timeout: float | None) -> Message | None:
        try:
            return self._pipe.recv() if self._pipe.poll(timeout) else None
        except (EOFError, OSError):
            return Stop()
