"""A client of OpenAI-compatible servers that measures: it notes when each event of a stream came, and checks every answer.

What comes of a request is a plain dictionary, a line of the raw stream log that every figure is computed from. Times are
seconds since the cell began, on the client's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from paceline.bench.workloads import Ask

REASONS = ("stop", "length", "tool_calls")
_DETAIL = 300
"""Characters of a failure's detail that are kept."""


class Failed(Exception):
    """An answer that does not count: ``kind`` names the failure, and the message is its detail."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail)
        self.kind = kind


class Stream:
    """What one stream says, event by event."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.arrivals: list[float] = []
        self.finished: float | None = None
        self.done = False
        self.reason: str | None = None
        self.fingerprint: str | None = None
        self.usage: dict[str, Any] = {}
        self.timings: dict[str, Any] = {}
        self.token_ids: list[int] = []
        self._said: dict[str, list[str]] = {}

    def take(self, line: str) -> None:
        """A line of the event stream; ``Failed`` if it cannot be read or is an error."""
        if not line.startswith("data:"):
            return
        now, data = self._clock(), line[5:].strip()
        if data == "[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise Failed("event that is not a JSON object", data)
        if event.get("error"):
            raise Failed("error in the stream", json.dumps(event["error"]))
        self.fingerprint = event.get("system_fingerprint") or self.fingerprint
        self.usage = event.get("usage") or self.usage
        self.timings = event.get("timings") or self.timings
        for choice in event.get("choices") or ():
            self._choice(choice, now)

    def _choice(self, choice: Mapping[str, Any], now: float) -> None:
        pieces = list(_pieces(choice))
        ids = choice.get("token_ids") or ()
        for kind, text in pieces:
            self._said.setdefault(kind, []).append(text)
        self.token_ids.extend(ids)
        if pieces or ids:
            self.arrivals.append(now)
        if choice.get("finish_reason"):
            self.reason, self.finished = choice["finish_reason"], now

    def digest(self) -> dict[str, str]:
        """A hash of the answer: of its token ids where the server tells them, else of what it says."""
        said = {kind: "".join(texts) for kind, texts in self._said.items()}
        content: Any = self.token_ids or said
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return {"hash": hashlib.sha256(text.encode()).hexdigest(), "hash_of": "token ids" if self.token_ids else "text"}

    def check(self, ask: Ask) -> None:
        """``Failed`` unless the answer is whole and its counts are what was asked for."""
        if self.reason is None or not self.done:
            missing = "finish reason" if self.reason is None else "[DONE]"
            raise Failed("stream cut short", f"it ended without {missing}")
        if self.reason not in REASONS:
            raise Failed("unexpected finish reason", str(self.reason))
        if not self.usage:
            raise Failed("no usage", "the stream ended without token counts")
        prompt, tokens = self.usage.get("prompt_tokens"), self.usage.get("completion_tokens")
        if ask.prompt_tokens not in (None, prompt):
            raise Failed("wrong token count", f"usage says {prompt} prompt tokens, {ask.prompt_tokens} were sent")
        ended_early = not ask.exact and self.reason != "length"
        if not isinstance(tokens, int) or not (1 <= tokens <= ask.cap if ended_early else tokens == ask.cap):
            wanted = f"1 to {ask.cap}" if ended_early else f"{ask.cap}"
            raise Failed("wrong token count", f"usage says {tokens} output tokens, {wanted} were due")
        if self.token_ids and len(self.token_ids) != tokens:
            raise Failed("wrong token count", f"usage says {tokens} output tokens, the events hold {len(self.token_ids)}")


