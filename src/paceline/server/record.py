"""The two log lines of a request: when it goes to the engine, and when it has ended on both sides. No text, only numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from paceline.errors import PacelineError
from paceline.logs import event, request_id
from paceline.server.replies import ReplyReason
from paceline.types import Emission, RequestStats, SamplingParams

logger = logging.getLogger("paceline.server")


class RequestRecord:
    """Of all choices of one client's request together. ``arrived`` is in monotonic seconds."""

    def __init__(self, endpoint: str, arrived: float) -> None:
        self.error: PacelineError | None = None
        self._endpoint, self._arrived = endpoint, arrived
        self._id = request_id.get()
        self._choices = 0
        self._reasons: dict[int, ReplyReason] = {}
        self._left: dict[int, RequestStats | None] = {}
        self._prompt_tokens = 0

    def start(self, engine_ids: Iterable[str], prompt_tokens: int, sampling: SamplingParams) -> None:
        ids = list(engine_ids)
        self._choices, self._prompt_tokens = len(ids), prompt_tokens
        event(
            logger,
            "request started",
            id=self._id,
            endpoint=self._endpoint,
            prompt_tokens=prompt_tokens,
            max_tokens=sampling.max_tokens,
            choices=len(ids),
            engine_ids=ids,
        )

    def failed(self, error: PacelineError) -> None:
        """The client is told this error."""
        self.error = self.error or error

    def ended(self, index: int, reason: ReplyReason) -> None:
        """What a choice ended with for the client."""
        self._reasons[index] = reason
        self._finish()

    def left_engine(self, index: int, emission: Emission) -> None:
        """The last emission of a choice, which the client may not have waited for."""
        self._left[index] = emission.stats
        self._finish()

    def _finish(self) -> None:
        if not self._choices == len(self._left) == len(self._reasons):
            return
        stats = [one for one in self._left.values() if one is not None]
        rounds = sum(one.rounds for one in stats)
        emitted = sum(sum(one.keeps) for one in stats)
        event(
            logger,
            "request ended",
            id=self._id,
            endpoint=self._endpoint,
            finish_reason="error" if self.error else ",".join(sorted(set(self._reasons.values()))),
            error=self.error.code if self.error else None,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(one.completion_tokens for one in stats),
            queue_ms=_ms(max((one.queue_seconds for one in stats), default=0.0)),
            prefill_ms=_ms(max((one.prefill_seconds for one in stats), default=0.0)),
            decode_ms=_ms(max((one.decode_seconds for one in stats), default=0.0)),
            total_ms=_ms(time.monotonic() - self._arrived),
            rounds=rounds,
            drafted=sum(one.drafted for one in stats),
            accepted=sum(one.accepted for one in stats),
            acceptance_length=round(emitted / rounds, 3) if rounds else None,
        )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
