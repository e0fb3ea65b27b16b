"""Executes a round: draft, verify, sample, accept, prefill, commit. The only place where the models run.

Nothing waits for the device before the round's results are read, in one copy.
"""

from __future__ import annotations

import itertools
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.engine.ahead import Ahead, Laid, draft_ahead, ends_of, verify_ahead
from paceline.engine.beside import Beside
from paceline.engine.decode import DecodeInputs, decode_inputs, verify_forward
from paceline.engine.drafting import Drafter
from paceline.engine.graphs import Graphs
from paceline.engine.plan import PrefillSpan, Round, RoundFailed, RoundResult, RoundTimes, VerifySpan
from paceline.engine.prompts import PromptInputs, prefill_forward, prompt_inputs
from paceline.engine.rows import Draw, picked
from paceline.engine.scores import Scores
from paceline.engine.structures import Path, Permits, Structures, paths
from paceline.engine.synthetic import SyntheticAcceptance
from paceline.forcing import forced, foretold
from paceline.logprobs import ROWS_AT_ONCE
from paceline.models.qwen35 import Hidden, Qwen35
from paceline.ops.accept import Verdict, accept
from paceline.ops.topk import peaks
from paceline.penalties import adjusted
from paceline.state.pool import LaneFork, SpanRows, StatePool, Txn
from paceline.structure import permitted
from paceline.transfer import Arriving, to_device
from paceline.types import Request, Row

log = logging.getLogger("paceline.engine")


