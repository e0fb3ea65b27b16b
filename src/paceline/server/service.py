"""The text side of an engine: chat and text in, text deltas out, on an asyncio event loop. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

from paceline.errors import DeadlineExceeded, EngineDead, InvalidRequest, LaneFailed, PacelineError
from paceline.parsing import Event
from paceline.server.aligned import AlignedLogprobs, Echo, ScoredToken, check_prompt_logprobs
from paceline.server.answer import AnswerPlan, AnswerStream
from paceline.server.metrics import Metrics
from paceline.server.options import ServerOptions
from paceline.server.protocol import ChatRequest, CompletionRequest, NotReady
from paceline.server.record import RequestRecord
from paceline.server.replies import ReplyReason
from paceline.server.unread import Unread
from paceline.server.urgency import Places, Urgency
from paceline.structure import Compiler
from paceline.text import TextStream
from paceline.types import Emission, EngineHandle, EngineInfo, Request, SamplingParams, Structure

INLINE_BYTES = 8192
"""Requests up to this size are read and tokenised on the event loop (a few milliseconds); longer ones in a worker
thread."""
WORKER_NICENESS = 10
"""Tokenising a long prompt must not take a core away from the engine's process."""
NFC_SHRINKAGE = 4
"""NFC makes no text in UTF-8 shorter by more than this factor: the worst is 3.5, U+1FBE U+0308 U+0301 to U+0390."""

P = ParamSpec("P")
R = TypeVar("R")


