"""From a request to its response, whole or as a stream of events, in the words of any API."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from paceline.errors import LaneFailed, PacelineError
from paceline.parsing import Event
from paceline.server.aligned import ScoredToken
from paceline.server.http import json_response, read_body
from paceline.server.protocol import parse_json
from paceline.server.replies import Choice, Reply, Usage
from paceline.server.service import Generation, Service
from paceline.server.sse import DONE, EventStream, event, unless, unless_disconnected

logger = logging.getLogger("paceline.server")


class Asked(Protocol):
    """What is needed of a checked request."""

    @property
    def stream(self) -> bool: ...


A = TypeVar("A", bound=Asked)


async def answer(
    service: Service,
    request: Request,
    read: Callable[[dict[str, Any]], tuple[A, Reply]],
    start: Callable[[A, int, float], Coroutine[Any, Any, Generation]],
) -> Response:
    """Answer a request of any API. ``read`` checks its body, and says in which words it is answered; ``start`` is given what
    it asks for, the body's size and when it arrived."""
    arrived = time.monotonic()
    service.ready()
    body = await unless(service.closing(), read_body(request, service.options))
    asked, reply = await service.work(len(body), lambda: read(parse_json(body)))
    generation = await unless_disconnected(request.receive, start(asked, len(body), arrived))
    if asked.stream:
        return EventStream(_events(generation, reply), lambda: service.close(generation))
    try:
        return json_response(await unless_disconnected(request.receive, _whole(generation, reply)))
    finally:
        service.close(generation)


async def _whole(generation: Generation, reply: Reply) -> dict[str, Any]:
    texts: list[list[str]] = [[] for _ in range(generation.choices)]
    logprobs: list[list[ScoredToken]] = [[] for _ in range(generation.choices)]
    events: list[list[Event]] = [[] for _ in range(generation.choices)]
    tokens: list[list[int]] = [[] for _ in range(generation.choices)]
    choices: dict[int, Choice] = {}
    async for delta in generation.deltas():
        texts[delta.index].append(delta.text)
        events[delta.index].extend(delta.events)
        logprobs[delta.index].extend(delta.logprobs)
        tokens[delta.index].extend(delta.tokens)
        if delta.finish_reason is not None:
            scores = logprobs[delta.index] if generation.scored else None
            text = "".join(texts[delta.index])
            ids = (generation.prompts[delta.index], tokens[delta.index])
            choices[delta.index] = Choice(text, delta.finish_reason, scores, events[delta.index], delta.stop, *ids)
    ordered = [choices[index] for index in range(generation.choices)]
    return reply.final(ordered, _usage(generation))


def _usage(generation: Generation) -> Usage:
    return Usage(generation.prompt_tokens, generation.completion_tokens, generation.thought_tokens)


async def _events(generation: Generation, reply: Reply) -> AsyncGenerator[bytes, None]:
    """The stream of a reply. An error after the first byte cannot change the status: it becomes the last event."""
    try:
        for value in reply.opening(generation.prompts, _usage(generation)):
            yield event(value)
        async for delta in generation.deltas():
            for value in reply.chunks(delta.index, delta.text, delta.events, delta.logprobs, delta.tokens):
                yield event(value)
            if delta.finish_reason is not None:
                for value in reply.end(delta.index, delta.finish_reason, delta.stop):
                    yield event(value)
        for value in reply.closing(_usage(generation)):
            yield event(value)
        if reply.ends_with_done:
            yield DONE
    except PacelineError as error:
        for value in reply.failed(error):
            yield event(value)
    except Exception:
        logger.exception("a stream failed")
        for value in reply.failed(LaneFailed("internal error")):
            yield event(value)
