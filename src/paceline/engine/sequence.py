"""One request inside the engine. Only the scheduler changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.types import FinishReason, Request, RequestStats, TokenLogprob


@dataclass(slots=True)
class Sequence:
    """``prefilled`` prompt tokens are in state; ``tokens`` are those generated, the last of which is the anchor.
    ``prompt_logprobs`` are of the tokens behind those prefilled, where the request asks for them.

    Times are seconds on a monotonic clock.
    """

    request: Request
    arrived: float
    lane: int = -1
    admitted: float = 0.0
    first_token: float = 0.0
    prefilled: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    keeps: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def decoding(self) -> bool:
        return bool(self.tokens)

    @property
    def position(self) -> int:
        """Where the anchor sits: the number of tokens in state."""
        return len(self.request.prompt) + len(self.tokens) - 1

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
        admitted = self.admitted or now
        first = self.first_token or now
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
