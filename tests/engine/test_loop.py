"""The loop on the demo pair, turn by turn in this thread: faults, cancellations, arrivals."""

from __future__ import annotations

import functools
import queue
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from paceline.batch import PackedBatch
from paceline.bench.law import Workbench, workload
from paceline.bench.law_cases import BLOCK_SIZE, Case
from paceline.engine import admission
from paceline.engine.build import EngineParts
from paceline.engine.decode import verify_forward
from paceline.engine.engine import Engine
from paceline.engine.loop import Cancel, EngineLoop, Message, Stop, Submit
from paceline.engine.memory import IDLE_SECONDS
from paceline.engine.plan import Round, RoundFailed, RoundResult
from paceline.engine.rows import picked
from paceline.engine.runner import Runner
from paceline.engine.sequence import Sequence
from paceline.errors import EngineDead
from paceline.models.qwen35 import Qwen35
from paceline.state.pages import PageAllocator
from paceline.state.pool import Half, SpanRows, StatePool, Txn
from paceline.state.shapes import pages_for
from paceline.types import Emission, EngineStats, Request, SamplingParams
from paceline.views import ContextView, GdnView

CASE = Case("loop", lanes=3, prefill_tokens=64, threads=1, prompts_beside=False)
VICTIM = "1"


@functools.cache
def by_length() -> list[tuple[int, ...]]:
    """The workload's prompts, the shortest one first."""
    return sorted(workload().values(), key=len)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Short ones, and behind them one of several chunks."""
    ordered = by_length()
    return [*ordered[:3], next(prompt for prompt in ordered if len(prompt) > 250)]


@pytest.fixture
def parts(bench: Workbench) -> EngineParts:
    return bench.parts(CASE, {})


def request(parts: EngineParts, name: str, prompt: tuple[int, ...], max_tokens: int = 12) -> Request:
    params = SamplingParams(temperature=0.7 * (int(name) % 2), seed=int(name), max_tokens=max_tokens, ignore_eos=True)
    made = Request.create(prompt, params, parts.info)
    return Request(**{name: getattr(made, name) for name in made.__slots__} | {"id": name})


@dataclass
class Run:
    """An inbox that stops the loop once it is idle, and what the loop did."""

    messages: list[Message | None]
    rounds: list[Round] = field(default_factory=list)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ends: dict[str, Emission] = field(default_factory=dict)
    waits: list[float | None] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)

    def get(self, timeout: float | None) -> Message | None:
        self.waits.append(timeout)
        if self.messages:
            return self.messages.pop(0)
        return Stop() if timeout is None else None

    def hear(self, emissions: list[Emission], stats: EngineStats) -> None:
        self.stats = stats
        for emission in emissions:
            assert emission.request_id not in self.ends, "spoke after its end"
            self.tokens[emission.request_id] = self.tokens.get(emission.request_id, ()) + emission.tokens
            if emission.finish_reason is not None:
                self.ends[emission.request_id] = emission

    def reasons(self) -> dict[str, str | None]:
        return {name: emission.finish_reason for name, emission in self.ends.items()}


def serve(
    parts: EngineParts, messages: list[Message], observe: Callable[[Run], None] = lambda run: None, window: float = 0.02
) -> Run:
    """Run the loop until everything has ended; the pool's invariants hold after every round."""
    run = Run([*messages])

    def watch(round: Round, result: RoundResult) -> None:
        parts.runner.pool.check()
        run.rounds.append(round)
        observe(run)

    EngineLoop(parts.runner, parts.scheduler, run, run.hear, coalesce_seconds=window, observe=watch).run()
    parts.runner.pool.check()
    allocator = parts.runner.pool.allocator
    assert allocator.free == allocator.total, "pages are still owned"
    return run


