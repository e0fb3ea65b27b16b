"""The nouns that cross a layer: requests, emissions, statistics. Frozen dataclasses of ints, floats and tuples, so that the
same objects travel inside a process and over a pipe."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from paceline.errors import InvalidRequest

FinishReason = Literal["stop", "length", "cancelled", "error", "timeout"]
RowKind = Literal["decode", "prefill"]
"""Which product and attention kernels a row goes through. It is decided by where the row's token came from (generated or
prompt) and never by how many rows there are."""

SEED_MODULUS = 2**64
MAX_LOGPROBS = 20
"""How many of the likeliest tokens a request may ask for at each position."""
MAX_CHOICES = 128
"""Answers to one prompt in one request."""
MAX_STRUCTURE = 32_768
"""Characters of a schema, an expression or a grammar: what bounds the time that it takes to compile."""
MAX_CALLS = 131_072
"""The same for the grammar of calls, with the schemas of all tools."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What an answer's text must be: a JSON value of a schema, a match of a regular expression (in whole), a sentence of
    a grammar in GBNF or Lark, or what has calls of tools in it (``paceline.parsing.grammar``), a Lark grammar that refers to
    other structures, its ``parts``, as @part0, @part1, …. Keywords of a ``lenient`` schema that cannot be kept are passed
    over. ``param`` is the field that errors name. Whether it can be compiled is seen later (``paceline.structure``)."""

    kind: Literal["json", "regex", "grammar", "calls"]
    text: str
    param: str = field(default="structure", compare=False)
    parts: tuple[Structure, ...] = ()
    lenient: bool = False

    def __post_init__(self) -> None:
        size = len(self.text) + sum(len(part.text) for part in self.parts)
        most = MAX_CALLS if self.kind == "calls" else MAX_STRUCTURE
        if size > most:
            what = "make a grammar of" if self.kind == "calls" else "have"
            raise InvalidRequest(f"{self.param} may {what} {most} characters, it has {size}", param=self.param)

    @classmethod
    def json(cls, schema: Mapping[str, Any] | str, param: str = "structure", *, lenient: bool = False) -> Structure:
        """``schema`` is JSON Schema, as an object or as its text."""
        if isinstance(schema, str):
            return cls("json", schema, param, lenient=lenient)
        try:
            return cls("json", json.dumps(schema, ensure_ascii=False, allow_nan=False), param, lenient=lenient)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param} is not a JSON schema: {error}", param=param) from None

    @classmethod
    def json_object(cls, param: str = "structure") -> Structure:
        """Any JSON object."""
        return cls("json", '{"type":"object"}', param)

    @classmethod
    def regex(cls, expression: str, param: str = "structure") -> Structure:
        """In Rust's syntax, without look-around and back-references."""
        return cls("regex", expression, param)

    @classmethod
    def choice(cls, texts: Sequence[str], param: str = "structure") -> Structure:
        """One of these texts."""
        if not texts or any(not isinstance(text, str) or not text for text in texts):
            raise InvalidRequest(f"{param} must hold non-empty texts", param=param)
        return cls("grammar", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts), param)

    @classmethod
    def grammar(cls, text: str, param: str = "structure") -> Structure:
        """GBNF, which begins at ``root``, or Lark, which begins at ``start``."""
        return cls("grammar", text, param)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Values are checked on construction; ``InvalidRequest`` names the field.

    ``temperature`` 0 is argmax. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch the filters off. ``seed`` is taken
    modulo 2**64; ``None`` draws one, which the result reports. ``max_tokens`` ``None`` runs to the end of the context.
    ``presence_penalty`` and ``frequency_penalty`` count generated tokens, ``repetition_penalty`` those of the prompt too.
    ``logit_bias`` maps token ids to what is added. Until ``min_tokens`` are generated nothing that ends the answer is drawn.
    ``banned_token_ids`` never are; where ``allowed_token_ids`` are given, only they. See ``paceline.penalties``.
    ``n`` answers are made to one prompt; they share the seed, and each draws noise of its own. ``logprobs`` asks for the
    logprob of every generated token and for as many of the likeliest (0: none of these), ``prompt_logprobs`` for the same of
    the prompt's tokens. See ``paceline.logprobs``. The answer's text is one of ``structure``, if there is any; see
    ``paceline.structure``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    banned_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structure: Structure | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "banned_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
                raise InvalidRequest(f"{name} must be a list or a tuple, got {value!r}", param=name)
            object.__setattr__(self, name, tuple(value))
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, None)
        if self.seed is not None:
            _integer("seed", self.seed, None, None)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidRequest("stop must hold non-empty strings", param="stop")
        for name in ("stop_token_ids", "banned_token_ids", "allowed_token_ids"):
            for token in getattr(self, name):
                _integer(name, token, 0, None)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _integer("n", self.n, 1, MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}", param="logit_bias")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, None)
            _number("logit_bias", bias, -100.0, 100.0)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos must be true or false, got {self.ignore_eos!r}", param="ignore_eos")
        if self.structure is not None:
            if not isinstance(self.structure, Structure):
                raise InvalidRequest(f"structure must be a Structure, got {self.structure!r}", param="structure")
            if self.ignore_eos:
                message = f"ignore_eos cannot go with {self.structure.param}, which tells where the answer ends"
                raise InvalidRequest(message, param="ignore_eos")


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise InvalidRequest(f"{name} must be a number, got {value!r}", param=name)
    if not low <= value <= high or (low_open and value == low):
        bracket = "(" if low_open else "["
        shown = f"{value:g}" if abs(value) < 1e300 else "a number beyond them"
        raise InvalidRequest(f"{name} must lie in {bracket}{low:g}, {high:g}], got {shown}", param=name)


