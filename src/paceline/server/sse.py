"""Server-sent events, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.server.replies import dump

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """One event whose data is a JSON object. An object with a ``type`` gives the event its name too."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + dump(value) + b"\n\n"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled as soon as the client leaves; then ``ClientDisconnect`` is raised.

    The request's body must have been read: from then on the only message that ``receive`` can bring is the disconnect.
    """
    return await unless(_disconnected(receive), work)


async def unless(ending: Coroutine[Any, Any, NoReturn], work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled as soon as ``ending`` raises; then that is raised."""
    tasks = working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(ending)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else waiting.result()
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


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
