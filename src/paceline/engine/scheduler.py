"""Who runs in the next round, and what its results mean. Pure Python: no tensors, no clock of its own, no threads.

First come, first served: a request waits until a lane and its pages are free, nothing overtakes it, and a lane is free
again in the moment its request ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Protocol

from paceline.config import CHUNK_SIZE
from paceline.engine.plan import Fork, PrefillSpan, Round, RoundResult, VerifySpan
from paceline.engine.policy import DecodeSeconds, FixedPolicy, LaneDrafts, LaneOutcome, Policy
from paceline.engine.sequence import Sequence
from paceline.errors import InvalidRequest
from paceline.types import Emission, EngineStats, FinishReason, Request


class Lanes(Protocol):
    """What the scheduler needs of the state pool."""

    @property
    def count(self) -> int: ...
    @property
    def longest(self) -> int: ...
    def fits(self, tokens: Iterable[int]) -> bool: ...
    def admit(self, tokens: int) -> int | None: ...
    def grow(self, lane: int, tokens: int) -> bool: ...
    def release(self, lane: int) -> None: ...


class Scheduler:
    def __init__(
        self,
        lanes: Lanes,
        *,
        max_ctx: int,
        block_size: int,
        prefill_tokens: int,
        clock: Callable[[], float],
        policy: Policy | None = None,
    ) -> None:
        """``block_size`` is the drafter's (1 without one); ``prefill_tokens`` the prompt tokens per round while lanes
        decode. An idle engine reads prompts four times as fast per round. ``policy`` chooses the drafts of each lane;
        without one every lane drafts fully."""
        self.lanes, self.max_ctx, self.max_drafts = lanes, max_ctx, block_size - 1
        self.prefill_tokens, self.clock = prefill_tokens, clock
        self.policy = policy or FixedPolicy()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._finished: dict[str, int] = {}
        self._prompt_tokens = self._generated = self._rounds = self._spans = self._emitted = 0
        self._decode_rounds = {"plain": 0, "drafting": 0, "probe": 0}
        self._drafted = [0] * self.max_drafts
        self._accepted = [0] * self.max_drafts

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, or raise ``InvalidRequest`` when it can never run."""
        prompt = len(request.prompt)
        if prompt == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if prompt >= self.max_ctx:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens, the context holds {self.max_ctx} with at least one for the answer",
                param="prompt",
                code="context_length_exceeded",
            )
        total = prompt + request.max_tokens
        if total > self.max_ctx or request.max_tokens < 1:
            raise InvalidRequest(
                f"{prompt} prompt tokens and {request.max_tokens} to generate do not fit a context of {self.max_ctx}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if total > self.lanes.longest:
            raise InvalidRequest(
                f"{total} tokens (prompt and max_tokens) exceed the {self.lanes.longest} that the K/V pool holds of one sequence; "
                "lower max_tokens or raise kv_pool_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        self.waiting.append(Sequence(request, self.clock()))

    def cancel(self, request_id: str) -> list[Emission]:
        """End a request wherever it is; unknown ids are ignored."""
        return self.end(request_id, "cancelled")

    def fail(self, request_id: str, error: str) -> list[Emission]:
        """End a request because of a fault of its own."""
        return self.end(request_id, "error", error)

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> list[Emission]:
        for sequence in (*self.waiting, *self.running):
            if sequence.request.id == request_id:
                return [self._finish(sequence, (), reason, error)]
        return []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    # -- rounds --------------------------------------------------------------------------------------------------------

    def plan(self) -> Round:
        """The next round: admit who can be, verify every decoding lane, read prompts within the budget, oldest first."""
        self._admit()
        verify = self._verify_spans()
        budget = self.prefill_tokens if verify else 4 * self.prefill_tokens
        prefill = self._prefill_spans(budget)
        return Round(verify, prefill, self._forks(prefill))

    def _admit(self) -> None:
        while self.waiting:
            sequence = self.waiting[0]
            lane = self.lanes.admit(len(sequence.request.prompt) + sequence.request.max_tokens)
            if lane is None:
                return
            self.waiting.popleft()
            sequence.lane, sequence.admitted = lane, self.clock()
            self.running.append(sequence)

    def _verify_spans(self) -> tuple[VerifySpan, ...]:
        """Nothing is drafted past the end of a request."""
        decoding = [sequence for sequence in self.running if sequence.decoding]
        if not decoding:
            return ()
        drafts = self.policy.plan([self._may_draft(sequence) for sequence in decoding])
        kind = "probe" if self.policy.probing else "drafting" if any(drafts) else "plain"
        self._decode_rounds[kind] += 1
        return tuple(
            VerifySpan(
                sequence.request,
                sequence.lane,
                sequence.position,
                sequence.tokens[-1],
                count,
                tuple(sequence.tokens) if sequence.request.recalls else (),
            )
            for sequence, count in zip(decoding, drafts, strict=True)
        )

    def _may_draft(self, sequence: Sequence) -> LaneDrafts:
        request = sequence.request
        most = min(self.max_drafts, sequence.room - 1) if request.speculate else 0
        return LaneDrafts(request.id, most, request.temperature > 0)

    def _prefill_spans(self, budget: int) -> tuple[PrefillSpan, ...]:
        spans = []
        followers = self._followers()
        for sequence in self.running:
            if sequence.decoding or sequence.request.id in followers:
                continue
            prompt, start = sequence.request.prompt, sequence.prefilled
            length = len(prompt) - start
            if length > budget:
                # a prompt is cut only on the grid of the chunked scan, so that the cut cannot be seen in the result
                length = budget // CHUNK_SIZE * CHUNK_SIZE
                if length == 0:
                    break
            tokens = prompt[start : start + length]
            spans.append(PrefillSpan(sequence.request, sequence.lane, start, tokens, start + length == len(prompt)))
            budget -= length
        return tuple(spans)

    def _followers(self) -> dict[str, Sequence]:
        """Requests that wait for one of their group to read their common prompt, and which one that is."""
        readers: dict[str, Sequence] = {}
        followers = {}
        for sequence in self.running:
            group = sequence.request.group
            if group is None or sequence.decoding:
                continue
            reader = readers.setdefault(group, sequence)
            if reader is not sequence and not sequence.prefilled:
                followers[sequence.request.id] = reader
        return followers

    def _forks(self, prefill: tuple[PrefillSpan, ...]) -> tuple[Fork, ...]:
        """Everybody who follows a prompt that ends in this round."""
        ending = {span.request.id: span.lane for span in prefill if span.final}
        by_id = {sequence.request.id: sequence for sequence in self.running}
        return tuple(
            Fork(by_id[name].request, by_id[name].lane, ending[reader.request.id])
            for name, reader in self._followers().items()
            if reader.request.id in ending
        )

    def apply(self, round: Round, result: RoundResult) -> list[Emission]:
        """Book the results of a round: tokens, stops, caps; freed lanes. Returns what the clients are to see."""
        self._rounds += 1
        self._teach_policy(round, result)
        by_id = {sequence.request.id: sequence for sequence in self.running}
        emissions = []
        for span, tokens in zip(round.verify, result.verify, strict=True):
            emissions.append(self._apply_verify(by_id[span.request.id], span, tokens))
        for prompt_span, token in zip(round.prefill, result.prefill, strict=True):
            sequence = by_id[prompt_span.request.id]
            sequence.prefilled += prompt_span.length
            self._prompt_tokens += prompt_span.length
            sequence.prompt_logprobs[prompt_span.start :] = result.prompt_logprobs.get(sequence.request.id, ())
            if token is not None:
                emissions.append(self._first(sequence, token))
        sources = {span.lane: by_id[span.request.id] for span in round.prefill}
        for fork, token in zip(round.forks, result.forks, strict=True):
            sequence = by_id[fork.request.id]
            sequence.prefilled = len(fork.request.prompt)
            sequence.prompt_logprobs = sources[fork.source].prompt_logprobs
            emissions.append(self._first(sequence, token))
        return [_with_logprobs(emission, result) for emission in emissions]

    def _first(self, sequence: Sequence, token: int) -> Emission:
        sequence.first_token = self.clock()
        emission = self._emit(sequence, *sequence.extend((token,)))
        return replace(emission, prompt_logprobs=tuple(sequence.prompt_logprobs))

    def _teach_policy(self, round: Round, result: RoundResult) -> None:
        """Beside a prompt a round's times are not those of decoding alone: a GPU runs its stages into one another."""
        outcomes = [
            LaneOutcome(span.request.id, span.request.temperature > 0, span.drafts, len(tokens) - 1)
            for span, tokens in zip(round.verify, result.verify, strict=True)
        ]
        times = result.times
        self.policy.observe(outcomes, None if round.prefill else DecodeSeconds(times.draft, times.verify + times.commit))

    def _apply_verify(self, sequence: Sequence, span: VerifySpan, tokens: tuple[int, ...]) -> Emission:
        accepted = len(tokens) - 1
        for position in range(span.drafts):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted
        sequence.drafted += span.drafts
        sequence.accepted += accepted
        emitted, reason = sequence.extend(tokens)
        sequence.keeps.append(len(emitted))
        self._spans += 1
        self._emitted += len(emitted)
        return self._emit(sequence, emitted, reason)

    def _emit(self, sequence: Sequence, tokens: tuple[int, ...], reason: FinishReason | None) -> Emission:
        self._generated += len(tokens)
        if reason is not None:
            return self._finish(sequence, tokens, reason)
        return Emission(sequence.request.id, tokens)

    def _finish(
        self, sequence: Sequence, tokens: tuple[int, ...], reason: FinishReason, error: str | None = None
    ) -> Emission:
        if sequence.lane >= 0:
            self.running.remove(sequence)
            self.lanes.release(sequence.lane)
        else:
            self.waiting.remove(sequence)
        self.policy.forget(sequence.request.id)
        self._finished[reason] = self._finished.get(reason, 0) + 1
        return Emission(sequence.request.id, tokens, reason, sequence.stats(self.clock()), error)

    # -- counters ------------------------------------------------------------------------------------------------------

    def stats(self, pages_free: int, pages_total: int) -> EngineStats:
        return EngineStats(
            queued=len(self.waiting),
            lanes=len(self.running),
            requests_finished=dict(self._finished),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            rounds=self._rounds,
            decode_rounds=dict(self._decode_rounds),
            verify_spans=self._spans,
            emitted_in_verify=self._emitted,
            drafted=tuple(self._drafted),
            accepted=tuple(self._accepted),
            pages_free=pages_free,
            pages_total=pages_total,
        )

    def requests(self) -> SequenceOf[str]:
        """Ids of everything that has not ended."""
        return [sequence.request.id for sequence in (*self.waiting, *self.running)]


def _with_logprobs(emission: Emission, result: RoundResult) -> Emission:
    logprobs = result.logprobs.get(emission.request_id)
    return replace(emission, logprobs=tuple(logprobs[: len(emission.tokens)])) if logprobs else emission
