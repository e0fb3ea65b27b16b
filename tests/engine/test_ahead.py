"""What is run before a round's results are read is what the next round would have run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.bench.law import Workbench
from paceline.bench.law_cases import Case
from paceline.config import PAGE_SIZE
from paceline.engine.ahead import DraftsAhead, _room
from paceline.engine.decode import (
    Behind,
    DecodeInputs,
    DecodeShape,
    decode_inputs,
    pack_decode,
    unpack_decode,
    verify_forward,
)
from paceline.engine.drafting import DFlashDrafter
from paceline.engine.graphs import Graphs
from paceline.engine.plan import Following, PrefillSpan, Round, VerifySpan
from paceline.engine.runner import Runner
from paceline.state.pages import DUMMY_PAGE
from paceline.transfer import to_device
from paceline.types import Request


class Uncaptured(Graphs):
    """Drafts ahead, and has no graph for anything else."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.times = runner, 0

    def verify(self, spans: Sequence[VerifySpan], behind: Sequence[Behind] | None = None) -> None:
        return None

    def prefill(self, spans: Sequence[PrefillSpan]) -> None:
        return None

    def draft(self, spans: Sequence[VerifySpan]) -> None:
        return None

    def catch_up(self, spans: Sequence[VerifySpan]) -> bool:
        return False

    def draft_behind(self, spans: Sequence[VerifySpan], places: Sequence[int], ends: Tensor) -> Tensor:
        self.times += 1
        drafter, pool = self.runner.drafter, self.runner.pool
        assert isinstance(drafter, DFlashDrafter)
        facts = torch.from_numpy(drafter.pack_context(spans, len(spans) + 1, pool, places))
        context = drafter.unpack_context(facts, [0] * (len(spans) + 1))
        context.advance(ends)
        drafter.make_context(context.batch, context.counts, pool)
        moved = _moved(spans, places, ends)
        packed, kinds, limits = drafter.pack(moved, len(moved), pool.spare_lane)
        inputs = drafter.unpack(torch.from_numpy(packed), [span.start for span in moved], kinds, limits)
        return drafter.forward(inputs, pool.draft_views())


class Plain(Uncaptured):
    """Has graphs of verify forwards too, which are run as they are."""

    def verify(self, spans: Sequence[VerifySpan], behind: Sequence[Behind] | None = None) -> Any:
        self.times += 1
        return Forward(self.runner, decode_inputs(spans, 8, self.runner.pool))

    def verify_behind(self, spans: Sequence[VerifySpan], behind: Sequence[Behind], ends: Tensor) -> Any:
        return self.verify(_moved(spans, [each.place for each in behind], ends))