class Runner:
    def __init__(
        self,
        target: Qwen35,
        drafter: Drafter | None,
        pool: StatePool,
        *,
        graphs: Graphs | None = None,
        structures: Structures | None = None,
        synthetic: SyntheticAcceptance | None = None,
        run_ahead: bool = False,
        prompts_beside: bool = False,
        nvtx: bool = False,
    ) -> None:
        """``graphs`` are captured decode forwards, run where one fits; ``structures`` are of requests that have one;
        ``synthetic`` replaces acceptance, in benchmarks only; ``run_ahead``: where a round says so, and there are graphs,
        begin the next one before its results are read; ``prompts_beside``: where there are graphs, read prompts on a
        stream of their own; ``nvtx`` marks the stages of a round for a profiler."""
        self.target, self.drafter, self.pool = target, drafter, pool
        self.graphs, self.structures, self.synthetic, self.nvtx = graphs, structures, synthetic, nvtx
        self.run_ahead = run_ahead and graphs is not None
        self._beside = Beside(pool.device) if prompts_beside and graphs is not None else None
        self._begun: _Begun | None = None
        self._reading: _Reading | None = None

    @property
    def ahead(self) -> bool:
        """Whether the host has time while the device computes a round."""
        return self.pool.device.type == "cuda"

    def ready(self, request: Request) -> bool:
        """Whether rounds may have this request; one with a structure has to wait until that is compiled."""
        return self.structures is None or self.structures.ready(request)

    def forget(self) -> None:
        """Nobody is there any more whom it concerns what has been begun. The device is waited for where it writes to memory
        that may be given to others from now on."""
        reading, self._reading, self._begun = self._reading, None, None
        self._wait_for_all()
        if reading is not None and self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)

    @torch.inference_mode()
    def run(self, round: Round, meanwhile: Callable[[], None] | None = None) -> RoundResult:
        """One transaction. After ``RoundFailed``, which tells the stage, the state is as before. Any other exception ends
        the engine: the device is lost, or it failed when the state had changed already. ``meanwhile`` is called when all
        has been launched and only the results are waited for."""
        clock, txn = _Clock(self.pool.device, self.nvtx), None
        ahead = round.following is not None and self.run_ahead
        begun, self._begun = self._begun, None
        if self.structures is not None:
            self.structures.begin([*(span.request for span in round.verify), *(span.request for span in round.prefill)])
        try:
            self._keep_reading(round.chunks)
            starting = self._reading is None and bool(round.chunks)
            with self._beside.behind_commit() if self._beside and starting else nullcontext():
                txn = self._opened(round, ahead, starting)
            self.pool.send_table()
            scores = Scores()
            laid = self._laid(round.verify, begun)
            with clock.stage("draft"):
                drafts = None if laid else self._draft(round.verify, begun, clock)
                self._catch_up(round.verify)
            with clock.stage("verify"):
                forward = self._begun_forward(round.verify, laid, begun, clock) if laid else None
                verdict = self._verify(round.verify, forward, drafts, txn, scores)
            with clock.stage("prefill"):
                if starting:
                    self._read(round.chunks, begun)
                first, broken = self._prefill(round, txn, scores, clock)
            with clock.stage("commit"):
                results = _joined(round, verdict, first, broken, scores)
                self.pool.apply(txn, verdict.keep)
                if self._beside is not None:
                    self._beside.committed()
        except Exception as cause:
            if txn is not None:
                self.pool.abort(txn)
            if isinstance(cause, torch.AcceleratorError):
                raise  # the device is lost, and with it the state of every lane: the engine ends
            self._reading = None
            self._wait_for_all()
            traceback.clear_frames(cause.__traceback__)  # they hold the round's tensors, and another try needs the memory
            raise RoundFailed(clock.current, cause) from cause
        arriving = Arriving(results)
        if ahead:
            self._run_ahead(round, verdict, first)
        if meanwhile is not None:
            meanwhile()
        result = _read(round, arriving.wait(), verdict.report.shape[1], scores)
        self.pool.settle(txn, [*map(len, result.verify), *(span.length for span in round.prefill)])
        if self._begun is not None:
            ends = [(len(tokens), tokens[-1]) for tokens in result.verify]
            self._begun.work.settle([*ends, *((0, token) for token in result.prefill if token is not None)])
        return replace(result, times=clock.times())

    def _run_ahead(self, round: Round, verdict: Verdict, first: Tensor) -> None:
        assert self.graphs is not None
        clock = _Clock(self.pool.device, self.nvtx)
        try:
            with clock.stage("draft"):
                ends = ends_of(round, verdict, first)
                drafts = draft_ahead(round, ends, self.graphs)
            with clock.stage("verify"):
                forward = verify_ahead(round, ends, drafts, self.graphs, self.pool)
        except torch.AcceleratorError:
            raise
        except Exception:  # this round is done; the next one runs all of its own, and knows what to do if that fails
            log.warning("running ahead failed", exc_info=True)
            self._wait_for_all()  # for what was launched nevertheless, of which nothing is known now
            return
        self._begun = _Begun(Ahead(drafts, forward), clock.marks)

    def _laid(self, spans: tuple[VerifySpan, ...], begun: _Begun | None) -> Laid | None:
        """How the spans lie in a forward that was begun; None if it has to be run anew."""
        forward = begun.work.forward if begun else None
        return forward.lay(spans, self.pool) if forward and spans else None

    def _begun_forward(self, spans: tuple[VerifySpan, ...], laid: Laid, begun: _Begun | None, clock: _Clock) -> _Forward:
        assert begun is not None and begun.work.forward is not None
        for stage, marks in begun.marks.items():
            clock.add(stage, marks)
        forward = begun.work.forward
        return _Forward(laid, forward.inputs(laid, spans, self._block_size), forward.tokens, forward.logits)

    def _draft(self, spans: tuple[VerifySpan, ...], begun: _Begun | None, clock: _Clock) -> Tensor | None:
        """Drafts [D, B - 1] of the lanes that speculate in this round, and behind them the tokens that are known."""
        parts = []
        drafting = [span for span in spans if span.drafting]
        if drafting:
            drafts = begun.work.drafts.of(drafting) if begun and begun.work.drafts else None
            if drafts is None:
                drafts = self._propose(drafting)
            elif begun is not None:
                clock.add("draft", begun.marks["draft"])
            parts.append(foretold(drafts[: len(drafting)], [(span.request, span.generated) for span in drafting]))
        known = [span.known for span in spans if span.known]
        if known:
            given = np.zeros((len(known), self._block_size - 1), np.int64)
            for row, tokens in zip(given, known, strict=True):
                row[: len(tokens)] = tokens
            parts.append(to_device(given, self.pool.device))
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None

    def _propose(self, drafting: Sequence[VerifySpan]) -> Tensor:
        assert self.drafter is not None, "drafts planned without a drafter"
        captured = self.graphs.draft(drafting) if self.graphs else None
        return captured if captured is not None else self.drafter.propose(drafting, self.pool)

    def _catch_up(self, spans: tuple[VerifySpan, ...]) -> None:
        """Lanes that draft have caught up by now. Let the others do so, all together, before one of them has more features
        waiting than are kept."""
        pool = self.pool
        pool.caught_up(span.lane for span in spans if span.drafting)
        others = [span for span in spans if not span.drafting]
        if any(pool.backlog(span.lane) + span.length > self._block_size for span in others):
            assert self.drafter is not None, "features, and nobody who wants them"
            if not (self.graphs and self.graphs.catch_up(others)):
                self.drafter.catch_up(others, pool)
            pool.caught_up(span.lane for span in others)

    @property
    def _block_size(self) -> int:
        return self.drafter.block_size if self.drafter else 1

    def _verify(
        self,
        spans: tuple[VerifySpan, ...],
        forward: _Forward | None,
        drafts: Tensor | None,
        txn: Txn,
        scores: Scores,
    ) -> Verdict:
        """One packed ``forward`` over [anchor, drafts …] of every decoding lane, unless it was begun before: what all spans
        of the forward keep, and the report of the round's own."""
        if not spans:
            none = torch.zeros(0, 4, dtype=torch.long, device=self.pool.device)
            return Verdict(none[:, 0], none)
        following = any(span.drafting and span.request.structure is not None for span in spans)
        told = Arriving(drafts) if drafts is not None and following else None
        laid, inputs, tokens, logits = forward or self._forward(spans, drafts)
        txn.decode = inputs.half
        draws = [(span.request, span.start + row + 1) for span in laid.spans for row in range(span.length)]
        logits = logits[: len(draws)]
        permits = self._permits(paths(laid.spans, told.wait() if told else ()))
        picks = _drawn(logits, draws, _recalling_rows(laid.spans), tokens, permits)
        scores.add(logits, picks, [request for request, _ in draws])
        verdict = self._accept(laid.spans, inputs.half.batch, tokens, picks, logits)
        if len(laid.own) == len(laid.spans):
            return verdict
        return verdict._replace(report=verdict.report[to_device(np.array(laid.own), self.pool.device)])

    def _forward(self, spans: tuple[VerifySpan, ...], drafts: Tensor | None) -> _Forward:
        """With padding at the end if it is captured."""
        laid = Laid(spans, tuple(range(len(spans))))
        captured = self.graphs.verify(spans) if self.graphs else None
        if captured is not None:
            return _Forward(laid, captured.inputs, *captured.run(drafts))
        inputs = decode_inputs(spans, self._block_size, self.pool)
        tokens = inputs.tokens(drafts)
        return _Forward(laid, inputs, tokens, verify_forward(self.target, self.drafter, tokens, inputs.half))

    def _accept(
        self, spans: Sequence[VerifySpan], batch: PackedBatch, tokens: Tensor, picks: Tensor, logits: Tensor
    ) -> Verdict:
        width = max(span.length for span in spans)
        held = self._held(spans)
        given = None
        if any(drafts >= 0 for drafts in held):
            given = to_device(np.array(held + [-1] * (batch.num_spans - len(held)), np.int64), picks.device)
        return accept(tokens, picks, peaks(logits), batch.starts, batch.span_lengths, width, given)

    def _held(self, spans: Sequence[VerifySpan]) -> list[int]:
        """How many drafts hold of spans where that is no question, because they are known or acceptance is made up; -1 of
        others."""
        made_up = self.synthetic.held if self.synthetic else lambda span: -1
        return [made_up(span) if span.known is None else span.drafts for span in spans]

    def _keep_reading(self, spans: tuple[PrefillSpan, ...]) -> None:
        """Forget the forward that has been begun unless it is over these very chunks: somebody has been cancelled, or
        parked, and whatever comes now may be given the pages that it writes to. (Equal ones may be of another lane that has
        the same number.)"""
        if self._reading is None or self._reading.spans is spans:
            return
        self._reading = None
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        """What is launched from now on comes after all that was launched before."""
        if self._beside is not None:
            self._beside.wait_for_all()

    def _opened(self, round: Round, ahead: bool, starting: bool) -> Txn:
        """The round's transaction; ``starting``: the forward over its prompts is launched in this round."""
        spans = [_verify_rows(span, ahead) for span in round.verify]
        spans += [_prompt_rows(span, ahead) for span in round.prefill]
        reading = [_prompt_rows(span, False) for span in round.reading if starting]
        forks = [LaneFork(fork.source, fork.lane) for fork in round.forks]
        txn = self.pool.begin(spans, forks, reading, packed=False)
        if starting:
            self.pool.send_prompt_table()
        return txn

    def _read(self, spans: tuple[PrefillSpan, ...], begun: _Begun | None) -> None:
        """Launch one packed forward over the prompt chunks."""
        if begun is not None and begun.work.writes_to({span.lane for span in spans}, self.pool):
            self._wait_for_all()
        clock = _Clock(self.pool.device, self.nvtx)
        with self._beside.other() if self._beside else nullcontext(), clock.stage("reading"):
            captured = self.graphs.prefill(spans) if self.graphs else None
            if captured is not None:
                inputs, hidden = captured.inputs, captured.run()
            else:
                inputs = prompt_inputs(spans, self.pool)
                hidden = prefill_forward(self.target, self.drafter, inputs)
        self._reading = _Reading(spans, inputs, hidden, clock.marks["reading"])

    def _prefill(self, round: Round, txn: Txn, scores: Scores, clock: _Clock) -> tuple[Tensor, Tensor]:
        """Of the prompts whose chunks this round commits: the first tokens [F] of those that end here, then of forks, and
        which [F] are not from numbers."""
        spans, none = round.prefill, torch.zeros(0, dtype=torch.long, device=self.pool.device)
        if not spans:
            return none, none
        assert self._reading is not None
        (_, inputs, hidden, marks), self._reading = self._reading, None
        if self._beside is not None:
            self._beside.join()
        clock.marks["reading"] = marks
        txn.prefill = inputs.half
        ends = np.cumsum([span.length for span in spans])
        for span, end in zip(spans, ends, strict=True):
            if span.request.prompt_logprobs is not None:
                self._score_prompt(span, hidden, int(end) - span.length, scores)
        last = {span.lane: end - 1 for span, end in zip(spans, ends, strict=True) if span.final}
        drawing = [(span.request, last[span.lane]) for span in spans if span.final]
        drawing += [(fork.request, last[fork.source]) for fork in round.forks]
        if not drawing:
            return none, none
        requests = [request for request, _ in drawing]
        rows = to_device(np.array([row for _, row in drawing]), self.pool.device)
        fresh = [Row(at, request, ()) for at, request in enumerate(requests) if request.recalls]
        logits = self.target.logits(hidden.rows(rows))
        draws = [(request, len(request.prompt)) for request in requests]
        permits = self._permits([Path(request, at) for at, request in enumerate(requests) if request.structure is not None])
        first = _drawn(logits, draws, fresh, permits=permits)
        scores.add(logits, first, requests)
        return first, _broken(logits)

    def _permits(self, paths: Sequence[Path]) -> Permits | None:
        """Host work, done while the device computes the logits."""
        if not paths:
            return None
        assert self.structures is not None, "a structure, and nothing that knows the tokens"
        return self.structures.permits(paths)

    def _score_prompt(self, span: PrefillSpan, hidden: Hidden, first: int, scores: Scores) -> None:
        """Score the prompt's tokens behind those of the span, whose rows begin at row ``first``."""
        following = span.request.prompt[span.start + 1 : span.start + span.length + 1]
        for at in range(0, len(following), ROWS_AT_ONCE):
            tokens = to_device(np.array(following[at : at + ROWS_AT_ONCE]), self.pool.device)
            rows = torch.arange(first + at, first + at + len(tokens), device=tokens.device)
            scores.add_prompt(self.target.logits(hidden.rows(rows)), tokens, span.request)


