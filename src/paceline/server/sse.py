"""Server-sent events, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.server.replies import dump

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """One event whose data is a JSON object."""
    return b"data: " + dump(value) + b"\n\n"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled as soon as the client leaves; then ``ClientDisconnect`` is raised.

    The request's body must have been read: from then on the only message that ``receive`` can bring is the disconnect.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A response that sends events until they end or the client leaves. ``close`` is called in every case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        # Proxies such as nginx would collect the events otherwise.
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await unless_disconnected(receive, self.stream_response(send))
        except ClientDisconnect:
            pass  # nobody is left to tell
        finally:
            self._close()
