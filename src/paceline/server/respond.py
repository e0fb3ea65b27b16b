"""From a generation to the HTTP response, whole or as a stream of events, in the words of any API."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from paceline.errors import LaneFailed, PacelineError
from paceline.parsing import Event
from paceline.server.aligned import ScoredToken
from paceline.server.http import json_response
from paceline.server.replies import Choice, Reply, Usage
from paceline.server.service import Generation, Service
from paceline.server.sse import DONE, EventStream, event, unless_disconnected

logger = logging.getLogger("paceline.server")


async def respond(service: Service, request: Request, generation: Generation, reply: Reply, stream: bool) -> Response:
    """The response to a request that has been submitted. The generation is closed in every case."""
    if stream:
        return EventStream(_events(generation, reply), lambda: service.close(generation))
    try:
        return json_response(await unless_disconnected(request.receive, _whole(generation, reply)))
    finally:
        service.close(generation)


async def _whole(generation: Generation, reply: Reply) -> dict[str, Any]:
    texts: list[list[str]] = [[] for _ in range(generation.choices)]
    logprobs: list[list[ScoredToken]] = [[] for _ in range(generation.choices)]
    events: list[list[Event]] = [[] for _ in range(generation.choices)]
    choices: dict[int, Choice] = {}
    async for delta in generation.deltas():
        texts[delta.index].append(delta.text)
        events[delta.index].extend(delta.events)
        logprobs[delta.index].extend(delta.logprobs)
        if delta.finish_reason is not None:
            scores = logprobs[delta.index] if generation.scored else None
            text = "".join(texts[delta.index])
            choices[delta.index] = Choice(text, delta.finish_reason, scores, events[delta.index], delta.stop)
    ordered = [choices[index] for index in range(generation.choices)]
    return reply.final(ordered, _usage(generation))


def _usage(generation: Generation) -> Usage:
    return Usage(generation.prompt_tokens, generation.completion_tokens, generation.thought_tokens)


async def _events(generation: Generation, reply: Reply) -> AsyncGenerator[bytes, None]:
    """The stream of a reply. An error after the first byte cannot change the status: it becomes the last event."""
    try:
        for value in reply.opening(generation.choices, _usage(generation)):
            yield event(value)
        async for delta in generation.deltas():
            for value in reply.chunks(delta.index, delta.text, delta.events, delta.logprobs):
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
