"""``LLM``: the offline face of Paceline. Text in, text out, several prompts at once."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from paceline.config import EngineOptions
from paceline.engine.build import resolve_paths
from paceline.engine.engine import Engine
from paceline.errors import InvalidRequest, LaneFailed
from paceline.messages import check_messages
from paceline.parsing.thoughts import forcing_of
from paceline.text import TextStream
from paceline.types import (
    Emission,
    EngineStats,
    FinishReason,
    Request,
    RequestStats,
    SamplingParams,
    Structure,
    TokenLogprob,
)
from paceline.weights.load import open_target

Message = dict[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Result:
    """One answer. ``tokens`` are all generated ids, the ending stop id included; ``text`` shows neither it nor a matched
    stop string. ``error`` is set beside ``finish_reason == "error"``.

    Where they are asked for, ``logprobs`` has an entry per token and ``prompt_logprobs`` one per token of the prompt, None
    for its first. ``others`` are the answers 1 … n - 1 to the same prompt; this is answer 0.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    usage: Usage
    stats: RequestStats
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    others: tuple[Result, ...] = ()

    @property
    def choices(self) -> tuple[Result, ...]:
        """All answers to the prompt."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer, with the logprobs of its tokens if they are asked for; the first one carries
    those of the prompt's tokens but the first, the last one ``finish_reason``, ``stats`` and, of a failed one, ``error``."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class LLM:
    """Loads a pair and generates. Use it as a context manager, or call ``close``.

    Keyword options are the fields of ``paceline.config.EngineOptions``. Raises ``LoadError`` for a file that cannot be used
    and ``ConfigError`` for an option that cannot work.
    """

    def __init__(self, target: str = "demo", drafter: str | None = "demo", **options: Any) -> None:
        self._options = EngineOptions(target=str(target), drafter=None if drafter is None else str(drafter), **options)
        checkpoint = open_target(resolve_paths(self._options)[0])
        self.tokenizer = checkpoint.tokenizer()
        self.template = checkpoint.chat_template()
        self._engine = Engine(self._options)
        self.info = self._engine.info

    @property
    def fingerprint(self) -> str:
        """Hash of the arithmetic: engines that share it give the same tokens."""
        return self.info.fingerprint

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._engine.close()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def generate(
        self, prompts: str | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Answer a list of prompts, as many at a time as there are lanes; results come in order.

        A prompt is raw text (special tokens parsed, no template), a list of token ids, or a list of messages (through the
        chat template). A bare string is a list of one. ``sampling`` is one object for all, or one per prompt. With its
        ``n`` above 1 the result of a prompt is answer 0 and holds the others.
        """
        prompts = [prompts] if isinstance(prompts, str) else _list("prompts", prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        sampling = _list("sampling", sampling)
        if len(sampling) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(sampling)} sampling parameters", param="sampling")
        requests = [self._requests(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
        try:
            running = [
                [_Running(self, request, params) for request in choices]
                for choices, params in zip(requests, sampling, strict=True)
            ]
            return [_together([entry.result() for entry in choices]) for choices in running]
        except BaseException:  # an interrupt too: nobody waits for the others any more
            for request in (request for choices in requests for request in choices):
                self._engine.cancel(request.id)
            raise

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Delta]:
        """Answer one prompt piece by piece. Leaving the iteration early cancels the request."""
        params = sampling or SamplingParams()
        first, *others = self._requests(prompt, params)
        if others:
            raise InvalidRequest(f"a stream is one answer, and n is {params.n}: use generate", param="n")
        yield from _Running(self, first, params).deltas()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt in any of its forms. ``InvalidRequest`` says what is wrong with one."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise InvalidRequest(
                f"a prompt is text, a list of token ids or a list of messages, got {type(prompt).__name__}; "
                "generate takes a list of prompts, also around a single one: [[1, 2, 3]]",
                param="prompts",
            )
        if any(isinstance(item, dict) for item in prompt):
            return self.tokenizer.encode(self._render(list(prompt)))
        return [self._token_id(item) for item in prompt]

    def _render(self, messages: list[Any]) -> str:
        if self.template is None:
            raise InvalidRequest("the model has no chat template: give text or token ids", param="prompts")
        try:
            return self.template.render(check_messages(messages))
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="prompts", code=error.code) from None

    def _token_id(self, item: object) -> int:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < self.info.vocab_size:
            raise InvalidRequest(f"token id {item!r} is outside 0 … {self.info.vocab_size - 1}", param="prompts")
        return item

    def _requests(self, prompt: Prompt, params: SamplingParams) -> tuple[Request, ...]:
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling must hold SamplingParams, got {type(params).__name__}", param="sampling")
        tokens = self.encode(prompt)
        if not 0 < len(tokens) < self.info.max_ctx:
            raise InvalidRequest(
                f"the prompt has {len(tokens)} tokens; a context of {self.info.max_ctx} takes 1 to {self.info.max_ctx - 1}",
                param="prompts",
                code="context_length_exceeded",
            )
        requests = Request.choices(tokens, params, self.info)
        return requests if params.structure is None else self._structured(prompt, requests, params.structure)

    def _structured(self, prompt: Prompt, requests: tuple[Request, ...], structure: Structure) -> tuple[Request, ...]:
        """Refuse a structure that cannot be compiled. A prompt that went through the template may end inside a thought."""
        compiling = self._engine.parts.runner.structures
        assert compiling is not None, "an engine that was built knows its tokens"
        compiling.compiler.compile(structure)
        if self.template is None or isinstance(prompt, str) or not any(isinstance(item, dict) for item in prompt):
            return requests
        text = self._render(list(prompt))
        forcing = forcing_of(text, self.template.source, self.tokenizer.encode, structure=structure)
        return tuple(dataclasses.replace(request, forcing=forcing) for request in requests)


