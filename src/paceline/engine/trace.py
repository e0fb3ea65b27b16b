"""A trace of rounds as JSON lines: who was in each, as what, how wide, what was kept, and how long it took."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.engine.plan import Round, RoundResult
from paceline.errors import ConfigError
from paceline.types import EngineInfo

log = logging.getLogger("paceline.engine")

_STAGES = ("draft", "verify", "prefill", "commit")


class Trace:
    """``observe`` takes note of a round, ``write`` writes what was noted: that is left to a moment when the device computes.

    Lines are added to the file. ``ConfigError`` when it cannot be opened; one that cannot be written to any more, such as
    when the disk is full, ends the trace and not the engine.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._noted: list[tuple[float, Round, RoundResult]] = []
        self._rounds = 0
        try:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"--trace {path}: {error.strerror}", param="trace") from None

    def begin(self, info: EngineInfo) -> None:
        """The line before the rounds: which engine it is."""
        engine = {"engine": info.model_name, "fingerprint": info.fingerprint, "lanes": info.max_concurrency}
        self._put([engine | {"time": time.time()}])

    def observe(self, round: Round, result: RoundResult) -> None:
        self._noted.append((time.time(), round, result))

    def write(self) -> None:
        noted, self._noted = self._noted, []
        self._put(self._line(*one) for one in noted)

    def _line(self, ended: float, spans: Round, result: RoundResult) -> dict[str, Any]:
        self._rounds += 1
        took = {stage: _microseconds(getattr(result.times, stage)) for stage in _STAGES}
        return {"round": self._rounds, "time": ended, "lanes": list(_lanes(spans, result)), "us": took}

    def _put(self, lines: Iterable[dict[str, Any]]) -> None:
        if self._file.closed:
            return
        try:
            for line in lines:
                self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            log.error("the trace ends here, %s: %s", self._path, error.strerror)
            self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # it tries once more what could not be written
            self._file.close()


def _lanes(round: Round, result: RoundResult) -> Iterator[dict[str, Any]]:
    for span, tokens in zip(round.verify, result.verify, strict=True):
        kind, keep = ("verify", len(tokens)) if span.known is None else ("restore", span.length)
        yield _lane(span.lane, span.request.id, kind) | {"start": span.start, "width": span.length, "keep": keep}
    for chunk in round.prefill:
        lane = _lane(chunk.lane, chunk.request.id, "prefill")
        yield lane | {"start": chunk.start, "width": chunk.length, "keep": chunk.length}
    for chunk in round.reading:
        lane = _lane(chunk.lane, chunk.request.id, "reading")
        yield lane | {"start": chunk.start, "width": chunk.length, "keep": 0}
    for fork in round.forks:
        yield _lane(fork.lane, fork.request.id, "fork") | {"source": fork.source}


def _lane(lane: int, request: str, kind: str) -> dict[str, Any]:
    return {"lane": lane, "request": request, "kind": kind}


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)