def _broken(logits: Tensor) -> Tensor:
    """Which rows [N] of logits [N, V] have no finite maximum: they hold a NaN or infinity, or nothing is above minus it."""
    return ~peaks(logits).amax(1).isfinite()


def _joined(round: Round, verdict: Verdict, first: Tensor, broken: Tensor, scores: Scores) -> Tensor:
    """The round's results in one tensor: the report of the verify spans, the first tokens of prompts and of forks, which of
    those are broken, logprobs."""
    report = verdict.report[: len(round.verify)].flatten()
    others = [*((first, broken.long()) if len(first) else ()), *scores.tensors()]
    return torch.cat((report, *others)) if others else report


def _read(round: Round, read: list[int], width: int, scores: Scores) -> RoundResult:
    """The round's only copy from the device, taken apart: tokens per verify span, by a report of ``width`` numbers each; the
    first token per prefill span (None: not its last) and per fork; logprobs."""
    spans, forked = len(round.verify), len(round.forks)
    final = [span.request.id for span in round.prefill if span.final]
    drawing = [*final, *(fork.request.id for fork in round.forks)]
    ends = np.cumsum([0, spans * width, len(final), forked, len(drawing)]).tolist()
    grid, first, forks, flags = (read[begin:end] for begin, end in itertools.pairwise(ends))
    reports = [grid[at : at + width] for at in range(0, len(grid), width)]
    tokens = tuple(tuple(emitted[:keep]) for keep, _, _, *emitted in reports)
    firsts = iter(first)
    of_prompts = tuple(next(firsts) if span.final else None for span in round.prefill)
    logprobs, prompt_logprobs = scores.read(read[ends[-1] :])
    flagged = [(span.request.id, flag) for span, (_, _, flag, *_) in zip(round.verify, reports, strict=True)]
    broken = tuple(name for name, flag in [*flagged, *zip(drawing, flags, strict=True)] if flag)
    return RoundResult(tokens, of_prompts, RoundTimes(), tuple(forks), logprobs, prompt_logprobs, broken)