def _pieces(choice: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What an event adds to an answer, by kind. Ids of tool calls are random and left out."""
    delta = choice.get("delta") or {}
    for kind, text in (
        ("text", choice.get("text")),
        ("text", delta.get("content")),
        ("thought", delta.get("reasoning_content") or delta.get("reasoning")),
    ):
        if text:
            yield kind, text
    for call in delta.get("tool_calls") or ():
        for kind, text in (call.get("function") or {}).items():
            if text:
                yield f"call {call.get('index', 0)} {kind}", text


async def ask_once(
    http: httpx.AsyncClient, ask: Ask, extra: Mapping[str, Any], clock: Callable[[], float]
) -> dict[str, Any]:
    """One streamed answer, as a line of the stream log."""
    body = {**ask.body, "stream": True, "stream_options": {"include_usage": True}, **extra}
    stream, status = Stream(clock), None
    failure: dict[str, str] = {}
    start = clock()
    try:
        async with _streaming(http, ask.path, body) as response:
            status = response.status_code
            if status != 200:
                raise Failed(f"status {status}", (await response.aread()).decode(errors="replace"))
            async for line in _lines(response):
                stream.take(line)
        stream.check(ask)
    except Failed as error:
        failure = {"failure": error.kind, "detail": str(error)[:_DETAIL]}
    end = clock()
    return {
        "number": ask.number,
        "label": ask.label,
        "start": start,
        # an answer of which nothing can be seen has at least its end
        "arrivals": stream.arrivals or ([] if stream.finished is None else [stream.finished]),
        "end": end,
        "status": status,
        "finish_reason": stream.reason,
        "prompt_tokens": stream.usage.get("prompt_tokens"),
        "tokens": stream.usage.get("completion_tokens"),
        "fingerprint": stream.fingerprint,
        **stream.digest(),
        **({"accepted": stream.timings["draft_n_accepted"]} if "draft_n_accepted" in stream.timings else {}),
        **failure,
    }


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines of an event stream end with a newline only; ``aiter_lines`` would also split at characters inside of texts."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


@contextlib.asynccontextmanager
async def _streaming(http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
    """The response, with the errors of its transport as ``Failed``."""
    try:
        async with http.stream("POST", path, json=body) as response:
            yield response
    except httpx.ConnectError as error:
        raise Failed("connection refused", str(error)) from None
    except httpx.TimeoutException as error:
        raise Failed("timeout", type(error).__name__) from None
    except httpx.HTTPError as error:
        raise Failed("stream cut short", f"{type(error).__name__}: {error}") from None


class Load:
    """Requests to one server. ``extra`` goes into every body; ``tell`` is called after every answer."""

    def __init__(
        self,
        url: str,
        extra: Mapping[str, Any],
        timeout: float,
        zero: float,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        self._url, self._extra, self._timeout, self._zero, self._tell = url, extra, timeout, zero, tell

    def _clock(self) -> float:
        return time.perf_counter() - self._zero

    async def closed_loop(
        self, asks: Sequence[Ask], concurrency: int, long: Sequence[Ask] = (), pause: float = 0.0
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """``concurrency`` at a time: a new request begins as one ends. Beside them, until the last of ``asks`` has ended, a
        request of ``long``, in turn, ``pause`` seconds after the last such has ended. The answers of both, in the order in
        which they ended."""
        answers: list[dict[str, Any]] = []
        beside: list[dict[str, Any]] = []
        left = iter(asks)

        async def lane(http: httpx.AsyncClient) -> None:
            for ask in left:
                answers.append(await ask_once(http, ask, self._extra, self._clock))
                self._tell()

        async def disturb(http: httpx.AsyncClient) -> None:
            for ask in itertools.cycle(long):
                await asyncio.sleep(pause)
                beside.append(await ask_once(http, ask, self._extra, self._clock))

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency + 1)
        async with httpx.AsyncClient(base_url=self._url, timeout=self._timeout, limits=limits, trust_env=False) as http:
            disturbing = asyncio.create_task(disturb(http)) if long else None
            try:
                await asyncio.gather(*(lane(http) for _ in range(concurrency)))
            finally:
                if disturbing is not None:
                    disturbing.cancel()
                    await asyncio.gather(disturbing, return_exceptions=True)
        return answers, beside
