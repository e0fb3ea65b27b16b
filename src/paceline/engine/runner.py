"""Executes a round: draft, verify, sample, accept, prefill, commit. The only place where the models run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.accept import accept
from paceline.engine.drafting import Drafter
from paceline.engine.plan import PrefillSpan, Round, RoundFailed, RoundResult, RoundTimes, VerifySpan
from paceline.engine.rows import sampling_rows
from paceline.models.qwen35 import Qwen35
from paceline.sampling import pick
from paceline.state.pool import Half, SpanRows, StatePool, Txn


class Runner:
    def __init__(self, target: Qwen35, drafter: Drafter | None, pool: StatePool) -> None:
        self.target, self.drafter, self.pool = target, drafter, pool

    @torch.inference_mode()
    def run(self, round: Round) -> RoundResult:
        """One transaction. On any exception but a lost device the state is as before and ``RoundFailed`` tells the stage."""
        clock, txn = _Clock(), None
        try:
            txn = self.pool.begin([*map(_verify_rows, round.verify), *map(_prompt_rows, round.prefill)])
            with clock.stage("draft"):
                drafts = self._draft(round.verify, txn)
            with clock.stage("verify"):
                verdicts = self._verify(round.verify, drafts, txn)
            with clock.stage("prefill"):
                first = self._prefill(round.prefill, txn)
            with clock.stage("commit"):
                keep = [len(tokens) for tokens in verdicts] + [span.length for span in round.prefill]
                self.pool.commit(txn, keep)
        except Exception as cause:
            if txn is not None:
                self.pool.abort(txn)
            if isinstance(cause, torch.AcceleratorError):
                raise  # the device is lost, and with it the state of every lane: the engine ends
            raise RoundFailed(clock.current, cause) from cause
        return RoundResult(tuple(verdicts), tuple(first), RoundTimes(**clock.seconds))

    def _draft(self, spans: tuple[VerifySpan, ...], txn: Txn) -> Tensor | None:
        """Drafts [L, B - 1] of the lanes that speculate in this round."""
        drafting = [span for span in spans if span.drafts]
        if not drafting:
            return None
        assert self.drafter is not None, "drafts planned without a drafter"
        return self.drafter.propose(drafting, self.pool, txn)

    def _verify(self, spans: tuple[VerifySpan, ...], drafts: Tensor | None, txn: Txn) -> list[tuple[int, ...]]:
        """One packed forward over [anchor, drafts …] of every decoding lane; the tokens each lane yields."""
        half = txn.decode
        if half is None:
            return []
        proposals = self._proposals(spans, drafts)
        tokens = torch.cat([row[: span.length] for span, row in zip(spans, proposals, strict=True)])
        hidden = self._forward(tokens, half)
        draws = [(span.request, span.start + row + 1) for span in spans for row in range(span.length)]
        picks = pick(self.target.logits(hidden), sampling_rows(draws, hidden.device))
        width = max(span.length for span in spans)
        grid = picks.new_full((len(spans), width), -1)
        offsets = torch.arange(width, device=picks.device)
        lengths = torch.tensor([span.length for span in spans], device=picks.device)
        grid[offsets < lengths.unsqueeze(1)] = picks
        verdict = accept(proposals[:, 1:width], lengths - 1, grid)
        return [tuple(row[:keep]) for row, keep in zip(verdict.tokens.tolist(), verdict.keep.tolist(), strict=True)]

    def _proposals(self, spans: tuple[VerifySpan, ...], drafts: Tensor | None) -> Tensor:
        """[L, B] anchor and drafts per lane; lanes that do not speculate have padding behind the anchor."""
        device = self.pool.device
        rows = torch.full((len(spans), 1 + (drafts.shape[1] if drafts is not None else 0)), -1, device=device)
        rows[:, 0] = torch.tensor([span.anchor for span in spans], device=device)
        if drafts is not None:
            rows[torch.tensor([span.drafts > 0 for span in spans], device=device), 1:] = drafts
        return rows

    def _prefill(self, spans: tuple[PrefillSpan, ...], txn: Txn) -> list[int | None]:
        """One packed forward over the prompt chunks; the first token of each prompt that ends here."""
        half = txn.prefill
        if half is None:
            return []
        tokens = torch.tensor([token for span in spans for token in span.tokens], device=self.pool.device)
        hidden = self._forward(tokens, half)
        final = [index for index, span in enumerate(spans) if span.final]
        first: list[int | None] = [None] * len(spans)
        if final:
            rows = half.batch.last_rows()[torch.tensor(final, device=hidden.device)]
            draws = [(spans[index].request, len(spans[index].request.prompt)) for index in final]
            picks = pick(self.target.logits(hidden[rows]), sampling_rows(draws, hidden.device))
            for index, token in zip(final, picks.tolist(), strict=True):
                first[index] = token
        return first

    def _forward(self, tokens: Tensor, half: Half) -> Tensor:
        taps = self.drafter.taps if self.drafter else ()
        hidden, features = self.target(tokens, half.batch, half.target, taps)
        if self.drafter is not None and features is not None:
            self.drafter.project(features, half.batch, half.context)
        return hidden


def _verify_rows(span: VerifySpan) -> SpanRows:
    return SpanRows(span.lane, span.start, span.length, "decode", drafting=span.drafts > 0)


def _prompt_rows(span: PrefillSpan) -> SpanRows:
    return SpanRows(span.lane, span.start, span.length, "prefill")


class _Clock:
    """Seconds per stage of a round, and the stage it is in."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.current = "begin"

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.current = name
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
