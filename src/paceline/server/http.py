"""What the routes share: JSON replies and bodies, and what every request passes: keys, limits, an id."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Iterable
from typing import Any

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import AuthenticationError, ClientTooSlow, PacelineError
from paceline.logs import event, request_id
from paceline.server.metrics import Metrics
from paceline.server.options import ServerOptions
from paceline.server.protocol import BodyTooLarge, HeadersTooLarge, NotReady, UnsupportedMediaType
from paceline.server.replies import anthropic_error_object, dump, error_object

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
"""Of all names and values of a request together."""

_CLIENTS_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)

logger = logging.getLogger("paceline.server")


def json_response(value: dict[str, Any] | list[Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, media_type="application/json")


def error_response(error: PacelineError, path: str) -> Response:
    """The reply for an error, in the words of the API to which the path belongs. It is logged by its code: its message may
    quote the request."""
    if not isinstance(error, NotReady):  # whoever waits for the model asks again and again
        event(logger, "answered with an error", status=error.status, code=error.code)
    if not _is_anthropic(path):
        return json_response(error_object(error), error.status, dict(error.headers))
    return json_response(anthropic_error_object(error) | {"request_id": request_id.get()}, error.status, dict(error.headers))


def _is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


async def read_body(request: Request, options: ServerOptions) -> bytes:
    """The body, which must claim to be JSON: other types a browser sends to foreign servers without asking them."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType(f"the content type must be application/json, got {kind!r}")
    limit, chunks = options.max_body_bytes, request.stream()
    body, size = bytearray(), 0
    while chunk := await _next(chunks, options.client_timeout):
        size += len(chunk)
        if size <= limit:
            body += chunk
        elif size > 4 * limit:
            break
    # Up to a point a body that is too large is still read (not kept): closing the connection while the client writes
    # would take the answer away from it.
    if size > limit:
        declared = request.headers.get("content-length", f"at least {size}")
        raise BodyTooLarge(f"the body has {declared} bytes; at most {limit} are accepted")
    return bytes(body)


async def _next(chunks: Any, seconds: float) -> bytes:
    """The next piece of a body; empty at its end."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(chunks, b"")
    except TimeoutError:
        raise ClientTooSlow(f"no more of the body has come for {seconds:g} s") from None


class KeyCheck:
    """A dependency of routes: lets pass who sends one of the keys, as OpenAI's clients do or as Anthropic's."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, request: Request) -> None:
        if not self._digests:
            return
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = bearer if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        # Header values arrive as Latin-1, whatever bytes the client sent. Digests are of one length, and every one is
        # compared, so that the time taken says nothing about the keys.
        offered = hashlib.sha256(key.strip().encode("latin-1")).digest()
        if not sum(hmac.compare_digest(offered, digest) for digest in self._digests):
            raise AuthenticationError("a valid API key is needed, in the header Authorization: Bearer KEY or x-api-key: KEY")


class EveryRequest:
    """Gives each request an id (its client's own, if it looks like one), refuses headers without measure, answers where
    there is a bug of ours, and counts answers by route and status. A route's template is the label, so that labels stay
    few."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        offered = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        identifier = offered if _CLIENTS_ID.fullmatch(offered) else uuid.uuid4().hex

        started = False

        async def counting_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                endpoint = getattr(scope.get("route"), "path", "other")
                self._metrics.http_requests.labels(endpoint, str(message["status"])).inc()
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = identifier
                if _is_anthropic(scope["path"]):
                    headers["request-id"] = identifier  # as Anthropic's clients call it
                started = True
            await send(message)

        token = request_id.set(identifier)
        try:
            error = _too_large(scope["headers"])
            await (error_response(error, scope["path"]) if error else self._app)(scope, receive, counting_send)
        except Exception:
            if started:
                raise
            logger.exception("a request failed")  # the client is not shown the traceback
            await error_response(PacelineError("internal error"), scope["path"])(scope, receive, counting_send)
        finally:
            request_id.reset(token)


def _too_large(headers: list[tuple[bytes, bytes]]) -> HeadersTooLarge | None:
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) <= MAX_HEADERS and size <= MAX_HEADER_BYTES:
        return None
    return HeadersTooLarge(
        f"the request has {len(headers)} headers of {size} bytes; at most {MAX_HEADERS} of {MAX_HEADER_BYTES} are accepted"
    )