def _drawn(
    logits: Tensor,
    draws: Sequence[Draw],
    recalling: Sequence[Row],
    tokens: Tensor | None = None,
    permits: Permits | None = None,
) -> Tensor:
    """The token of each draw, [R]: by the logits, of tokens that are permitted, adjusted, and by what is forced at the rows
    that recall earlier tokens."""
    chosen_from = permitted(logits, permits.rows, permits.words) if permits else logits
    chosen_from = adjusted(chosen_from, [row for row in recalling if row.request.adjust], tokens)
    picks = picked(chosen_from, draws)
    return forced(picks, [row for row in recalling if row.request.forcing], tokens)


def _recalling_rows(spans: Sequence[VerifySpan]) -> list[Row]:
    """Row i of a span has its first i drafts before it, which are the inputs of the rows behind the first."""
    rows, first = [], 0
    for span in spans:
        if span.request.recalls and span.known is None:
            behind = range(first, first + span.length)
            rows += [Row(index, span.request, span.generated, (first + 1, index + 1)) for index in behind]
        first += span.length
    return rows


def _verify_rows(span: VerifySpan, ahead: bool) -> SpanRows:
    return SpanRows(span.lane, span.start, span.length, "decode", drafting=span.drafting, ahead=ahead)


def _prompt_rows(span: PrefillSpan, ahead: bool) -> SpanRows:
    return SpanRows(span.lane, span.start, span.length, "prefill", ahead=ahead and span.final)


