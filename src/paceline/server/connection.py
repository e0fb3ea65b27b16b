"""A connection of uvicorn's that does not wait for ever for the head of a request."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Closes itself when a request's line and headers have not come within ``timeout_keep_alive`` seconds, counted from the
    start of the connection or from the first piece of them. (uvicorn counts only while nothing at all comes.)"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._await_nothing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_nothing()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._overdue is None:
            self._overdue = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def _await_nothing(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