def _integer(name: str, value: object, low: int | None, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}", param=name)
    if low is not None and value < low:
        raise InvalidRequest(f"{name} must be at least {low}, got {value}", param=name)
    if high is not None and value > high:
        raise InvalidRequest(f"{name} must be at most {high}, got {value}", param=name)


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What of a request's sampling changes logits before a token is drawn (``paceline.penalties``). ``prompt_ids`` are the
    prompt's tokens, each once, where the repetition penalty wants them; ``allowed`` is empty where all are."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    banned: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens matter."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @classmethod
    def of(cls, prompt: Sequence[int], sampling: SamplingParams, vocab_size: int) -> Adjustments | None:
        """None where nothing changes. ``InvalidRequest`` names the field of a token that is not in the vocabulary."""
        ids = {
            "logit_bias": tuple(sampling.logit_bias),
            "banned_token_ids": sampling.banned_token_ids,
            "allowed_token_ids": sampling.allowed_token_ids,
        }
        for name, tokens in ids.items():
            for token in tokens:
                _integer(name, token, 0, vocab_size - 1)
        made = cls(
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            prompt_ids=tuple(sorted(set(prompt))) if sampling.repetition_penalty != 1.0 else (),
            bias=tuple(sorted((token, float(bias)) for token, bias in sampling.logit_bias.items() if bias)),
            min_tokens=sampling.min_tokens,
            banned=tuple(sorted(set(sampling.banned_token_ids))),
            allowed=tuple(sorted(set(sampling.allowed_token_ids))),
        )
        return None if made == cls() else made


@dataclass(frozen=True, slots=True)
class Forcing:
    """Tokens that an answer must have (``paceline.forcing``).

    ``opening`` are the answer's first tokens. A thought goes before the answer if the prompt ends inside one (``thinking``)
    or the first generated token is ``begin``; it ends with the first token that equals the last of ``closing``. Once it has
    ``budget`` tokens without that, ``closing`` is forced. The opening then follows the thought; where there is one, a token
    that would end the request inside the thought becomes the thought's end; so it does where the answer has a structure.
    ``closing`` may be empty only where there can be no thought.
    """

    opening: tuple[int, ...] = ()
    thinking: bool = False
    begin: int | None = None
    closing: tuple[int, ...] = ()
    budget: int | None = None

    def thought(self, generated: Sequence[int]) -> int | None:
        """Where the thought begins among the generated tokens, None where there is none."""
        if self.thinking:
            return 0
        return 1 if generated and generated[0] == self.begin else None

    def end_of_thought(self, generated: Sequence[int]) -> int | None:
        """How many of the generated tokens the thought takes up, 0 without one; None if it goes on behind them."""
        begin = self.thought(generated)
        if begin is None:
            return 0
        try:
            return generated.index(self.closing[-1], begin) + 1
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked for: token ids in, token ids out. Stop *strings* live on the text side, which cancels.

    ``choice`` tells the answers to one prompt apart; it is part of what the noise is drawn from. Requests of one ``group``
    have the same prompt, which is read once where their lanes allow it. ``logprobs`` and ``prompt_logprobs`` say how many of
    the likeliest tokens are reported beside each token's own logprob, None for no logprobs. A lower ``priority`` goes first.
    ``timeout``: seconds after which the request ends, counted from its arrival in the engine.
    """

    id: str
    prompt: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    speculate: bool = True
    adjust: Adjustments | None = None
    forcing: Forcing | None = None
    structure: Structure | None = None
    choice: int = 0
    group: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    timeout: float | None = None

    @property
    def recalls(self) -> bool:
        """Whether what may be drawn depends on the tokens generated before."""
        return self.adjust is not None or self.forcing is not None or self.structure is not None

    @classmethod
    def create(cls, prompt: Sequence[int], sampling: SamplingParams, info: EngineInfo) -> Request:
        """A request with an id of its own, a seed drawn where none is given, ``top_k`` cut to the vocabulary, and
        ``max_tokens`` cut to the room that the context leaves behind ``prompt`` (which must be shorter than the context)."""
        room = info.max_ctx - len(prompt)
        ends = () if sampling.ignore_eos else info.eos_ids
        return cls(
            id=uuid.uuid4().hex,
            prompt=tuple(prompt),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=min(sampling.top_k, info.vocab_size),
            min_p=sampling.min_p,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed % SEED_MODULUS,
            max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            stop_ids=frozenset((*ends, *sampling.stop_token_ids)),
            adjust=Adjustments.of(prompt, sampling, info.vocab_size),
            structure=sampling.structure,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
        )

    @classmethod
    def choices(cls, prompt: Sequence[int], sampling: SamplingParams, info: EngineInfo) -> tuple[Request, ...]:
        """``create`` for each of the ``sampling.n`` answers. Choice i depends on the seed and on i, never on n."""
        first = cls.create(prompt, sampling, info)
        if sampling.n == 1:
            return (first,)
        first = replace(first, group=first.id)
        return (first, *(replace(first, id=uuid.uuid4().hex, choice=choice) for choice in range(1, sampling.n)))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of logits whose token depends on those generated before: its ``index``, whose it is, the tokens ``generated``
    before it as far as the host knows them, and the rows of the forward whose input tokens come behind these: ``drafts`` =
    (first, end)."""

    index: int
    request: Request
    generated: Sequence[int]
    drafts: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What happened to one request. Times are seconds on the engine's monotonic clock.

    ``keeps`` counts the tokens really emitted by each verify round, so that ``1 + sum(keeps) == len(tokens)``.
    """

    seed: int
    prompt_tokens: int
    completion_tokens: int
    rounds: int
    drafted: int
    accepted: int
    keeps: tuple[int, ...]
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of a token's probability, and the likeliest tokens with theirs, (id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Emission:
    """New tokens of one request; the last one of a request carries ``finish_reason`` and ``stats``.

    ``logprobs`` has an entry per token, ``prompt_logprobs``, beside the first token, one per token of the prompt but the
    first, where the request asks for them.

    ``error`` is set beside ``finish_reason == "error"``: the message that the client is told.
    """

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is fixed once an engine is up."""

    model_name: str
    target_path: str
    drafter_path: str | None
    fingerprint: str
    arithmetic: str
    max_ctx: int
    max_concurrency: int
    kv_pool_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    block_size: int | None
    speculation: bool


