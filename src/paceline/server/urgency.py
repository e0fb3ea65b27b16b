"""How urgent a request is, and whether there is room for it to wait."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import DeadlineExceeded, InvalidRequest, QueueFull
from paceline.types import Request

MAX_PRIORITY = 100
MAX_TIMEOUT = 86_400.0
MAX_RETRY_SECONDS = 60
_FADE = 0.9
"""By which what is known of earlier requests shrinks with each that ends."""


@dataclass(frozen=True, slots=True)
class Urgency:
    """``priority``: a lower one goes first. ``timeout``: seconds from the request's arrival to the end of its answer; None
    is the server's default."""

    priority: int = 0
    timeout: float | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Urgency:
        """From a request's body; ``InvalidRequest`` names the field at fault."""
        priority, timeout = body.get("priority"), body.get("timeout")
        if priority is None:
            priority = 0
        if type(priority) is not int or abs(priority) > MAX_PRIORITY:
            raise InvalidRequest(
                f"priority must be an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}], got {priority!r}", param="priority"
            )
        if timeout is not None and (type(timeout) not in (int, float) or not 0 < timeout <= MAX_TIMEOUT):
            raise InvalidRequest(f"timeout must be seconds in (0, {MAX_TIMEOUT:g}], got {timeout!r}", param="timeout")
        return cls(priority, timeout)

    def left(self, arrived: float, default: float | None) -> float | None:
        """Seconds that are left of its time, ``DeadlineExceeded`` if none are; ``arrived`` is in monotonic seconds."""
        timeout = default if self.timeout is None else self.timeout
        if timeout is None:
            return None
        left = arrived + timeout - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"the request had {timeout:g} s, which were over before it could begin")
        return left

    def urging(self, request: Request, arrived: float, default: float | None) -> Request:
        """The engine's request, with what is left of its time."""
        return replace(request, priority=self.priority, timeout=self.left(arrived, default))


class Places:
    """A bound on the answers that wait for a lane, and how long answers take."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._seconds = self._weight = 0.0

    def check(self, new: int, live: int, lanes: int) -> None:
        """Refuse ``new`` answers beside ``live`` that run or wait, if more would wait than may: ``QueueFull``, or for more
        than would ever fit ``InvalidRequest``."""
        room = lanes + self.most
        if new > room:
            raise InvalidRequest(f"the request asks for {new} answers; {lanes} run at a time and {self.most} may wait")
        if live + new > room:
            raise QueueFull(
                f"{live} answers run or wait and {new} more are asked for; {lanes} run at a time and {self.most} may wait",
                self._retry_seconds(lanes),
            )

    def ended(self, seconds: float) -> None:
        """An answer has ended ``seconds`` after it was asked for."""
        self._seconds = _FADE * self._seconds + seconds
        self._weight = _FADE * self._weight + 1.0

    def _retry_seconds(self, lanes: int) -> int:
        """About how long until the next one ends."""
        mean = self._seconds / self._weight if self._weight else 0.0
        return min(max(1, math.ceil(mean / lanes)), MAX_RETRY_SECONDS)