class _Clock:
    """Seconds per stage of a round, and the stage it is in. A GPU runs behind the host and takes its own times."""

    def __init__(self, device: torch.device, nvtx: bool) -> None:
        self.current = "begin"
        self._on_gpu = device.type == "cuda"
        self._nvtx = nvtx and self._on_gpu
        self.marks: dict[str, _Marks] = {}
        self._earlier: dict[str, _Marks] = {}
        self._last: _Mark | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage begins where the one before it has ended: a mark takes the device some time."""
        self.current = name
        begin = self._mark() if self._last is None else self._last
        with torch.cuda.nvtx.range(name) if self._nvtx else nullcontext():
            yield
        self._last = self._mark()
        self.marks[name] = begin, self._last

    def add(self, name: str, marks: _Marks) -> None:
        """What was done of a stage before the round."""
        self._earlier[name] = marks

    def times(self) -> RoundTimes:
        """Waits for the device."""
        seconds = {name: _seconds(*marks) for name, marks in self.marks.items()}
        for name, marks in self._earlier.items():
            seconds[name] += _seconds(*marks)
        return RoundTimes(**seconds)

    def _mark(self) -> _Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_Mark = float | torch.cuda.Event
_Marks = tuple[_Mark, _Mark]


class _Begun(NamedTuple):
    """What was run of a round before it, and when, by stage."""

    work: Ahead
    marks: dict[str, _Marks]


class _Reading(NamedTuple):
    """A forward over prompt chunks that has been launched, maybe rounds ago, and when it runs."""

    spans: tuple[PrefillSpan, ...]
    inputs: PromptInputs
    hidden: Hidden
    marks: _Marks


class _Forward(NamedTuple):
    """A verify forward: how the spans lie in it, inputs, tokens [N], logits [N, V]."""

    laid: Laid
    inputs: DecodeInputs
    tokens: Tensor
    logits: Tensor


def _seconds(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return begin.elapsed_time(end) / 1000.0
    assert isinstance(begin, float) and isinstance(end, float)
    return end - begin