@dataclass(frozen=True, slots=True)
class LaneStats:
    """A live lane after a round. ``width`` rows were verified in its last decode round (0: there was none); ``rounds``
    counts its decode rounds, ``age_seconds`` since the request arrived."""

    lane: int
    request_id: str
    state: Literal["prefill", "decode"]
    prompt_tokens: int
    prefilled: int
    generated: int
    width: int
    rounds: int
    drafted: int
    accepted: int
    age_seconds: float

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verify round. The first token is the prefill's."""
        return (self.generated - 1) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start. ``drafted`` and ``accepted`` are by draft position (index 0 is the first draft).

    ``decode_rounds`` counts rounds with decode rows as they were planned: ``plain`` (nobody drafts), ``drafting``, and
    ``probe`` (somebody drafts only so that it is known whether drafting pays).

    ``parked`` of the ``queued`` had a lane before and go on later; ``parkings`` counts by cause (``pages``, ``priority``)
    how often one was taken away, ``restored_tokens`` generated tokens that were put into state again. ``itl_out_of_reach``
    counts rounds that broke the bound on the time between tokens, as a waiting prompt could not have been read otherwise.
    """

    queued: int = 0
    lanes: int = 0
    requests_finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    decode_rounds: dict[str, int] = field(default_factory=dict)
    verify_spans: int = 0
    emitted_in_verify: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    pages_free: int = 0
    pages_total: int = 0
    running: tuple[LaneStats, ...] = ()
    parked: int = 0
    parkings: dict[str, int] = field(default_factory=dict)
    restored_tokens: int = 0
    itl_out_of_reach: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per lane per verify round."""
        return self.emitted_in_verify / self.verify_spans if self.verify_spans else 0.0

    @property
    def mean_drafts(self) -> float:
        """Drafts verified per lane per verify round."""
        return sum(self.drafted) / self.verify_spans if self.verify_spans else 0.0


class EngineHandle(Protocol):
    """What the text side sees of an engine, whether it runs in a thread or in a process of its own."""

    info: EngineInfo

    def submit(self, request: Request, sink: Callable[[Emission], None]) -> None:
        """Queue a request. ``sink`` gets its emissions in order, from another thread, and must not block.

        Raises ``EngineDead`` when nothing is served any more. A request that can never fit, and every request of an engine
        that dies later, gets a last emission with ``finish_reason == "error"``.
        """

    def cancel(self, request_id: str) -> None:
        """Stop a request; idempotent, and harmless for one that has ended. Its last emission says ``"cancelled"``."""

    def stats(self) -> EngineStats: ...

    def alive(self) -> bool: ...

    def close(self) -> None: ...