@dataclass
class Forward:
    runner: Runner
    inputs: DecodeInputs

    def settled(self, spans: Sequence[VerifySpan], block: int, counts: Sequence[int]) -> DecodeInputs:
        lengths, pool = [span.length for span in spans], self.runner.pool
        shape = DecodeShape(sum(lengths), len(spans))
        packed = torch.as_tensor(pack_decode(spans, block, shape, pool.spare_lane, counts))
        batch, *others = unpack_decode(packed, shape, lengths, [span.start for span in spans])
        return DecodeInputs(replace(self.inputs.half, batch=batch), *others)

    def run(self, drafts: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = self.inputs.tokens(drafts)
        return tokens, verify_forward(self.runner.target, self.runner.drafter, tokens, self.inputs.half)


class Watched(Runner):
    """Counts what it drafts, and what it verifies, within rounds."""

    proposed = forwards = 0

    def _forward(self, spans: tuple[VerifySpan, ...], drafts: Tensor | None) -> Any:
        self.forwards += 1
        return super()._forward(spans, drafts)

    def _propose(self, drafting: Sequence[VerifySpan]) -> Tensor:
        self.proposed += 1
        return super()._propose(drafting)


def demo(bench: Workbench, lanes: int) -> Runner:
    return bench.parts(Case(f"{lanes} lanes", lanes=lanes, threads=1), {}).runner


def watched(plain: Runner, graphs: Graphs, ahead: bool) -> Watched:
    return Watched(plain.target, plain.drafter, plain.pool, graphs=graphs, run_ahead=ahead)


def begin(runner: Runner, requests: Sequence[Request], drafts: int, follow: Sequence[int] = ()) -> list[VerifySpan]:
    """Read the prompts; the spans of the first decode round. ``follow``: the drafts expected there."""
    lanes = [runner.pool.admit(100) for _ in requests]
    assert None not in lanes
    prompts = tuple(PrefillSpan(r, lane or 0, 0, r.prompt, True) for r, lane in zip(requests, lanes, strict=True))
    following = tuple(Following(place, count) for place, count in enumerate(follow)) or None
    first = runner.run(Round((), prompts, following=following)).prefill
    return [VerifySpan(p.request, p.lane, 3, token or 0, drafts) for p, token in zip(prompts, first, strict=True)]


def expecting(spans: Sequence[VerifySpan], drafts: int) -> Round:
    """A round of these, behind which they are expected again, with so many drafts."""
    return Round(tuple(spans), (), following=tuple(Following(place, drafts) for place in range(len(spans))))


def after(spans: Sequence[VerifySpan], yielded: Sequence[tuple[int, ...]]) -> list[VerifySpan]:
    facts = zip(spans, yielded, strict=True)
    return [replace(span, start=span.start + len(tokens), anchor=tokens[-1]) for span, tokens in facts]


def _moved(spans: Sequence[VerifySpan], places: Sequence[int], ends: Tensor) -> list[VerifySpan]:
    facts = zip(spans, ends[list(places)].tolist(), strict=True)
    return [replace(span, start=span.start + kept, anchor=anchor) for span, (kept, anchor) in facts]


def _request(name: str, temperature: float = 0.0) -> Request:
    return Request(name, (5, 6, 7), temperature, 1.0, 0, 0.0, 11, 100)


def test_inputs_advance_to_those_of_the_next_round(bench: Workbench) -> None:
    plain = demo(bench, 4)
    drafter, spare = plain.drafter, plain.pool.spare_lane
    assert isinstance(drafter, DFlashDrafter)
    spans = [VerifySpan(_request("a", 0.7), 0, 100, 17, 7), VerifySpan(_request("b"), 2, 5, 18, 3)]
    ends, places = torch.tensor([[1, 41], [5, 5], [8, 40]]), (2, 0)
    behind = _moved(spans, places, ends)
    for lanes in (2, 4):  # two lanes are padding, which stays as it is
        before, kinds, limits = drafter.pack(spans, lanes, spare, places)
        packed = to_device(before.copy(), plain.pool.device)
        drafter.unpack(packed, [0] * lanes, kinds, limits).advance(ends)
        now, then, expected = (
            drafter.unpack(torch.as_tensor(numbers), [0] * lanes, kinds, limits)
            for numbers in (packed, before, drafter.pack(behind, lanes, spare)[0])
        )
        for part in (
            lambda inputs: inputs.batch.positions.view(len(inputs.anchors), -1),
            lambda inputs: inputs.rows.position.view(len(inputs.anchors), -1),
            lambda inputs: inputs.batch.span_bases,
            lambda inputs: inputs.anchors,
        ):
            assert torch.equal(part(now)[:2], part(expected)[:2]) and torch.equal(part(now)[2:], part(then)[2:])
        assert int((packed != torch.as_tensor(before)).sum()) == 2 * (8 + 7 + 1 + 1)


def test_drafts_are_found_by_request_position_and_anchor() -> None:
    first, second = VerifySpan(_request("a"), 0, 10, 1, 7), VerifySpan(_request("b"), 1, 20, 2, 7)
    ahead = DraftsAhead(torch.tensor([[1, 2], [3, 4], [0, 0]]), ((0, first), (2, second)))
    ahead.settle([(2, 6), (1, 9), (3, 9)])
    a, b = replace(first, start=12, anchor=6), replace(second, start=23, anchor=9)
    assert ahead.of([a, b]) is not None and torch.equal(ahead.of([a, b]), torch.tensor([[1, 2], [3, 4]]))  # type: ignore[arg-type]
    assert torch.equal(ahead.of([b]), torch.tensor([[3, 4]]))  # type: ignore[arg-type]
    assert torch.equal(ahead.of([b, a]), torch.tensor([[3, 4], [1, 2]]))  # type: ignore[arg-type]
    for other in (replace(a, start=11), replace(a, anchor=5), replace(a, request=_request("c"))):
        assert ahead.of([b, other]) is None


@pytest.mark.parametrize("leaves", [None, 0, 1])
def test_rounds_keep_the_same(bench: Workbench, leaves: int | None) -> None:
    """Three rounds of two lanes, one of which leaves before the last, with drafts made ahead and without."""
    kept, times, proposed = [], [], []
    for ahead in (True, False):
        plain = demo(bench, 2)
        graphs, pool = Uncaptured(plain), plain.pool
        runner = watched(plain, graphs, ahead)
        spans = begin(runner, [_request("a"), _request("b", 0.9)], drafts=7)
        rounds = []
        for number in range(3):
            if number == 2 and leaves is not None:
                pool.release(spans.pop(leaves).lane)
            result = runner.run(expecting(spans, 7))
            pool.check()
            rounds.append(result.verify)
            spans = after(spans, result.verify)
        kept.append(rounds)
        times.append(graphs.times)
        proposed.append(runner.proposed)
    assert kept[0] == kept[1] and max(len(tokens) for tokens in kept[0][0]) > 1
    assert (times, proposed) == ([3, 0], [1, 3])


@pytest.mark.parametrize("room", range(12, 29))
def test_the_pages_of_a_lane_that_is_gone_are_known(bench: Workbench, room: int) -> None:
    """All that a begun forward writes, also behind the end of a request: somebody may be reading a prompt there by now."""
    plain = demo(bench, 2)
    pool = plain.pool
    runner = watched(plain, Plain(plain), ahead=True)
    requests = [replace(_request("a"), max_tokens=room), _request("b", 0.9)]
    spans = begin(runner, requests, drafts=7)
    while _room(spans[0]):
        spans = [replace(span, drafts=min(7, _room(span) - 1)) for span in spans]
        following = tuple(Following(place, min(7, _room(s) - 2)) for place, s in enumerate(spans) if _room(s) > 1)
        before = [cache.data.clone() for cache in pool.k]
        result = runner.run(Round(tuple(spans), (), following=following))
        changed = [(old != cache.data).flatten(1).any(1) for old, cache in zip(before, pool.k, strict=True)]
        written = set(torch.stack(changed).any(0).nonzero().flatten().tolist()) - {DUMMY_PAGE}
        assert runner._begun is not None
        known = {page for each in runner._begun.work.forward.pages for page in each} if runner._begun.work.forward else set()
        for span, tokens in zip(spans, result.verify, strict=True):
            known |= {pool.page(span.lane, span.start + row) for row in range(max(span.length, len(tokens)))}
        assert written <= known
        spans = after(spans, result.verify)


@pytest.mark.parametrize("leaves", [None, 0, 1, 2])
def test_verify_forwards_are_begun_with_drafts(bench: Workbench, leaves: int | None) -> None:
    """Rounds of three lanes: one does not draft, drafts come and go, one lane may leave, and one comes to its end in the
    middle of a block."""
    numbers = [(7, 0, 5), (3, 0, 7), (0, 0, 7), (7, 2, 1), (7, 0, 7), (7, 0, 7)]
    yielded, times = [], []
    for ahead in (True, False):
        plain = demo(bench, 3)
        graphs, pool = Plain(plain), plain.pool
        runner = watched(plain, graphs, ahead)
        requests = [_request("a"), replace(_request("b", 0.9), max_tokens=5), replace(_request("c"), max_tokens=14)]
        spans = begin(runner, requests, drafts=7, follow=numbers[0])
        rounds = []
        for number, (now, following) in enumerate(zip(numbers, [*numbers[1:], None], strict=True)):
            gone = {"abc"[leaves]} if number == 3 and leaves is not None else set()
            gone |= {span.request.id for span in spans if not _room(span)}
            for span in spans:
                if span.request.id in gone:
                    pool.release(span.lane)
            spans = [span for span in spans if span.request.id not in gone]
            at = ["abc".index(span.request.id) for span in spans]
            spans = [replace(s, drafts=min(now[i], _room(s) - 1)) for i, s in zip(at, spans, strict=True)]
            staying = [(place, i) for place, (i, span) in enumerate(zip(at, spans, strict=True)) if _room(span) > 1]
            behind = tuple(Following(place, following[i]) for place, i in staying) if following else None
            result = runner.run(Round(tuple(spans), (), following=behind))
            pool.check()
            rounds.append((at, result.verify))
            spans = after(spans, result.verify)
        yielded.append(rounds)
        times.append(runner.forwards)
    assert yielded[0] == yielded[1]
    assert {len(at) for at, _ in yielded[0]} >= {2, 3}, "somebody has left"
    assert times == [0, 6], "all were begun before, the first one behind the prompts"


@pytest.mark.parametrize("leaves", [None, 0, 1])
def test_plain_rounds_yield_the_same(bench: Workbench, leaves: int | None) -> None:
    """Over more than a page, two lanes of which one may leave, with their forwards run ahead and without."""
    yielded, times = [], []
    for ahead in (True, False):
        plain = demo(bench, 2)
        graphs, pool = Plain(plain), plain.pool
        runner = watched(plain, graphs, ahead)
        spans = begin(runner, [_request("a"), _request("b", 0.9)], drafts=0)
        rounds = []
        for number in range(24):
            if number == 18 and leaves is not None:
                pool.release(spans.pop(leaves).lane)
            result = runner.run(expecting(spans, spans[0].drafts))
            pool.check()
            rounds.append(result.verify)
            spans = after(spans, result.verify)
        yielded.append(rounds)
        times.append(graphs.times)
    assert yielded[0] == yielded[1]
    assert times == [25, 24], "one more is run behind the last round"


def test_a_page_that_is_another_is_seen(bench: Workbench) -> None:
    plain = demo(bench, 1)
    pool, graphs = plain.pool, Plain(plain)
    runner = watched(plain, graphs, ahead=True)
    spans = begin(runner, [_request("a")], drafts=0)
    while spans[0].start % PAGE_SIZE != PAGE_SIZE - 1:
        spans = after(spans, runner.run(expecting(spans, spans[0].drafts)).verify)
    spans = after(spans, runner.run(expecting(spans, spans[0].drafts)).verify)
    before, lane = graphs.times, pool._lanes[spans[0].lane]
    pool.allocator.give_back([lane.pages.pop()])  # to which the row of the next round was written
    lane.pages += pool.allocator.take(1)
    pool._table[spans[0].lane, : len(lane.pages)] = lane.pages
    pool._table_changed()
    (tokens,) = runner.run(Round(tuple(spans), ())).verify
    assert graphs.times == before + 1, "the forward was run again"
    pool.check()
    other = demo(bench, 1)
    again = watched(other, Plain(other), ahead=False)
    spans = begin(again, [_request("a")], drafts=0)
    while spans[0].start <= PAGE_SIZE:
        result = again.run(Round(tuple(spans), ()))
        spans = after(spans, result.verify)
    assert result.verify == (tokens,)


def test_a_failure_ahead_is_left_to_the_next_round(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = demo(bench, 1)
    runner = watched(plain, Uncaptured(plain), ahead=True)

    def fail(*_: object) -> Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(Uncaptured, "draft_behind", fail)
    spans = begin(runner, [_request("a")], drafts=7)
    spans = after(spans, runner.run(expecting(spans, spans[0].drafts)).verify)
    runner.run(expecting(spans, spans[0].drafts))
    assert runner.proposed == 2
    plain.pool.check()
