"""One request inside the engine. Only the scheduler changes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.types import FinishReason, LaneStats, Request, RequestStats, TokenLogprob

PRIORITY_SECONDS = 10.0
"""A step of priority is worth so much waiting."""


@dataclass(slots=True)
class Sequence:
    """``prefilled`` prompt tokens are in state; ``tokens`` are those generated, the last of which is the anchor. ``behind``
    tokens before the anchor are not in state, because the sequence was parked. ``number`` counts requests.
    ``prompt_logprobs`` are of the tokens behind those prefilled, where the request asks for them.

    Times are seconds on a monotonic clock.
    """

    request: Request
    arrived: float
    number: int = 0
    lane: int = -1
    admitted: float | None = None
    first_token: float | None = None
    prefilled: int = 0
    behind: int = 0
    admissions: int = 0
    """How often it has been given a lane."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    keeps: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    width: int = 0

    @property
    def rank(self) -> tuple[float, int]:
        """Who has the lower one goes first."""
        return self.arrived + PRIORITY_SECONDS * self.request.priority, self.number

    @property
    def overdue_at(self) -> float:
        return math.inf if self.request.timeout is None else self.arrived + self.request.timeout

    @property
    def reading(self) -> bool:
        return self.prefilled < len(self.request.prompt)

    @property
    def restoring(self) -> bool:
        """Whether its prompt is in state again, and not yet all it had generated."""
        return self.behind > 0 and not self.reading

    @property
    def decoding(self) -> bool:
        return bool(self.tokens) and not self.reading and not self.behind

    @property
    def position(self) -> int:
        """Where the anchor sits; while ``decoding``, the number of tokens in state."""
        return len(self.request.prompt) + len(self.tokens) - 1

    def reach(self, rows: int) -> int:
        """Tokens in state with ``rows`` more behind everything that is known, or at the end of the request."""
        prompt = len(self.request.prompt)
        return min(prompt + max(0, len(self.tokens) - 1) + rows, prompt + self.request.max_tokens)

    def park(self) -> None:
        """Nothing is in state any more."""
        self.lane, self.prefilled, self.behind = -1, 0, max(0, len(self.tokens) - 1)

    @property
    def room(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_tokens - len(self.tokens)

    def extend(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append tokens up to the end of the request; returns those really emitted and why it ended, if it did."""
        emitted: list[int] = []
        for token in tokens:
            emitted.append(token)
            self.tokens.append(token)
            if token in self.request.stop_ids:
                return tuple(emitted), "stop"
            if self.room == 0:
                return tuple(emitted), "length"
        return tuple(emitted), None

    def stats(self, now: float) -> RequestStats:
        admitted = now if self.admitted is None else self.admitted
        first = now if self.first_token is None else self.first_token
        return RequestStats(
            seed=self.request.seed,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.tokens),
            rounds=len(self.keeps),
            drafted=self.drafted,
            accepted=self.accepted,
            keeps=tuple(self.keeps),
            queue_seconds=admitted - self.arrived,
            prefill_seconds=first - admitted,
            decode_seconds=now - first,
        )

    def lane_stats(self, now: float) -> LaneStats:
        return LaneStats(
            lane=self.lane,
            request_id=self.request.id,
            state="decode" if self.decoding else "prefill",
            prompt_tokens=len(self.request.prompt),
            prefilled=self.prefilled,
            generated=len(self.tokens),
            width=self.width,
            rounds=len(self.keeps),
            drafted=self.drafted,
            accepted=self.accepted,
            age_seconds=now - self.arrived,
        )