class TextCodec(Protocol):
    """What is needed of a tokenizer."""

    max_token_bytes: int
    vocab_size: int

    @property
    def special_ids(self) -> Collection[int]: ...

    def encode(self, text: str, *, add_special: bool = False) -> list[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


class Template(Protocol):
    """What is needed of a chat template."""

    source: str

    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """What exists once loading is over. A model without a chat template serves completions only."""

    handle: EngineHandle
    tokenizer: TextCodec
    template: Template | None


@dataclass(frozen=True, slots=True)
class Delta:
    """More of one choice: text to show, the tokens generated, why it ended if it did, and the logprobs of the tokens of
    which this is the text, where they are asked for. ``events``: what a chat's text says. ``stop`` is the stop
    string that ended it, if one did."""

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: ReplyReason | None
    logprobs: tuple[ScoredToken, ...] = ()
    events: tuple[Event, ...] = ()
    stop: str | None = None


class Generation:
    """The choices of one client's request while they are generated. Whoever starts one must ``close`` it."""

    def __init__(
        self,
        handle: EngineHandle,
        metrics: Metrics,
        endpoint: str,
        arrived: float,
        token_bytes: Callable[[int], bytes],
        options: ServerOptions,
    ) -> None:
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._handle = handle
        self._record = RequestRecord(endpoint, arrived)
        self._unread = Unread(options)
        self._too_slow = False
        self._token_bytes = token_bytes
        self._metrics = metrics
        self._endpoint = endpoint
        self._arrived = arrived
        self._events: asyncio.Queue[tuple[int, Emission] | PacelineError] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.prompts: list[tuple[int, ...]] = []
        """That of each choice."""
        self._streams: list[TextStream] = []
        self._scores: list[AlignedLogprobs | None] = []
        self._echoes: dict[int, Echo] = {}
        self._live: dict[int, str] = {}
        self._last_seen: list[float | None] = []

    @property
    def choices(self) -> int:
        return len(self._streams)

    @property
    def live(self) -> int:
        """Choices that have not ended."""
        return len(self._live)

    @property
    def age(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self._arrived

    @property
    def thought_tokens(self) -> int:
        """Of the tokens generated, those in thoughts."""
        return sum(stream.thought_tokens for stream in self._streams if isinstance(stream, AnswerStream))

    @property
    def scored(self) -> bool:
        """Whether logprobs are asked for."""
        return any(scores is not None for scores in self._scores)

    def submit(self, request: Request, stream: TextStream, echo: Echo | None = None) -> None:
        """Add a choice; with ``echo`` its text begins with the prompt."""
        index = len(self._streams)
        self._handle.submit(request, self._sink(index))
        self._streams.append(stream)
        shift = len(echo.text) if echo else 0
        self._scores.append(None if request.logprobs is None else AlignedLogprobs(self._token_bytes, shift))
        if echo:
            self._echoes[index] = echo
        self._last_seen.append(None)
        self._live[index] = request.id
        self.prompts.append(request.prompt)
        self.prompt_tokens += len(request.prompt) if request.choice == 0 else 0

    async def deltas(self) -> AsyncIterator[Delta]:
        """Deltas of all choices as they come; ends when each has a finish reason. Raises what the engine failed with."""
        while self._live:
            event = await self._events.get()
            if isinstance(event, PacelineError):
                raise event
            index, emission = event
            self._unread.take(len(emission.tokens))
            if index in self._live:
                yield self._delta(index, emission)

    def close(self) -> None:
        """Cancel what is still running, so that its lane is free for others. Idempotent."""
        for index in list(self._live):
            self._handle.cancel(self._live[index])
            self._end(index, "error" if self._record.error else "cancelled")

    def abort(self, error: PacelineError) -> None:
        """Let ``deltas`` end with this error."""
        self._record.failed(error)
        self._events.put_nowait(error)

    def started(self, sampling: SamplingParams) -> None:
        """Every choice has been submitted."""
        self._record.start(self._live.values(), self.prompt_tokens, sampling)

    def _arrive(self, index: int, emission: Emission) -> None:
        """Take in what the engine emits. Once the client has been too slow, its lanes end, and what comes is dropped."""
        if emission.finish_reason is not None:
            self._record.left_engine(index, emission)
        if emission.stats is not None:
            self._metrics.queue_seconds.observe(emission.stats.queue_seconds)
        if self._too_slow:
            return
        self._events.put_nowait((index, emission))
        error = self._unread.add(len(emission.tokens))
        if error is not None and emission.finish_reason is None:
            self._too_slow = True
            for request_id in self._live.values():
                self._handle.cancel(request_id)
            self.abort(error)

    def _sink(self, index: int) -> Callable[[Emission], None]:
        def sink(emission: Emission) -> None:
            # The loop is closed when the server has stopped: then nobody waits for this emission.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._arrive, index, emission)

        return sink

    def _delta(self, index: int, emission: Emission) -> Delta:
        stream = self._streams[index]
        piece = stream.push(emission.tokens)
        self._observe(index, len(piece.tokens))
        text = piece.text
        reason: ReplyReason | None = emission.finish_reason
        if piece.stopped:
            if reason is None:
                self._handle.cancel(self._live[index])
            reason = "stop"
        elif reason in ("error", "cancelled", "timeout"):
            # Nobody on this side cancelled it, so a request that was cancelled failed too.
            failure = self._failure(emission)
            self._record.failed(failure)
            self._end(index, "timeout" if reason == "timeout" else "error")
            raise failure
        elif reason is not None:
            text += stream.finish()
        events: tuple[Event, ...] = ()
        if isinstance(stream, AnswerStream):
            events = stream.events(ended=reason is not None)
            reason = "tool_calls" if reason == "stop" and stream.calls else reason
        if reason is not None:
            self._end(index, reason)
        text, logprobs = self._with_prompt(index, emission, text, self._aligned(index, piece.tokens, emission, reason))
        stop = None if reason is None else stream.stop_string
        return Delta(index, text, piece.tokens, reason, logprobs, events, stop)

    def _aligned(
        self, index: int, tokens: tuple[int, ...], emission: Emission, reason: ReplyReason | None
    ) -> tuple[ScoredToken, ...]:
        """Logprobs of the tokens whose text is shown now; at the end of the rest."""
        scores = self._scores[index]
        if scores is None:
            return ()
        scores.add(tokens, emission.logprobs)
        return scores.take(self._streams[index].release(everything=reason is not None))

    def _with_prompt(
        self, index: int, emission: Emission, text: str, logprobs: tuple[ScoredToken, ...]
    ) -> tuple[str, tuple[ScoredToken, ...]]:
        """Put the prompt in front of the first text of a choice that is to echo it."""
        echo = self._echoes.pop(index, None)
        if echo is None:
            return text, logprobs
        if self._scores[index] is not None:
            logprobs = echo.scored(self._token_bytes, emission.prompt_logprobs) + logprobs
        return echo.text + text, logprobs

    def _failure(self, emission: Emission) -> PacelineError:
        message = emission.error or "the engine cancelled the request"
        if emission.finish_reason == "timeout":
            return DeadlineExceeded(message)
        return LaneFailed(message) if self._handle.alive() else EngineDead(message)

    def _observe(self, index: int, tokens: int) -> None:
        if not tokens:
            return
        now = time.monotonic()
        last = self._last_seen[index]
        if last is None:
            self._metrics.time_to_first_token.observe(now - self._arrived)
        else:
            for _ in range(tokens):
                self._metrics.inter_token_latency.observe((now - last) / tokens)
        self._last_seen[index] = now
        self.completion_tokens += tokens

    def _end(self, index: int, reason: ReplyReason) -> None:
        del self._live[index]
        self._metrics.generations.labels(self._endpoint, reason).inc()
        self._record.ended(index, reason)


class Service:
    """Turns checked requests into running generations. Has no backend while the engine loads."""

    def __init__(self, options: ServerOptions | None = None) -> None:
        self.options = options or ServerOptions()
        self.backend: Backend | None = None
        self.metrics = Metrics(self._live_handle)
        self._generations: set[Generation] = set()
        self._places = Places(self.options.max_queue)
        self._closing: PacelineError | None = None
        self._closed = asyncio.Event()
        self._worker = ThreadPoolExecutor(2, thread_name_prefix="tokenize", initializer=_lower_priority)
        self._compiler: Compiler | None = None

    def attach(self, backend: Backend) -> None:
        """Begin to serve. May be called from any thread."""
        info = backend.handle.info
        self._compiler = Compiler(backend.tokenizer, info.vocab_size, info.eos_ids)
        self._compiler.prepare()
        self.backend = backend

    def ready(self) -> Backend:
        """The backend; ``NotReady`` while it loads and ``EngineDead`` when it has stopped."""
        if self._closing is not None:
            raise self._closing
        if self.backend is None:
            raise NotReady("the model is loading")
        if not self.backend.handle.alive():
            raise EngineDead("the engine has stopped")
        return self.backend

    @property
    def info(self) -> EngineInfo:
        return self.ready().handle.info

    async def work(self, size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What the function returns; for a body of more than ``INLINE_BYTES`` it runs in a worker thread."""
        call = functools.partial(function, *args, **kwargs)
        return call() if size <= INLINE_BYTES else await asyncio.get_running_loop().run_in_executor(self._worker, call)

    async def chat(self, request: ChatRequest, size: int, arrived: float, endpoint: str = "chat") -> Generation:
        """Start the answer to a chat. ``size`` is that of the body in bytes, ``arrived`` monotonic seconds; ``endpoint`` is
        what logs and metrics call it."""
        backend = self.ready()
        prompt, plan = await self.work(size, _chat_prompt, backend, request)
        sampling = replace(request.sampling, structure=plan.structure)
        await self._check(sampling.structure, request.urgency, arrived)
        return self._start(endpoint, [prompt], sampling, request.urgency, arrived, plan=plan)

    async def count(self, request: ChatRequest, size: int) -> int:
        """How many tokens a chat's prompt has, whether it fits or not. ``size`` as for ``chat``."""
        return await self.work(size, _count, self.ready(), request)

    async def complete(self, request: CompletionRequest, size: int, arrived: float) -> Generation:
        """Start ``n`` choices for each prompt, one prompt after another. ``size`` and ``arrived`` as for ``chat``."""
        backend = self.ready()
        prompts = await self.work(size, _completion_prompts, backend, request)
        check_prompt_logprobs(prompts, request.sampling)
        await self._check(request.sampling.structure, request.urgency, arrived)
        echoes = await self.work(size, _echoes, backend, prompts) if request.echo else None
        return self._start("completions", prompts, request.sampling, request.urgency, arrived, echoes)

    async def _check(self, structure: Structure | None, urgency: Urgency, arrived: float) -> None:
        """Refuse a structure that cannot be compiled. The engine compiles it again, and knows then that it can."""
        if structure is None:
            return
        assert self._compiler is not None, "there is one as soon as there is a backend"
        try:
            async with asyncio.timeout(urgency.left(arrived, self.options.request_timeout)):
                await asyncio.wrap_future(self._compiler.submit(structure))
        except TimeoutError:
            raise DeadlineExceeded(f"the request's time was over before {structure.param} was compiled") from None

    def abort_all(self, error: PacelineError) -> None:
        """End every running generation with this error, and answer later requests with it."""
        self._closing = error
        self._closed.set()
        for generation in self._generations:
            generation.abort(error)

    async def closing(self) -> NoReturn:
        """Wait for ``abort_all`` and raise its error."""
        await self._closed.wait()
        assert self._closing is not None
        raise self._closing

    def close(self, generation: Generation) -> None:
        """The end of every generation, whatever became of it. Idempotent."""
        generation.close()
        if generation in self._generations:
            self._generations.remove(generation)
            self._places.ended(generation.age)

    def _start(
        self,
        endpoint: str,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        urgency: Urgency,
        arrived: float,
        echoes: Sequence[Echo | None] | None = None,
        plan: AnswerPlan | None = None,
    ) -> Generation:
        backend = self.ready()
        live = sum(generation.live for generation in self._generations)
        self._places.check(len(prompts) * sampling.n, live, backend.handle.info.max_concurrency)
        token_bytes = backend.tokenizer.token_bytes
        generation = Generation(backend.handle, self.metrics, endpoint, arrived, token_bytes, self.options)
        try:
            for prompt, echo in zip(prompts, echoes or [None] * len(prompts), strict=True):
                for choice in Request.choices(prompt, sampling, backend.handle.info):
                    request = urgency.urging(choice, arrived, self.options.request_timeout)
                    skip = request.stop_ids | frozenset(backend.tokenizer.special_ids)
                    aligned = request.logprobs is not None
                    if plan is None:
                        stream = TextStream(token_bytes, skip=skip, stop=sampling.stop, align=aligned)
                        generation.submit(request, stream, echo)
                        continue
                    answer = AnswerStream(token_bytes, plan.parser(), skip=skip, stop=sampling.stop, align=aligned)
                    generation.submit(replace(request, forcing=plan.forcing), answer)
        except BaseException:
            generation.close()
            raise
        self._generations.add(generation)
        generation.started(sampling)
        return generation

    def _live_handle(self) -> EngineHandle | None:
        return self.backend.handle if self.backend is not None and self.backend.handle.alive() else None


def chat_text(backend: Backend, request: ChatRequest) -> str:
    """The text that the model reads of a chat."""
    if backend.template is None:
        raise InvalidRequest(f"{backend.handle.info.model_name} has no chat template; use /v1/completions")
    tools = [dict(tool) for tool in request.tools.definitions] if request.tools else None
    return backend.template.render(request.messages, tools=tools, add_generation_prompt=True, **request.template_kwargs)


def _chat_prompt(backend: Backend, request: ChatRequest) -> tuple[tuple[int, ...], AnswerPlan]:
    text = chat_text(backend, request)
    assert backend.template is not None, "chat_text refuses a chat without a template"
    plan = AnswerPlan.of(request, text, backend.template.source, backend.tokenizer.encode)
    return _encode(backend, text, "messages"), plan


def _count(backend: Backend, request: ChatRequest) -> int:
    text = chat_text(backend, request)
    _utf8_size(text, "messages")
    return len(backend.tokenizer.encode(text))


def _completion_prompts(backend: Backend, request: CompletionRequest) -> list[tuple[int, ...]]:
    return [
        _encode(backend, prompt, "prompt") if isinstance(prompt, str) else _given_ids(backend, prompt)
        for prompt in request.prompts
    ]


def _echoes(backend: Backend, prompts: Sequence[tuple[int, ...]]) -> list[Echo]:
    return [Echo.of(backend.tokenizer.token_bytes, prompt) for prompt in prompts]


def check_ids(backend: Backend, tokens: tuple[int, ...], param: str) -> None:
    """Refuse tokens that the model does not have; ``param`` names the field."""
    vocab_size = backend.handle.info.vocab_size
    bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise InvalidRequest(f"{param} holds token {bad}; the model's tokens are 0 to {vocab_size - 1}", param=param)


def _given_ids(backend: Backend, prompt: tuple[int, ...]) -> tuple[int, ...]:
    check_ids(backend, prompt, "prompt")
    return _fitting(prompt, backend.handle.info.max_ctx, "prompt")


def _encode(backend: Backend, text: str, param: str) -> tuple[int, ...]:
    """Token ids of a text that fits. A text that cannot fit is refused before it costs seconds of tokenising."""
    max_ctx, size = backend.handle.info.max_ctx, _utf8_size(text, param)
    # A tokenizer may normalise first. To do it here would show the exact size, but Python's NFC takes quadratic time.
    bytes_per_token = backend.tokenizer.max_token_bytes * (1 if text.isascii() else NFC_SHRINKAGE)
    if size >= max_ctx * bytes_per_token:
        raise _too_long(f"at least {-(-size // bytes_per_token)}", max_ctx, param)
    return _fitting(tuple(backend.tokenizer.encode(text)), max_ctx, param)


def _utf8_size(text: str, param: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode text: {error.reason}", param=param) from None


def _fitting(prompt: tuple[int, ...], max_ctx: int, param: str) -> tuple[int, ...]:
    if not prompt:
        raise InvalidRequest(f"{param} is empty: at least one token is needed", param=param)
    if len(prompt) >= max_ctx:
        raise _too_long(str(len(prompt)), max_ctx, param)
    return prompt


def _too_long(tokens: str, max_ctx: int, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt has {tokens} tokens; the context holds {max_ctx}, of which one must be left for the answer",
        param=param,
        code="context_length_exceeded",
    )


def _lower_priority() -> None:
    """Lower this thread's priority. Only on Linux does the call act on one thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WORKER_NICENESS)
