"""What waits for a client that reads slower than its lanes generate."""

from __future__ import annotations

import time

from paceline.errors import ClientTooSlow
from paceline.server.options import ServerOptions


class Unread:
    """Counts the tokens that wait, and for how long nothing of them has been taken."""

    def __init__(self, options: ServerOptions) -> None:
        self._most, self._seconds = options.stream_buffer_tokens, options.client_timeout
        self._tokens = 0
        self._since = 0.0

    def add(self, tokens: int) -> ClientTooSlow | None:
        """More waits. The error, if that is too much or has waited for too long."""
        now = time.monotonic()
        if not self._tokens:
            self._since = now
        self._tokens += tokens
        waited = now - self._since
        if self._tokens <= self._most and waited <= self._seconds:
            return None
        return ClientTooSlow(
            f"the client left {self._tokens} tokens unread and took none for {waited:.1f} s; "
            f"the limits are {self._most} tokens and {self._seconds:g} s"
        )

    def take(self, tokens: int) -> None:
        self._tokens -= tokens
        self._since = time.monotonic()