def _list(name: str, values: Iterable[Any]) -> list[Any]:
    if not isinstance(values, Iterable) or isinstance(values, (bytes, Mapping)):
        raise InvalidRequest(f"{name} must be a list, got {type(values).__name__}", param=name)
    return list(values)


class _Running:
    """One request on its way: submitted on construction."""

    def __init__(self, llm: LLM, request: Request, params: SamplingParams) -> None:
        self._engine, self._request = llm._engine, request
        skip = llm.tokenizer.special_ids | request.stop_ids
        self._text = TextStream(llm.tokenizer.token_bytes, skip=skip, stop=params.stop)
        self._emissions: queue.SimpleQueue[Emission] = queue.SimpleQueue()
        self._engine.submit(request, self._emissions.put)

    def deltas(self) -> Iterator[Delta]:
        ended = False
        counted: list[int] = []
        try:
            while not ended:
                emission = self._emissions.get()
                piece = self._text.push(emission.tokens)
                counted += piece.tokens
                reason: FinishReason | None = "stop" if piece.stopped else emission.finish_reason
                delta = Delta(
                    piece.text,
                    piece.tokens,
                    logprobs=emission.logprobs[: len(piece.tokens)],
                    prompt_logprobs=emission.prompt_logprobs,
                )
                if reason is None:
                    yield delta
                    continue
                ended = emission.finish_reason is not None
                if not ended:
                    self._engine.cancel(self._request.id)
                    emission = self._last_emission()
                    ended = True
                stats = _counted(emission.stats, len(counted))
                text = piece.text + self._text.finish()
                yield dataclasses.replace(delta, text=text, finish_reason=reason, stats=stats, error=emission.error)
        finally:
            if not ended:
                self._engine.cancel(self._request.id)

    def _last_emission(self) -> Emission:
        while (emission := self._emissions.get()).finish_reason is None:
            pass
        return emission

    def result(self) -> Result:
        deltas = list(self.deltas())
        last = deltas[-1]
        assert last.finish_reason is not None
        if last.stats is None:
            raise LaneFailed(last.error or "the request ended without a reason")
        tokens = [token for delta in deltas for token in delta.tokens]
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        of_prompt: list[TokenLogprob | None] = [None, *(entry for delta in deltas for entry in delta.prompt_logprobs)]
        return Result(
            text="".join(delta.text for delta in deltas),
            tokens=tokens,
            finish_reason=last.finish_reason,
            usage=Usage(len(self._request.prompt), len(tokens)),
            stats=last.stats,
            error=last.error,
            logprobs=None if self._request.logprobs is None else logprobs,
            prompt_logprobs=None if self._request.prompt_logprobs is None else of_prompt,
        )


def _together(choices: list[Result]) -> Result:
    first, *others = choices
    return dataclasses.replace(first, others=tuple(others))


def _counted(stats: RequestStats | None, tokens: int) -> RequestStats | None:
    """Statistics of an answer that a stop string ended after ``tokens`` tokens: what the engine made beyond is not part of
    it, and ``1 + sum(keeps) == len(tokens)`` stays true."""
    if stats is None or stats.completion_tokens == tokens:
        return stats
    keeps, left = [], tokens - 1
    for keep in stats.keeps:
        if left <= 0:
            break
        keeps.append(min(keep, left))
        left -= keep
    return dataclasses.replace(stats, completion_tokens=tokens, keeps=tuple(keeps), rounds=len(keeps))
