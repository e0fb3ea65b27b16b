"""The engine loop: messages in, rounds, emissions out. Runs in a thread of ``LLM`` or in the server's engine process."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.engine.memory import IDLE_SECONDS, give_back_freed_memory
from paceline.engine.plan import Round, RoundFailed, RoundResult, VerifySpan
from paceline.engine.runner import Runner
from paceline.engine.scheduler import Scheduler
from paceline.errors import InvalidRequest
from paceline.types import Emission, EngineStats, Request

log = logging.getLogger("paceline.engine")

_ALONE = 0.15
"""The part of the window that is waited for nobody in particular."""


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop."""


Message = Submit | Cancel | Stop
_COMPILING_SECONDS = 0.002
"""How often an idle engine looks whether a structure has been compiled."""


class Inbox(Protocol):
    def get(self, timeout: float | None) -> Message | None:
        """The next message; None after ``timeout`` seconds without one (0 polls, None waits for ever)."""


class EngineLoop:
    """``outbox`` gets the emissions of each turn and the counters after it; it must not block."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        inbox: Inbox,
        outbox: Callable[[list[Emission], EngineStats], None],
        *,
        coalesce_seconds: float,
        observe: Callable[[Round, RoundResult], None] | None = None,
    ) -> None:
        self.runner, self.scheduler, self.inbox, self.outbox = runner, scheduler, inbox, outbox
        self.coalesce_seconds, self.observe = coalesce_seconds, observe
        self._stopping = False
        self._unsent: list[Emission] = []
        self._compiling: list[Request] = []  # in the order in which they came
        self._most: float = math.inf  # requests at the same time since the engine was last idle

    def run(self) -> None:
        """Until ``Stop``; whatever has not ended then is cancelled."""
        self._send()  # the counters of an engine that nobody has asked yet
        try:
            while not self._stopping:
                self._turn()
        finally:
            self.runner.forget()
        self._unsent += [Emission(request.id, (), "cancelled") for request in self._compiling]
        self._unsent += [e for request_id in self.scheduler.requests() for e in self.scheduler.cancel(request_id)]
        self._send()

    def _turn(self) -> None:
        self._unsent += self._receive()
        if self._stopping:
            return
        self._unsent += self.scheduler.expire()
        round = self.scheduler.plan()
        if round:
            emissions = self._execute(round)  # sends what has not been sent, and only then are there others
            self._unsent += emissions
        if self.scheduler.idle:
            self.runner.forget()
        if self.scheduler.idle or not self.runner.ahead:
            self._send()

    def _send(self) -> None:
        """What has not been sent, and the counters. Where the device leaves the host time, this is done while the next round
        runs, so that it does not keep the device waiting."""
        emissions, self._unsent = self._unsent, []
        allocator = self.runner.pool.allocator
        self.outbox(emissions, self.scheduler.stats(allocator.free, allocator.total))

    # -- messages ------------------------------------------------------------------------------------------------------

    def _receive(self) -> list[Emission]:
        """Handle what has come in. From idle, the first request opens a short window in which others may join it, as many as
        there were the last time. For more than that a fraction of it is waited, each time that one comes: where there are
        more, they were sent together."""
        if not self.scheduler.idle:
            emissions = self._drain(0.0) + self._compiled()
            self._most = max(self._most, len(self.scheduler.requests()))
            return emissions
        emissions = self._handle(self._first()) + self._compiled()
        opened = latest = time.monotonic()
        while not self.scheduler.idle and not self._stopping:
            company, until = len(self.scheduler.requests()), opened + self.coalesce_seconds
            if company >= self._most:
                since = opened if company == self._most else latest
                until = min(until, since + _ALONE * self.coalesce_seconds)
            message = self.inbox.get(max(0.0, until - time.monotonic()))
            if message is None:
                break
            latest = time.monotonic()
            emissions += self._handle(message) + self._compiled()
        self._most = len(self.scheduler.requests()) or self._most
        return emissions

    def _first(self) -> Message | None:
        """Waited for; None where a structure is being compiled and no message comes meanwhile."""
        if self._compiling:
            return self.inbox.get(_COMPILING_SECONDS)
        message = self.inbox.get(IDLE_SECONDS)
        if message is None:
            give_back_freed_memory()
            message = self.inbox.get(None)
        return message

    def _drain(self, timeout: float) -> list[Emission]:
        emissions: list[Emission] = []
        while (message := self.inbox.get(timeout)) is not None:
            emissions += self._handle(message)
        return emissions

    def _handle(self, message: Message | None) -> list[Emission]:
        match message:
            case Submit(request):
                if not self.runner.ready(request):
                    self._compiling.append(request)
                    return []
                return self._added(request)
            case Cancel(request_id):
                waiting, self._compiling = self._compiling, [one for one in self._compiling if one.id != request_id]
                if len(waiting) > len(self._compiling):
                    return [Emission(request_id, (), "cancelled")]
                return self.scheduler.cancel(request_id)
            case Stop():
                self._stopping = True
        return []

    def _added(self, request: Request) -> list[Emission]:
        try:
            self.scheduler.add(request)
        except InvalidRequest as error:
            return [Emission(request.id, (), "error", None, error.message)]
        return []

    def _compiled(self) -> list[Emission]:
        """Add the requests whose structures have been compiled meanwhile."""
        waiting, self._compiling = self._compiling, []
        emissions = []
        for request in waiting:
            if self.runner.ready(request):
                emissions += self._added(request)
            else:
                self._compiling.append(request)
        return emissions

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _execute(self, round: Round) -> list[Emission]:
        try:
            return self._apply(round, self.runner.run(round, self._send if self.runner.ahead else None))
        except RoundFailed as failure:
            log.warning("round failed and is run again: %s", failure)
            return self._recover(round, failure)

    def _apply(self, round: Round, result: RoundResult) -> list[Emission]:
        if self.observe is not None:
            self.observe(round, result)
        return self.scheduler.apply(round, result)

    def _recover(self, round: Round, failure: RoundFailed) -> list[Emission]:
        """Run an aborted round again: without drafts if drafting failed, else lane by lane, where the lane that fails
        alone ends with an error and the others get the tokens they would have got."""
        if failure.stage == "draft":
            plain = replace(round, verify=tuple(map(_without_drafts, round.verify)))
            try:
                return self._apply(plain, self.runner.run(plain))
            except RoundFailed as again:
                log.warning("round failed again and is run lane by lane: %s", again)
        emissions = []
        for single in _lane_by_lane(round):
            try:
                emissions += self._apply(single, self.runner.run(single))
            except RoundFailed as alone:
                request = (single.verify or single.prefill)[0].request
                log.error("request %s failed: %s", request.id, alone)
                emissions += self.scheduler.fail(request.id, f"the request failed inside the engine ({alone})")
        return emissions


def _lane_by_lane(round: Round) -> Iterable[Round]:
    """Without forks: who was to take over a prompt's state reads it in a later round."""
    yield from (Round((_without_drafts(span),), ()) for span in round.verify)
    yield from (Round((), (span,)) for span in round.chunks)


def _without_drafts(span: VerifySpan) -> VerifySpan:
    return replace(span, drafts=0) if span.drafting else span
