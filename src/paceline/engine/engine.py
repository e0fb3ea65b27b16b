"""An engine in a thread of this process."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from paceline.config import EngineOptions
from paceline.engine.build import EngineParts, build
from paceline.engine.loop import Cancel, EngineLoop, Message, Stop, Submit
from paceline.engine.plan import Round, RoundResult
from paceline.errors import EngineDead
from paceline.types import Emission, EngineInfo, EngineStats, Request

log = logging.getLogger("paceline.engine")

Sink = Callable[[Emission], None]


class Sinks:
    """Who hears of which request. Shared by the handles in a thread and over a pipe. ``cancel`` ends a request."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()
        self._sinks: dict[str, Sink] = {}
        self.dead: str | None = None

    def add(self, request_id: str, sink: Sink) -> None:
        with self._lock:
            if self.dead is not None:
                raise EngineDead(self.dead)
            assert request_id not in self._sinks, f"request id {request_id} is in use"
            self._sinks[request_id] = sink

    def deliver(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            with self._lock:
                ended = emission.finish_reason is not None
                sink = (self._sinks.pop if ended else self._sinks.get)(emission.request_id, None)
            if sink is not None and not self._heard(sink, emission) and not ended:
                with self._lock:
                    self._sinks.pop(emission.request_id, None)
                self._cancel(emission.request_id)

    def _heard(self, sink: Sink, emission: Emission) -> bool:
        """Whether the listener took it. One that raises loses its own request, not everybody's engine."""
        try:
            sink(emission)
        except Exception:
            log.exception("nobody listens to request %s", emission.request_id)
            return False
        return True

    def die(self, reason: str) -> None:
        """Tell everybody who waits, and everybody who comes later."""
        with self._lock:
            if self.dead is None:
                self.dead = reason
            waiting, self._sinks = self._sinks, {}
        for request_id, sink in waiting.items():
            self._heard(sink, Emission(request_id, (), "error", None, reason))


class Engine:
    """An ``EngineHandle`` whose loop is a thread. ``options`` are loaded by ``build`` unless ``parts`` are given.

    Loading happens in that thread too: on a CPU each thread that computes gets a team of OpenMP workers, and where teams
    outnumber the cores the library stops spinning, which makes every small operation several times slower.
    """

    parts: EngineParts
    info: EngineInfo

    def __init__(
        self,
        options: EngineOptions,
        parts: EngineParts | None = None,
        observe: Callable[[Round, RoundResult], None] | None = None,
    ) -> None:
        self._sinks = Sinks(self.cancel)
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stats = EngineStats()
        loaded: Future[EngineParts] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(options, parts, observe, loaded), name="paceline-engine", daemon=True
        )
        self._thread.start()
        self.parts = loaded.result()
        self.info = self.parts.info

    def submit(self, request: Request, sink: Sink) -> None:
        self._sinks.add(request.id, sink)
        self._inbox.put(Submit(request))

    def cancel(self, request_id: str) -> None:
        self._inbox.put(Cancel(request_id))

    def stats(self) -> EngineStats:
        return self._stats

    def alive(self) -> bool:
        return self._sinks.dead is None

    def close(self) -> None:
        self._inbox.put(Stop())
        self._thread.join()

    def _receive(self, emissions: list[Emission], stats: EngineStats) -> None:
        self._stats = stats
        self._sinks.deliver(emissions)

    def _run(
        self,
        options: EngineOptions,
        parts: EngineParts | None,
        observe: Callable[[Round, RoundResult], None] | None,
        loaded: Future[EngineParts],
    ) -> None:
        try:
            parts = parts or build(options)
        except BaseException as error:
            loaded.set_exception(error)
            return
        loop = EngineLoop(
            parts.runner,
            parts.scheduler,
            QueueInbox(self._inbox),
            self._receive,
            coalesce_seconds=options.admission_coalesce_ms / 1000,
            observe=observe,
        )
        loaded.set_result(parts)
        try:
            loop.run()
            self._sinks.die("the engine has been closed")
        except BaseException as error:
            log.exception("the engine died")
            self._sinks.die(f"the engine died: {error}")


class QueueInbox:
    def __init__(self, messages: queue.SimpleQueue[Message]) -> None:
        self._messages = messages

    def get(self, timeout: float | None) -> Message | None:
        try:
            return self._messages.get(timeout=timeout) if timeout != 0 else self._messages.get_nowait()
        except queue.Empty:
            return None
