"""Executes a round: draft, verify, sample, accept, prefill, commit. The only place where the models run.

Nothing waits for the device before the round's results are read, in one copy.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from paceline.accept import Verdict, accept
from paceline.engine.decode import DecodeInputs, decode_inputs, verify_forward
from paceline.engine.drafting import Drafter
from paceline.engine.graphs import Graphs
from paceline.engine.plan import PrefillSpan, Round, RoundFailed, RoundResult, RoundTimes, VerifySpan
from paceline.engine.prompts import prefill_forward, prompt_inputs
from paceline.engine.rows import sampling_rows
from paceline.engine.synthetic import SyntheticAcceptance
from paceline.models.qwen35 import Qwen35
from paceline.penalties import Row, adjusted
from paceline.sampling import pick
from paceline.state.pool import SpanRows, StatePool, Txn
from paceline.transfer import to_device


class Runner:
    def __init__(
        self,
        target: Qwen35,
        drafter: Drafter | None,
        pool: StatePool,
        *,
        graphs: Graphs | None = None,
        synthetic: SyntheticAcceptance | None = None,
        nvtx: bool = False,
    ) -> None:
        """``graphs`` are captured decode forwards, run where one fits; ``synthetic`` replaces acceptance, in benchmarks
        only; ``nvtx`` marks the stages of a round for a profiler."""
        self.target, self.drafter, self.pool = target, drafter, pool
        self.graphs, self.synthetic, self.nvtx = graphs, synthetic, nvtx

    @property
    def ahead(self) -> bool:
        """Whether the host has time while the device computes a round."""
        return self.pool.device.type == "cuda"

    @torch.inference_mode()
    def run(self, round: Round, meanwhile: Callable[[], None] | None = None) -> RoundResult:
        """One transaction. After ``RoundFailed``, which tells the stage, the state is as before. Any other exception ends
        the engine: the device is lost, or it failed when the state had changed already. ``meanwhile`` is called when all
        has been launched and only the results are waited for."""
        clock, txn = _Clock(self.pool.device, self.nvtx), None
        try:
            spans = [*map(_verify_rows, round.verify), *map(_prompt_rows, round.prefill)]
            txn = self.pool.begin(spans, packed=False)
            with clock.stage("draft"):
                drafts = self._draft(round.verify)
            with clock.stage("verify"):
                verdict = self._verify(round.verify, drafts, txn)
            with clock.stage("prefill"):
                first = self._prefill(round.prefill, txn)
            with clock.stage("commit"):
                results = _joined(round, verdict, first)
                self.pool.apply(txn, verdict.keep)
        except Exception as cause:
            if txn is not None:
                self.pool.abort(txn)
            if isinstance(cause, torch.AcceleratorError):
                raise  # the device is lost, and with it the state of every lane: the engine ends
            traceback.clear_frames(cause.__traceback__)  # they hold the round's tensors, and another try needs the memory
            raise RoundFailed(clock.current, cause) from cause
        if meanwhile is not None:
            meanwhile()
        tokens, firsts = _read(round, results, width=verdict.tokens.shape[1])
        self.pool.settle(txn, [*map(len, tokens), *(span.length for span in round.prefill)])
        return RoundResult(tokens, firsts, clock.times())

    def _draft(self, spans: tuple[VerifySpan, ...]) -> Tensor | None:
        """Drafts [D, B - 1] of the lanes that speculate in this round."""
        drafting = [span for span in spans if span.drafts]
        if not drafting:
            return None
        assert self.drafter is not None, "drafts planned without a drafter"
        captured = self.graphs.draft(drafting) if self.graphs else None
        return captured if captured is not None else self.drafter.propose(drafting, self.pool)

    def _verify(self, spans: tuple[VerifySpan, ...], drafts: Tensor | None, txn: Txn) -> Verdict:
        """One packed forward over [anchor, drafts …] of every decoding lane; what each lane keeps and yields."""
        if not spans:
            none = torch.zeros(0, dtype=torch.long, device=self.pool.device)
            return Verdict(none, none.view(0, 1), none)
        captured = self.graphs.verify(spans) if self.graphs else None
        if captured is not None:
            inputs = captured.inputs
            tokens, logits = captured.run(drafts)
        else:
            inputs = decode_inputs(spans, self.drafter.block_size if self.drafter else 1, self.pool)
            tokens = inputs.tokens(drafts)
            logits = verify_forward(self.target, self.drafter, tokens, inputs.half)
        txn.decode = inputs.half
        draws = [(span.request, span.start + row + 1) for span in spans for row in range(span.length)]
        logits = adjusted(logits[: len(draws)], _adjusted_rows(spans), tokens)
        picks = pick(logits, sampling_rows(draws, logits.device))
        return self._accept(spans, inputs, tokens, picks)

    def _accept(self, spans: Sequence[VerifySpan], inputs: DecodeInputs, tokens: Tensor, picks: Tensor) -> Verdict:
        batch = inputs.half.batch
        rows = torch.arange(max(span.length for span in spans), device=picks.device)
        at = (batch.starts.unsqueeze(1) + rows).clamp(max=picks.shape[0] - 1)
        drafts = tokens[at[:, 1:]]
        if self.synthetic is not None:
            return self.synthetic.accept(spans, drafts, picks[at])
        verdict = accept(drafts, batch.span_lengths - 1, picks[at])
        return verdict._replace(keep=verdict.keep.minimum(batch.span_lengths))  # the padding keeps nothing

    def _prefill(self, spans: tuple[PrefillSpan, ...], txn: Txn) -> Tensor | None:
        """One packed forward over the prompt chunks; the first tokens [F] of the prompts that end here."""
        if not spans:
            return None
        captured = self.graphs.prefill(spans) if self.graphs else None
        if captured is not None:
            inputs, hidden = captured.inputs, captured.run()
        else:
            inputs = prompt_inputs(spans, self.pool)
            hidden = prefill_forward(self.target, self.drafter, inputs)
        txn.prefill = inputs.half
        final = [index for index, span in enumerate(spans) if span.final]
        if not final:
            return None
        ends = np.cumsum([span.length for span in spans]) - 1
        rows = to_device(ends[final], self.pool.device)
        draws = [(spans[index].request, len(spans[index].request.prompt)) for index in final]
        fresh = [Row(at, request, ()) for at, (request, _) in enumerate(draws) if request.adjust]
        return pick(adjusted(self.target.logits(hidden.rows(rows)), fresh), sampling_rows(draws, rows.device))


def _joined(round: Round, verdict: Verdict, first: Tensor | None) -> Tensor:
    """The round's results in one tensor: what the verify spans keep, their tokens, the first tokens of prompts."""
    spans = len(round.verify)
    parts = [verdict.keep[:spans], verdict.tokens[:spans].flatten(), *(() if first is None else (first,))]
    return torch.cat(parts)


