"""What one round does, as plain frozen data: made by the scheduler, executed by the runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.types import Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class VerifySpan:
    """A lane's decode rows: the anchor at position ``start`` and ``drafts`` (K) proposals behind it. K = 0: plain decode."""

    request: Request
    lane: int
    start: int
    anchor: int
    drafts: int
    generated: tuple[int, ...] = ()
    """All tokens generated so far, the anchor included, where the request recalls them."""
    known: tuple[int, ...] | None = None
    """Where the state of a parked lane is made again: the ``drafts`` tokens behind the anchor, which were generated before.
    All rows are kept, and nothing is drafted or drawn. Such spans are the last of a round."""

    @property
    def length(self) -> int:
        return self.drafts + 1

    @property
    def drafting(self) -> bool:
        """Whether the drafter is asked."""
        return self.drafts > 0 and self.known is None


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """A chunk of a lane's prompt. The final one yields the first token; a prompt that is read again has none."""

    request: Request
    lane: int
    start: int
    tokens: tuple[int, ...]
    final: bool

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Fork:
    """A lane that takes over the state of lane ``source``, whose prompt, which is this request's too, ends in this round.
    It yields a first token of its own."""

    request: Request
    lane: int
    source: int


class Following(NamedTuple):
    """A lane of the next round: its place in ``Round.going_on``, and how many drafts it is to have."""

    place: int
    drafts: int


@dataclass(frozen=True, slots=True)
class Round:
    verify: tuple[VerifySpan, ...]
    prefill: tuple[PrefillSpan, ...]
    forks: tuple[Fork, ...] = ()
    reading: tuple[PrefillSpan, ...] = ()
    """Prompt chunks that are read beside this round and behind it: a later round has them as its ``prefill``."""
    following: tuple[Following, ...] | None = None
    """The decoding lanes of the next round, in order, where no others are expected: some of ``going_on``."""

    @property
    def chunks(self) -> tuple[PrefillSpan, ...]:
        """What the forward over prompts is over that runs in this round, whichever round commits it."""
        return self.prefill or self.reading

    @property
    def going_on(self) -> tuple[VerifySpan, ...]:
        """What decodes in this round, and behind it what may from the next one on, its prompt ending in this one: that as
        a span without drafts whose anchor is not known yet."""
        ending = (span for span in self.prefill if span.final)
        return *self.verify, *(VerifySpan(span.request, span.lane, len(span.request.prompt), 0, 0) for span in ending)

    def __bool__(self) -> bool:
        return bool(self.verify or self.prefill)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds spent in each part of a round, one behind the other; ``reading`` is what the forward over the round's prompts
    took from its beginning, be it in an earlier round."""

    draft: float = 0.0
    verify: float = 0.0
    prefill: float = 0.0
    commit: float = 0.0
    reading: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundResult:
    """``verify[i]``: the tokens that span i yields (accepted drafts, then the target's own pick); ``prefill[i]``: the first
    token of a final chunk, else None; ``forks[i]``: that of fork i. By request id, where they are asked for: ``logprobs`` of
    the tokens yielded (and of what follows, which nobody keeps), ``prompt_logprobs`` of the tokens behind a chunk's.
    ``broken``: ids of requests whose logits were not numbers, so that their tokens mean nothing."""

    verify: tuple[tuple[int, ...], ...]
    prefill: tuple[int | None, ...]
    times: RoundTimes
    forks: tuple[int, ...] = ()
    logprobs: Mapping[str, Sequence[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[TokenLogprob]] = field(default_factory=dict)
    broken: tuple[str, ...] = ()


class RoundFailed(Exception):
    """A round raised and was aborted; ``stage`` says where: begin, draft, verify, prefill or commit."""

    def __init__(self, stage: str, cause: BaseException) -> None:
        super().__init__(f"{stage}: {type(cause).__name__}: {cause}")
        self.stage = stage