@pytest.fixture(scope="module")
def undisturbed(bench: Workbench, prompts: list[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    parts = bench.parts(CASE, {})
    run = serve(parts, three(parts, prompts))
    assert set(run.reasons().values()) == {"length"}
    return run.tokens


def three(parts: EngineParts, prompts: list[tuple[int, ...]]) -> list[Message]:
    """Two short prompts and, as the victim, the long one."""
    order = {"0": prompts[0], VICTIM: prompts[-1], "2": prompts[2]}
    return [Submit(request(parts, name, prompt)) for name, prompt in order.items()]


# -- faults ----------------------------------------------------------------------------------------------------------------


class Fault:
    """Raises where it is called with a true condition: always, or the first time only."""

    def __init__(self, once: bool) -> None:
        self.once, self.raised = once, 0

    def __call__(self, condition: bool) -> None:
        if condition and not (self.once and self.raised):
            self.raised += 1
            raise MemoryError("out of memory")


def fault_in_drawing(faulty: Callable[[int], bool]) -> Callable[[Fault, EngineParts, pytest.MonkeyPatch], None]:
    """Where a token is drawn for the victim, by how many it has then: after the forward, when K/V rows have been written."""

    def inject(fault: Fault, parts: EngineParts, patch: pytest.MonkeyPatch) -> None:
        def drawn(logits: torch.Tensor, draws: list[tuple[Request, int]]) -> torch.Tensor:
            fault(any(r.id == VICTIM and faulty(position - len(r.prompt)) for r, position in draws))
            return picked(logits, draws)

        patch.setattr("paceline.engine.runner.picked", drawn)

    return inject


def fault_in_forward(fault: Fault, parts: EngineParts, patch: pytest.MonkeyPatch) -> None:
    original = Qwen35.forward

    def forward(self: Qwen35, tokens: torch.Tensor, batch: PackedBatch, *rest: Any) -> Any:
        result = original(self, tokens, batch, *rest)
        fault(batch.kind == "decode" and lane_of(parts) in batch.lanes.tolist())
        return result

    patch.setattr(Qwen35, "forward", forward)


def fault_in_booking(fault: Fault, parts: EngineParts, patch: pytest.MonkeyPatch) -> None:
    """The host's own work for a lane, when the device has done its."""
    original = Sequence.extend

    def extend(self: Sequence, tokens: tuple[int, ...]) -> Any:
        fault(self.request.id == VICTIM and len(self.tokens) > 4)
        return original(self, tokens)

    patch.setattr(Sequence, "extend", extend)


def fault_in_later_chunk(fault: Fault, parts: EngineParts, patch: pytest.MonkeyPatch) -> None:
    original = Runner._prefill

    def prefill(self: Runner, round: Round, *rest: Any) -> Any:
        first = original(self, round, *rest)
        fault(any(span.request.id == VICTIM and span.start > 0 for span in round.prefill))
        return first

    patch.setattr(Runner, "_prefill", prefill)


def fault_in_begin(fault: Fault, parts: EngineParts, patch: pytest.MonkeyPatch) -> None:
    """When pages have been taken."""
    original = StatePool._reserve

    def reserve(self: StatePool, span: SpanRows) -> None:
        original(self, span)
        fault(span.lane == lane_of(parts) and span.start > 0)

    patch.setattr(StatePool, "_reserve", reserve)


def fault_in_context(kind: str) -> Callable[[Fault, EngineParts, pytest.MonkeyPatch], None]:
    """When the drafter's context has been written: of prompts in a commit, of generated rows before somebody drafts."""

    def inject(fault: Fault, parts: EngineParts, patch: pytest.MonkeyPatch) -> None:
        original = StatePool.write_context

        def write(self: StatePool, views: list[ContextView], keep: torch.Tensor, batch: PackedBatch) -> None:
            original(self, views, keep, batch)
            fault(batch.kind == kind and lane_of(parts) in batch.lanes.tolist())

        patch.setattr(StatePool, "write_context", write)

    return inject


def fault_in_commit(fault: Fault, parts: EngineParts, patch: pytest.MonkeyPatch) -> None:
    """Before anything has changed."""
    original = StatePool.apply

    def apply(self: StatePool, txn: Txn, keep: torch.Tensor) -> None:
        fault(lane_of(parts) in [span.lane for span in txn.of_kind("decode")])
        original(self, txn, keep)

    patch.setattr(StatePool, "apply", apply)


def lane_of(parts: EngineParts) -> int:
    return next((s.lane for s in parts.scheduler.running if s.request.id == VICTIM), -1)


FAULTS = {
    "begin": fault_in_begin,
    "forward": fault_in_forward,
    "verify": fault_in_drawing(lambda tokens: tokens > 4),
    "first verify": fault_in_drawing(lambda tokens: tokens > 0),
    "first token": fault_in_drawing(lambda tokens: tokens == 0),
    "later chunk": fault_in_later_chunk,
    "context": fault_in_context("decode"),
    "commit of a verify span": fault_in_commit,
    "commit of a chunk": fault_in_context("prefill"),
}


@pytest.mark.parametrize("once", [True, False], ids=["once", "always"])
@pytest.mark.parametrize("place", FAULTS)
def test_only_the_lane_that_fails_alone_ends(
    place: str,
    once: bool,
    parts: EngineParts,
    prompts: list[tuple[int, ...]],
    undisturbed: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = Fault(once)
    FAULTS[place](fault, parts, monkeypatch)
    run = serve(parts, three(parts, prompts))
    assert fault.raised == 1 if once else fault.raised >= 2, "in the round, and alone"
    if once:
        assert run.tokens == undisturbed
        assert set(run.reasons().values()) == {"length"}
        return
    assert run.reasons() == {"0": "length", VICTIM: "error", "2": "length"}
    assert "out of memory" in (run.ends[VICTIM].error or "")
    assert run.tokens["0"] == undisturbed["0"] and run.tokens["2"] == undisturbed["2"]
    assert run.tokens[VICTIM] == undisturbed[VICTIM][: len(run.tokens[VICTIM])]
    assert run.stats.requests_finished == {"length": 2, "error": 1}
    monkeypatch.undo()
    assert serve(parts, three(parts, prompts)[2:]).tokens["2"] == undisturbed["2"], "the next request is as good as any"


def test_a_fault_in_the_hosts_work_for_a_lane_ends_it_alone(
    parts: EngineParts,
    prompts: list[tuple[int, ...]],
    undisturbed: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no second try: the state has changed."""
    fault = Fault(once=True)
    fault_in_booking(fault, parts, monkeypatch)
    run = serve(parts, three(parts, prompts))
    assert fault.raised == 1
    assert run.reasons() == {"0": "length", VICTIM: "error", "2": "length"}
    assert run.tokens["0"] == undisturbed["0"] and run.tokens["2"] == undisturbed["2"]
    assert serve(parts, three(parts, prompts)[2:]).tokens["2"] == undisturbed["2"]


@pytest.mark.parametrize("start", [1, 258], ids=["while the prompt is read", "while it answers"])
def test_what_is_not_a_number_ends_its_lane_alone(
    start: int, parts: EngineParts, prompts: list[tuple[int, ...]], undisturbed: dict[str, tuple[int, ...]]
) -> None:
    """The state of one lane is spoilt, and with it all that the lane writes from then on."""
    pool = parts.runner.pool

    def spoil(run: Run) -> None:
        lane = lane_of(parts)
        if lane >= 0 and pool.committed(lane) > start:
            pool.gdn[:, lane] = float("nan")

    run = serve(parts, three(parts, prompts), spoil)
    assert run.reasons() == {"0": "length", VICTIM: "error", "2": "length"}
    assert "NaN" in (run.ends[VICTIM].error or "")
    assert run.tokens["0"] == undisturbed["0"] and run.tokens["2"] == undisturbed["2"]
    assert run.tokens[VICTIM] == undisturbed[VICTIM][: len(run.tokens[VICTIM])]
    assert serve(parts, three(parts, prompts)).tokens == undisturbed, "lanes and pages are clean again"


def test_a_failed_round_leaves_no_tensors(
    parts: EngineParts, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is run again while the exception lives, whose traceback has the frames of everything that was called."""
    left: list[weakref.ref[torch.Tensor]] = []
    apply = StatePool.apply

    def fail(self: StatePool, txn: Txn, keep: torch.Tensor) -> None:
        assert txn.prefill is not None
        states = [view.new_state for view in txn.prefill.target.layers if isinstance(view, GdnView)]
        left.extend(weakref.ref(state) for state in states if state is not None)
        apply(self, txn, keep)
        raise MemoryError("out of memory")

    monkeypatch.setattr(StatePool, "apply", fail)
    parts.scheduler.add(request(parts, "0", prompts[0]))
    round = parts.scheduler.plan()
    with pytest.raises(RoundFailed) as failure:
        parts.runner.run(round)
    assert left and not any(ref() is not None for ref in left), failure
    parts.scheduler.cancel("0")


@pytest.mark.parametrize("ahead", [False, True])
def test_a_client_that_raises_loses_its_own_request_and_no_round_runs_twice(
    ahead: bool,
    parts: EngineParts,
    prompts: list[tuple[int, ...]],
    undisturbed: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Emissions go out when the state has changed already: another try would change it once more."""
    monkeypatch.setattr(Runner, "ahead", ahead)
    rounds: list[Round] = []
    run = Runner.run

    def counted(self: Runner, round: Round, meanwhile: Callable[[], None] | None = None) -> RoundResult:
        rounds.append(round)
        return run(self, round, meanwhile)

    monkeypatch.setattr(Runner, "run", counted)
    engine = Engine(CASE.options(), parts)
    heard: queue.SimpleQueue[Emission] = queue.SimpleQueue()

    def sink(emission: Emission) -> None:
        if emission.tokens:
            raise ValueError("nobody listens")

    engine.submit(request(parts, "0", prompts[0], 400), sink)
    engine.submit(request(parts, "2", prompts[2]), heard.put)
    tokens: tuple[int, ...] = ()
    while len(tokens) < len(undisturbed["2"]):
        tokens += heard.get(timeout=10).tokens
    assert tokens == undisturbed["2"]
    engine.close()
    assert len(set(rounds)) == len(rounds)
    assert engine.stats().requests_finished == {"cancelled": 1, "length": 1}


def test_a_fault_in_drafting_costs_only_speed(
    parts: EngineParts,
    prompts: list[tuple[int, ...]],
    undisturbed: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter, calls = parts.runner.drafter, []
    assert drafter is not None
    original = type(drafter).propose

    def propose(self: Any, spans: Any, pool: Any) -> Any:
        calls.append(len(spans))
        drafts = original(self, spans, pool)
        if len(calls) % 2 == 0:
            raise RuntimeError("drafting failed")
        return drafts

    monkeypatch.setattr(type(drafter), "propose", propose)
    run = serve(parts, three(parts, prompts))
    assert run.tokens == undisturbed
    assert set(run.reasons().values()) == {"length"}
    plain = [r for r in run.rounds if r.verify and not any(span.drafts for span in r.verify)]
    assert len(plain) >= len(calls) // 2 > 1


def test_drafting_and_then_verifying_fail(
    parts: EngineParts,
    prompts: list[tuple[int, ...]],
    undisturbed: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def propose(self: Any, spans: Any, pool: Any) -> Any:
        raise RuntimeError("drafting failed")

    monkeypatch.setattr(type(parts.runner.drafter), "propose", propose)
    FAULTS["verify"](Fault(once=False), parts, monkeypatch)
    run = serve(parts, three(parts, prompts))
    assert run.reasons() == {"0": "length", VICTIM: "error", "2": "length"}
    assert run.tokens["0"] == undisturbed["0"] and run.tokens["2"] == undisturbed["2"]


def test_what_is_not_a_number_does_no_harm_in_rows_that_nobody_keeps(
    parts: EngineParts,
    prompts: list[tuple[int, ...]],
    undisturbed: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a draft that does not hold, rows of every span are spoilt."""
    ends = serve(parts, three(parts, prompts)).ends
    longest = {name: max(end.stats.keeps) for name, end in ends.items() if end.stats is not None}
    assert min(longest.values()) < BLOCK_SIZE, "no row is never kept: take other prompts"
    spoilt = []

    def forward(target: Any, drafter: Any, tokens: torch.Tensor, half: Half) -> torch.Tensor:
        logits = verify_forward(target, drafter, tokens, half)
        owners = {sequence.lane: sequence.request.id for sequence in parts.scheduler.running}
        spans = zip(half.batch.starts.tolist(), half.batch.lengths, half.batch.lanes.tolist(), strict=True)
        for first, length, lane in spans:
            kept = longest[owners[lane]]
            logits[first + kept : first + length] = float("nan")
            spoilt.append(length > kept)
        return logits

    monkeypatch.setattr("paceline.engine.runner.verify_forward", forward)
    run = serve(parts, three(parts, prompts))
    assert run.tokens == undisturbed and any(spoilt)


# -- parking ---------------------------------------------------------------------------------------------------------------


def test_lanes_are_parked_when_pages_run_out(
    bench: Workbench, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pages for little more than one answer, everybody gets the same as with pages for all."""
    monkeypatch.setattr(admission, "SOON", 8)

    def run(pages: int | None) -> Run:
        parts = bench.parts(CASE, {})
        if pages is not None:
            parts.runner.pool.allocator = PageAllocator(pages)
        return serve(parts, [Submit(request(parts, name, prompts[int(name)], 32)) for name in ("0", "1", "2")])

    alone = len(prompts[2]) + 32 + 8
    ample, tight = run(None), run(pages_for(alone) + 2)
    assert ample.stats.parkings["pages"] == 0 < tight.stats.parkings["pages"]
    assert tight.stats.restored_tokens > 0
    assert tight.tokens == ample.tokens
    assert set(tight.reasons().values()) == {"length"}
    for name, end in tight.ends.items():
        other = ample.ends[name].stats
        assert end.stats is not None and other is not None and end.stats.keeps == other.keeps


@pytest.mark.parametrize("speculation", [True, False])
def test_a_lane_is_given_to_a_higher_priority_and_goes_on(
    speculation: bool, bench: Workbench, prompts: list[tuple[int, ...]]
) -> None:
    case = Case("one lane", lanes=1, threads=1, speculation=speculation)
    parts = bench.parts(case, {})
    batch = replace(request(parts, "1", prompts[2], 24), priority=5)
    urgent = request(parts, "2", prompts[1], 8)

    late: list[Message] = [Submit(urgent)]

    def observe(run: Run) -> None:
        if late and len(run.tokens.get("1", ())) > 12:
            run.messages.append(late.pop())

    alone = serve(bench.parts(case, {}), [Submit(batch), Submit(urgent)])
    run = serve(parts, [Submit(batch)], observe)
    assert run.stats.parkings == {"pages": 0, "priority": 1} and run.stats.restored_tokens >= 12
    assert run.tokens == alone.tokens
    assert list(run.ends) == ["2", "1"]


# -- arrivals and cancellations --------------------------------------------------------------------------------------------


def test_a_request_that_cannot_fit_is_told_why(parts: EngineParts) -> None:
    too_long = Request("9", (1,) * parts.info.max_ctx, 0.0, 1.0, 0, 0.0, 0, 1)
    run = serve(parts, [Submit(too_long)])
    assert run.ends["9"].finish_reason == "error"
    assert str(parts.info.max_ctx) in (run.ends["9"].error or "")
    assert not run.rounds


def test_the_counters_are_there_before_the_first_request(parts: EngineParts) -> None:
    seen: list[tuple[int, int]] = []

    class Asked(Run):
        def get(self, timeout: float | None) -> Message | None:
            seen.append((self.stats.pages_free, self.stats.pages_total))
            return super().get(timeout)

    run, total = Asked([]), parts.runner.pool.allocator.total
    EngineLoop(parts.runner, parts.scheduler, run, run.hear, coalesce_seconds=0.0).run()
    assert set(seen) == {(total, total)}


def test_an_engine_gives_memory_back_once_it_is_idle(
    parts: EngineParts, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, given = Run([Submit(request(parts, "0", prompts[0], 4))]), []
    monkeypatch.setattr("paceline.engine.loop.give_back_freed_memory", lambda: given.append(dict(run.reasons())))
    EngineLoop(parts.runner, parts.scheduler, run, run.hear, coalesce_seconds=0.0).run()
    assert given == [{"0": "length"}] and run.waits[-2:] == [IDLE_SECONDS, None]


def test_requests_that_arrive_together_begin_together(parts: EngineParts, prompts: list[tuple[int, ...]]) -> None:
    messages: list[Message] = [Submit(request(parts, name, prompts[0], 2)) for name in ("0", "1", "2")]
    run = serve(parts, messages, window=0.02)
    assert len(run.rounds[0].prefill) == 3
    assert run.waits[0] == IDLE_SECONDS, "idle"
    window = [wait for wait in run.waits[1:4] if wait is not None]
    assert window == sorted(window, reverse=True), "the window opens with the first request and is not prolonged"
    assert 0 < window[-1] < window[0] <= 0.02
    assert set(run.waits[4:-2]) == {0.0}, "a busy engine only looks"
    assert run.waits[-2:] == [IDLE_SECONDS, None], "idle: in the end for ever"


def test_a_busy_engine_admits_at_the_next_round(parts: EngineParts, prompts: list[tuple[int, ...]]) -> None:
    late = Submit(request(parts, "2", prompts[1]))

    def observe(run: Run) -> None:
        if len(run.rounds) == 3:
            run.messages.append(late)

    run = serve(parts, [Submit(request(parts, "0", prompts[0], 30))], observe)
    first = next(i for i, r in enumerate(run.rounds) if any(span.request.id == "2" for span in r.prefill))
    assert first == 3
    assert run.rounds[3].verify, "the lane that decodes goes on in the same round"


class Patient(Run):
    """Messages come only from when the engine is idle until the next None, which is a wait that nobody ends."""

    come = False

    def get(self, timeout: float | None) -> Message | None:
        self.come = self.come or timeout in (None, IDLE_SECONDS)
        if self.come and self.messages:
            self.waits.append(timeout)
            message = self.messages.pop(0)
            self.come = message is not None
            return message
        if timeout is None:
            return super().get(timeout)
        self.waits.append(timeout)
        return None


@pytest.mark.parametrize(
    ("arrivals", "waits", "together"),
    [
        ("0.1.2", [1, 0, 0], [1, 1, 1]),
        ("01.23.", [2, 1], [2, 2]),
        ("01.2.3", [2, 1, 0], [2, 1, 1]),
        ("0.12.", [1, 0], [1, 2]),
    ],
)
def test_an_idle_engine_waits_for_as_many_as_there_were(
    bench: Workbench, prompts: list[tuple[int, ...]], arrivals: str, waits: list[int], together: list[int]
) -> None:
    """``waits``: how often it waited for company that it had before; ``together``: how many began together."""
    parts = bench.parts(Case("two lanes", lanes=2, threads=1), {})
    submissions = {name: Submit(request(parts, name, prompts[0], 3)) for name in "0123"}
    run = Patient([submissions.get(name) for name in arrivals])
    begun: list[int] = []

    def watch(round: Round, result: RoundResult) -> None:
        begun.extend([len(round.prefill)] * bool(round.prefill))

    EngineLoop(parts.runner, parts.scheduler, run, run.hear, coalesce_seconds=0.5, observe=watch).run()
    assert run.reasons() == dict.fromkeys(arrivals.replace(".", ""), "length")
    starts = [index for index, wait in enumerate(run.waits) if wait == IDLE_SECONDS]
    busy = [run.waits[start + 1 : end] for start, end in zip(starts, starts[1:], strict=False)]
    assert [sum(wait is not None and wait > 0.1 for wait in period) for period in busy] == waits
    for period in (period for period, long in zip(busy, waits, strict=True) if not long):
        assert any(wait is not None and 0.0 < wait <= 0.075 for wait in period), "a little for anybody"
    assert begun == together


@dataclass
class Timed(Run):
    """Messages come at given times (seconds). Rounds take none."""

    times: list[float] = field(default_factory=list)
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def get(self, timeout: float | None) -> Message | None:
        idle = timeout in (None, IDLE_SECONDS)
        if self.messages and (idle or self.times[0] <= self.now + (timeout or 0.0)):
            self.now = max(self.now, self.times.pop(0))
            return self.messages.pop(0)
        self.now += timeout or 0.0
        return Stop() if timeout is None else None


@pytest.mark.parametrize(("gaps", "together"), [((2, 2, 2), [1, 4]), ((2, 4, 2), [1, 2, 2]), ((4, 1, 1), [1, 1, 3])])
def test_who_was_alone_is_joined_by_a_burst(
    bench: Workbench,
    prompts: list[tuple[int, ...]],
    gaps: tuple[int, ...],
    together: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of requests that come so many milliseconds one after another, where 3 are waited for the next."""
    parts = bench.parts(Case("six lanes", lanes=6, threads=1), {})
    run = Timed([Submit(request(parts, name, prompts[0], 2)) for name in "01234"])
    run.times = [0.0, *(1.0 + sum(gaps[:count]) / 1000 for count in range(len(gaps) + 1))]
    begun: list[int] = []
    monkeypatch.setattr("paceline.engine.loop.time", run)

    def watch(round: Round, result: RoundResult) -> None:
        begun.extend([len(round.prefill)] * bool(round.prefill))

    EngineLoop(parts.runner, parts.scheduler, run, run.hear, coalesce_seconds=0.02, observe=watch).run()
    assert run.reasons() == dict.fromkeys("01234", "length")
    assert begun == together


def test_a_cancelled_request_frees_its_lane_within_a_round(bench: Workbench, prompts: list[tuple[int, ...]]) -> None:
    parts = bench.parts(Case("one lane", lanes=1, threads=1), {})

    def observe(run: Run) -> None:
        if len(run.rounds) == 3:
            run.messages.append(Cancel("0"))

    run = serve(parts, [Submit(request(parts, "0", prompts[0], 200)), Submit(request(parts, "2", prompts[1], 4))], observe)
    assert run.reasons() == {"0": "cancelled", "2": "length"}
    assert [span.request.id for span in run.rounds[3].prefill] == ["2"]
    ended = run.ends["0"].stats
    assert ended is not None and ended.completion_tokens == len(run.tokens["0"]) == 1 + sum(ended.keeps)


def test_a_request_is_cancelled_while_its_prompt_is_read(bench: Workbench, prompts: list[tuple[int, ...]]) -> None:
    parts = bench.parts(Case("one lane", lanes=1, threads=1, prefill_tokens=64), {})

    def observe(run: Run) -> None:
        if len(run.rounds) == 1:
            run.messages += [Cancel("0"), Cancel("0"), Cancel("unknown")]

    run = serve(parts, [Submit(request(parts, "0", prompts[-1])), Submit(request(parts, "2", prompts[1], 4))], observe)
    assert run.reasons() == {"0": "cancelled", "2": "length"}
    assert run.tokens["0"] == ()
    assert not run.rounds[0].prefill[0].final
    assert run.rounds[1].prefill[0].request.id == "2"


def test_stopping_cancels_what_has_not_ended(parts: EngineParts, prompts: list[tuple[int, ...]]) -> None:
    def observe(run: Run) -> None:
        if len(run.rounds) == 2:
            run.messages.append(Stop())

    run = serve(parts, [Submit(request(parts, str(i), prompts[0], 100)) for i in range(5)], observe)
    assert run.reasons() == {str(i): "cancelled" for i in range(5)}


# -- the thread -----------------------------------------------------------------------------------------------------------


def test_a_dead_loop_tells_every_waiting_and_every_later_request(
    parts: EngineParts, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan() -> Round:
        raise SystemError("cannot plan")

    monkeypatch.setattr(parts.scheduler, "plan", plan)
    engine = Engine(CASE.options(), parts)
    heard: list[Emission] = []
    for name in ("0", "1", "2", "3"):
        try:
            engine.submit(request(parts, name, prompts[0]), heard.append)
        except EngineDead:
            break
    engine._thread.join(timeout=10)
    assert not engine.alive()
    assert heard and all(e.finish_reason == "error" and "cannot plan" in (e.error or "") for e in heard)
    with pytest.raises(EngineDead, match="cannot plan"):
        engine.submit(request(parts, "4", prompts[0]), heard.append)
    engine.close()


def test_a_lost_device_ends_the_engine(
    parts: EngineParts, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(parts.runner.target, "forward", forward)
    engine = Engine(CASE.options(), parts)
    heard: list[Emission] = []
    engine.submit(request(parts, "0", prompts[0]), heard.append)
    engine._thread.join(timeout=10)
    assert not engine.alive()
    assert [e.finish_reason for e in heard] == ["error"] and "illegal memory access" in (heard[0].error or "")
    with pytest.raises(EngineDead):
        engine.submit(request(parts, "1", prompts[0]), heard.append)


def test_a_closed_engine_has_cancelled_everything(parts: EngineParts, prompts: list[tuple[int, ...]]) -> None:
    engine = Engine(CASE.options(), parts)
    heard: list[Emission] = []
    engine.submit(request(parts, "0", prompts[0], 1000), heard.append)
    engine.close()
    engine.close()
    assert heard[-1].finish_reason == "cancelled"
    with pytest.raises(EngineDead, match="closed"):
        engine.submit(request(parts, "1", prompts[0]), heard.append)


def test_a_loop_ahead_of_its_device_says_everything_once(
    parts: EngineParts,
    prompts: list[tuple[int, ...]],
    undisturbed: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Emissions go out while the next round runs; the last ones, as there is no other, at once."""
    monkeypatch.setattr(Runner, "ahead", True)
    heard: list[int] = []
    run = serve(parts, three(parts, prompts), observe=lambda run: heard.append(sum(map(len, run.tokens.values()))))
    assert run.tokens == undisturbed
    assert heard == sorted(heard) and heard[0] == 0 and heard[-1] < sum(map(len, undisturbed.values()))