def _read(round: Round, results: Tensor, width: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int | None, ...]]:
    """The round's only copy from the device: tokens per verify span, of ``width`` at most, and the first token per prefill
    span (None: not its last)."""
    spans, read = len(round.verify), results.tolist()
    keep, grid, firsts = read[:spans], read[spans : spans * (1 + width)], iter(read[spans * (1 + width) :])
    tokens = tuple(tuple(grid[i * width : i * width + kept]) for i, kept in enumerate(keep))
    return tokens, tuple(next(firsts) if span.final else None for span in round.prefill)


def _adjusted_rows(spans: Sequence[VerifySpan]) -> list[Row]:
    """Row i of a span has its first i drafts before it, which are the inputs of the rows behind the first."""
    rows, first = [], 0
    for span in spans:
        if span.request.adjust is not None:
            behind = range(first, first + span.length)
            rows += [Row(index, span.request, span.generated, (first + 1, index + 1)) for index in behind]
        first += span.length
    return rows


def _verify_rows(span: VerifySpan) -> SpanRows:
    return SpanRows(span.lane, span.start, span.length, "decode", drafting=span.drafts > 0)


def _prompt_rows(span: PrefillSpan) -> SpanRows:
    return SpanRows(span.lane, span.start, span.length, "prefill")


class _Clock:
    """Seconds per stage of a round, and the stage it is in. A GPU runs behind the host and takes its own times."""

    def __init__(self, device: torch.device, nvtx: bool) -> None:
        self.current = "begin"
        self._on_gpu = device.type == "cuda"
        self._nvtx = nvtx and self._on_gpu
        self._marks: dict[str, tuple[_Mark, _Mark]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.current = name
        begin = self._mark()
        with torch.cuda.nvtx.range(name) if self._nvtx else nullcontext():
            yield
        self._marks[name] = begin, self._mark()

    def times(self) -> RoundTimes:
        """Waits for the device."""
        return RoundTimes(**{name: _seconds(begin, end) for name, (begin, end) in self._marks.items()})

    def _mark(self) -> _Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_Mark = float | torch.cuda.Event


def _seconds(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return begin.elapsed_time(end) / 1000.0
    assert isinstance(begin, float) and isinstance(end, float)
    return end - begin
