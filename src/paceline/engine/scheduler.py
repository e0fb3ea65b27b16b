"""What the next round does, and what its results mean. Pure Python: no tensors, no clock of its own, no threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Concatenate, NamedTuple, ParamSpec

from paceline.engine.admission import Admission, Lanes
from paceline.engine.pacing import Joining, Pacer, deal
from paceline.engine.plan import Following, Fork, PrefillSpan, Round, RoundResult, VerifySpan
from paceline.engine.policy import DecodeSeconds, FixedPolicy, LaneDrafts, LaneOutcome, Policy
from paceline.engine.sequence import Sequence
from paceline.errors import InvalidRequest
from paceline.types import Emission, EngineStats, FinishReason, Request

log = logging.getLogger("paceline.engine")

P = ParamSpec("P")


class _Reading(NamedTuple):
    """What a round has left to be committed by a later one, since when it is read, and whose it is: with each, how often it
    had been given a lane by then."""

    spans: tuple[PrefillSpan, ...]
    since: float
    readers: tuple[tuple[Sequence, int], ...]


class Scheduler:
    def __init__(
        self,
        lanes: Lanes,
        *,
        max_ctx: int,
        block_size: int,
        draft_max: int | None = None,
        pacer: Pacer,
        clock: Callable[[], float],
        policy: Policy | None = None,
        joining: Joining | None = None,
    ) -> None:
        """``block_size`` is the drafter's (1 without one), of whose drafts ``draft_max`` are verified at most; ``pacer``
        says how many prompt tokens a round reads. ``policy`` chooses the drafts of each lane; without one every lane
        drafts fully. ``joining`` says in which round prompts that are read are committed; without it each round commits
        what it reads."""
        self.lanes, self.max_ctx = lanes, max_ctx
        self.max_drafts = block_size - 1 if draft_max is None else min(draft_max, block_size - 1)
        self.pacer, self.clock = pacer, clock
        self.policy = policy or FixedPolicy()
        self.admission = Admission(lanes, clock)
        self.waiting, self.running = self.admission.waiting, self.admission.running
        self.joining = joining
        self._reading: _Reading | None = None
        self._was_read_beside = False
        """What the planned round commits had been begun before it."""
        self._next_reader: str | None = None
        self._planned: tuple[Round, float] | None = None
        self._following: dict[str, int] = {}
        self._added = 0
        self._finished: dict[str, int] = {}
        self._prompt_tokens = self._generated = self._restored = self._rounds = self._spans = self._emitted = 0
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
                f"{total} tokens (prompt and max_tokens) exceed the {self.lanes.longest} that the K/V pool holds of one "
                "sequence; lower max_tokens or raise kv_pool_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        self._added += 1
        self.admission.add(Sequence(request, self.clock(), self._added))

    def cancel(self, request_id: str) -> list[Emission]:
        """End a request wherever it is; unknown ids are ignored."""
        return self.end(request_id, "cancelled")

    def fail(self, request_id: str, error: str) -> list[Emission]:
        """End a request because of a fault of its own."""
        return self.end(request_id, "error", error)

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> list[Emission]:
        for sequence in self.admission:
            if sequence.request.id == request_id:
                return [self._finish(sequence, (), reason, error)]
        return []

    def expire(self) -> list[Emission]:
        """End those whose time is over."""
        now = self.clock()
        return [
            self._finish(
                one, (), "timeout", f"the request's timeout is over, {one.request.timeout:.3g} s after it was queued"
            )
            for one in self.admission
            if one.overdue_at <= now
        ]

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    # -- rounds --------------------------------------------------------------------------------------------------------

    def plan(self) -> Round:
        """The next round: make room for it, admit who can be, verify every decoding lane, put parked ones into state again,
        read prompts."""
        self.admission.make_room(self.max_drafts + 1)
        self.admission.admit()
        decoding = [sequence for sequence in self.running if sequence.decoding]
        drafts = self._drafts(decoding)
        decode, restore = self._verify_spans(decoding, drafts), self._restoring_spans()
        prefill, reading = self._prompts(len(decode))
        forks = self._forks(prefill)
        following = None if restore or forks else self._plan_following(decode, prefill)
        round = Round(decode + restore, prefill, forks, reading, following)
        self._planned = round, self.clock()
        return round

    def _drafts(self, decoding: list[Sequence]) -> list[int]:
        """What was planned for this round when the last one began, as its forward may have been begun since; else anew."""
        expected, self._following = self._following, {}
        if not decoding:
            return []
        if all(sequence.request.id in expected for sequence in decoding):
            return [min(expected[sequence.request.id], sequence.room - 1) for sequence in decoding]
        return self.policy.plan([self._may_draft(sequence, sequence.room - 1) for sequence in decoding])

    def _plan_following(
        self, decode: tuple[VerifySpan, ...], prefill: tuple[PrefillSpan, ...]
    ) -> tuple[Following, ...] | None:
        """The next round's decoding lanes. None if everybody may end in this one, or if somebody joins whose tokens were
        drawn before."""
        ending = [span for span in prefill if span.start + span.length == len(span.request.prompt)]
        if not all(span.final for span in ending):
            return None
        yields = {span.request.id: span.length for span in decode} | {span.request.id: 1 for span in ending}
        places = {name: index for index, name in enumerate(yields)}
        staying = [one for one in self.running if one.request.id in yields and one.room > 1]
        if all(one.room <= yields[one.request.id] for one in staying):
            return None
        planned = self.policy.plan([self._may_draft(one, one.room - 2) for one in staying])
        self._following = {one.request.id: drafts for one, drafts in zip(staying, planned, strict=True)}
        return tuple(Following(places[name], drafts) for name, drafts in self._following.items())

    def _verify_spans(self, decoding: list[Sequence], drafts: list[int]) -> tuple[VerifySpan, ...]:
        if not decoding:
            return ()
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

    def _restoring_spans(self) -> tuple[VerifySpan, ...]:
        """Of what parked lanes had generated, the next tokens that are to be in state again; the anchor never is."""
        spans = []
        for sequence in (one for one in self.running if one.restoring):
            first = len(sequence.tokens) - 1 - sequence.behind
            anchor, *known = sequence.tokens[first : first + min(sequence.behind, self.max_drafts + 1)]
            start = sequence.position - sequence.behind
            spans.append(VerifySpan(sequence.request, sequence.lane, start, anchor, len(known), known=tuple(known)))
        return tuple(spans)

    def _may_draft(self, sequence: Sequence, room: int) -> LaneDrafts:
        """Nothing is drafted past the end of a request, which has ``room`` for drafts."""
        request = sequence.request
        most = min(self.max_drafts, room) if request.speculate else 0
        return LaneDrafts(request.id, most, request.temperature > 0)

    def _prompts(self, decoding: int) -> tuple[tuple[PrefillSpan, ...], tuple[PrefillSpan, ...]]:
        """What the round commits, and what it leaves to a later one. Nothing else is read before that is committed."""
        now, reading, self._reading = self.clock(), self._reading, None
        forgotten = reading is not None and not self._goes_on(reading)
        self._was_read_beside = reading is not None and not forgotten
        if reading is None or forgotten:
            spans = self._prefill_spans()
            by_id = {one.request.id: one for one in self.running}
            readers = [by_id[span.request.id] for span in spans]
            reading = _Reading(spans, now, tuple((one, one.admissions) for one in readers))
        spans = reading.spans
        if not spans or self.joining is None or forgotten:  # what was begun in vain once is not left to be so again
            return spans, ()
        if self.joining.now(sum(span.length for span in spans), now - reading.since, decoding, len(spans)):
            return spans, ()
        self._reading = reading
        return (), spans

    def _goes_on(self, reading: _Reading) -> bool:
        """Whether nobody of them has been cancelled, failed or parked since, even if the lane was given back at once."""
        running = set(map(id, self.running))
        return all(
            id(one) in running and (one.admissions, one.prefilled) == (admissions, span.start)
            for span, (one, admissions) in zip(reading.spans, reading.readers, strict=True)
        )

    def _prefill_spans(self) -> tuple[PrefillSpan, ...]:
        """Prompts in turn, within the budget of the round. A prompt that was read before yields no first token again."""
        followers = self._followers()
        readers = [one for one in self.running if one.reading and one.request.id not in followers]
        if not readers:
            return ()
        turn = next((index for index, one in enumerate(readers) if one.request.id == self._next_reader), 0)
        readers = readers[turn:] + readers[:turn]
        budget = self.pacer.budget(any(one.decoding for one in self.running))
        lengths, short = deal([len(one.request.prompt) - one.prefilled for one in readers], budget)
        self._next_reader = readers[short].request.id
        return tuple(_chunk(one, length) for one, length in zip(readers, lengths, strict=True) if length)

    def _followers(self) -> dict[str, Sequence]:
        """Requests that wait for one of their group to read their common prompt, and which one that is."""
        readers: dict[str, Sequence] = {}
        followers = {}
        for sequence in self.running:
            group = sequence.request.group
            if group is None or sequence.tokens:
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
        self._teach(round, result)
        by_id = {sequence.request.id: sequence for sequence in self.running}
        emissions = [
            self._finish(by_id.pop(name), (), "error", "the model's logits were not numbers (NaN or infinite)")
            for name in result.broken
        ]
        for span, tokens in zip(round.verify, result.verify, strict=True):
            if span.request.id in by_id:
                emissions += self._booked(by_id[span.request.id], self._apply_verify, span, tokens)
        sources = {span.lane: by_id[span.request.id] for span in round.prefill if span.request.id in by_id}
        for prompt_span, token in zip(round.prefill, result.prefill, strict=True):
            if prompt_span.request.id in by_id:
                emissions += self._booked(by_id[prompt_span.request.id], self._apply_prefill, prompt_span, token, result)
        for fork, token in zip(round.forks, result.forks, strict=True):
            if fork.request.id in by_id:
                emissions += self._booked(by_id[fork.request.id], self._apply_fork, sources.get(fork.source), token)
        return [_with_logprobs(emission, result) for emission in emissions]

    def _booked(
        self, sequence: Sequence, book: Callable[Concatenate[Sequence, P], list[Emission]], *args: P.args, **kwargs: P.kwargs
    ) -> list[Emission]:
        """What booking gives. A fault in it is the sequence's own: it alone ends."""
        try:
            return book(sequence, *args, **kwargs)
        except Exception as fault:
            log.exception("request %s failed", sequence.request.id)
            error = f"the request failed inside the engine (apply: {type(fault).__name__}: {fault})"
            return [self._finish(sequence, (), "error", error)]

    def _apply_prefill(
        self, sequence: Sequence, span: PrefillSpan, token: int | None, result: RoundResult
    ) -> list[Emission]:
        sequence.prefilled += span.length
        self._prompt_tokens += span.length
        sequence.prompt_logprobs[span.start :] = result.prompt_logprobs.get(sequence.request.id, ())
        return [] if token is None else [self._first(sequence, token)]

    def _apply_fork(self, sequence: Sequence, source: Sequence | None, token: int) -> list[Emission]:
        sequence.prefilled = len(sequence.request.prompt)
        sequence.prompt_logprobs = source.prompt_logprobs if source else []
        return [self._first(sequence, token)]

    def _first(self, sequence: Sequence, token: int) -> Emission:
        sequence.first_token = self.clock()
        emission = self._emit(sequence, *sequence.extend((token,)))
        return replace(emission, prompt_logprobs=tuple(sequence.prompt_logprobs))

    def _teach(self, round: Round, result: RoundResult) -> None:
        """Beside a prompt a round's times are not those of decoding alone: a GPU runs its stages into one another. A round
        that was run again in parts says nothing about how long one takes."""
        outcomes = [
            LaneOutcome(span.request.id, span.request.temperature > 0, span.drafts, len(tokens) - 1)
            for span, tokens in zip(round.verify, result.verify, strict=True)
            if span.known is None
        ]
        times = result.times
        mixed = round.chunks or len(outcomes) < len(round.verify)
        self.policy.observe(outcomes, None if mixed else DecodeSeconds(times.draft, times.verify + times.commit))
        if self._planned is not None and self._planned[0] is round:
            tokens, seconds = sum(span.length for span in round.prefill), self.clock() - self._planned[1]
            self.pacer.observe(bool(outcomes), tokens, seconds, times.prefill)
            if self.joining is not None and round.prefill:
                self.joining.observe_reading(tokens, times.reading, len(outcomes), beside=self._was_read_beside)
            elif self.joining is not None and outcomes:
                self.joining.observe_round(seconds)

    def _apply_verify(self, sequence: Sequence, span: VerifySpan, tokens: tuple[int, ...]) -> list[Emission]:
        if span.known is not None:
            sequence.behind -= span.length
            self._restored += span.length
            return []
        accepted = len(tokens) - 1
        for position in range(span.drafts):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted
        sequence.width = span.length
        sequence.drafted += span.drafts
        sequence.accepted += accepted
        emitted, reason = sequence.extend(tokens)
        sequence.keeps.append(len(emitted))
        self._spans += 1
        self._emitted += len(emitted)
        return [self._emit(sequence, emitted, reason)]

    def _emit(self, sequence: Sequence, tokens: tuple[int, ...], reason: FinishReason | None) -> Emission:
        self._generated += len(tokens)
        if reason is not None:
            return self._finish(sequence, tokens, reason)
        return Emission(sequence.request.id, tokens)

    def _finish(
        self, sequence: Sequence, tokens: tuple[int, ...], reason: FinishReason, error: str | None = None
    ) -> Emission:
        self.admission.remove(sequence)
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
            running=tuple(sequence.lane_stats(self.clock()) for sequence in self.running),
            parked=self.admission.parked,
            parkings=dict(self.admission.parkings),
            restored_tokens=self._restored,
            itl_out_of_reach=self.pacer.out_of_reach,
        )

    def requests(self) -> SequenceOf[str]:
        """Ids of everything that has not ended."""
        return [sequence.request.id for sequence in self.admission]


def _chunk(sequence: Sequence, length: int) -> PrefillSpan:
    prompt, start = sequence.request.prompt, sequence.prefilled
    tokens, final = prompt[start : start + length], start + length == len(prompt) and not sequence.tokens
    return PrefillSpan(sequence.request, sequence.lane, start, tokens, final)


def _with_logprobs(emission: Emission, result: RoundResult) -> Emission:
    logprobs = result.logprobs.get(emission.request_id)
    return replace(emission, logprobs=tuple(logprobs[: len(emission.tokens)])) if logprobs else emission
