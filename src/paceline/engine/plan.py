"""What one round does, as plain frozen data: made by the scheduler, executed by the runner."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.types import Request


@dataclass(frozen=True, slots=True)
class VerifySpan:
    """A lane's decode rows: the anchor at position ``start`` and ``drafts`` (K) proposals behind it. K = 0: plain decode."""

    request: Request
    lane: int
    start: int
    anchor: int
    drafts: int
    generated: tuple[int, ...] = ()
    """All tokens generated so far, the anchor included, where the request's adjustments ask for them."""

    @property
    def length(self) -> int:
        return self.drafts + 1


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """A chunk of a lane's prompt. The final one yields the first token."""

    request: Request
    lane: int
    start: int
    tokens: tuple[int, ...]
    final: bool

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Round:
    verify: tuple[VerifySpan, ...]
    prefill: tuple[PrefillSpan, ...]

    def __bool__(self) -> bool:
        return bool(self.verify or self.prefill)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds spent in each part of a round."""

    draft: float = 0.0
    verify: float = 0.0
    prefill: float = 0.0
    commit: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundResult:
    """``verify[i]``: the tokens that span i yields (accepted drafts, then the target's own pick); ``prefill[i]``: the first
    token of a final chunk, else None."""

    verify: tuple[tuple[int, ...], ...]
    prefill: tuple[int | None, ...]
    times: RoundTimes


class RoundFailed(Exception):
    """A round raised and was aborted; ``stage`` says where: begin, draft, verify, prefill or commit."""

    def __init__(self, stage: str, cause: BaseException) -> None:
        super().__init__(f"{stage}: {type(cause).__name__}: {cause}")
        self.stage = stage
