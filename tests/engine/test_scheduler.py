"""The scheduler alone: fake lanes, and a fake model whose next token is a function of the history, so that an answer proves
that no token was lost, doubled or moved to another request."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.config import CHUNK_SIZE
from paceline.engine import admission
from paceline.engine.pacing import Pacer
from paceline.engine.plan import Fork, PrefillSpan, Round, RoundResult, RoundTimes, VerifySpan
from paceline.engine.policy import AutoPolicy, DecodeSeconds, LaneDrafts, LaneOutcome
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Sequence
from paceline.errors import InvalidRequest
from paceline.types import Emission, Request, TokenLogprob

VOCAB = 50
STOP = 49
MAX_CTX = 600
BLOCK = 8


class FakeLanes:
    """Lanes and tokens that can be reserved; also keeps how many tokens of each lane are in state."""

    def __init__(self, lanes: int, tokens: int) -> None:
        self.total, self.free_lanes, self.reserved = tokens, list(range(lanes)), dict[int, int]()
        self.count, self.longest = lanes, tokens
        self.committed: dict[int, int] = {}

    def fits(self, tokens: Iterable[int]) -> bool:
        return sum(tokens) <= self.total

    def admit(self, tokens: int) -> int | None:
        if not self.free_lanes or sum(self.reserved.values()) + tokens > self.total:
            return None
        lane = self.free_lanes.pop()
        self.reserved[lane], self.committed[lane] = tokens, 0
        return lane

    def grow(self, lane: int, tokens: int) -> bool:
        more = max(0, tokens - self.reserved[lane])
        if sum(self.reserved.values()) + more > self.total:
            return False
        self.reserved[lane] += more
        return True

    def release(self, lane: int) -> None:
        del self.reserved[lane], self.committed[lane]
        self.free_lanes.append(lane)


class FakeModel:
    """Executes rounds. Checks what the pool would check: spans begin where the lane's state ends, and stay in its room."""

    def __init__(self, lanes: FakeLanes) -> None:
        self.lanes, self.state = lanes, dict[int, list[int]]()

    def run(self, round: Round, accepted: SequenceOf[int]) -> RoundResult:
        """``accepted[i]`` of span i's drafts are right (or all it has, if that is fewer)."""
        lanes = [span.lane for span in round.verify] + [span.lane for span in round.prefill]
        lanes += [fork.lane for fork in round.forks]
        assert len(set(lanes)) == len(lanes), "a lane is in a round twice"
        verify = tuple(self._verify(span, right) for span, right in zip(round.verify, accepted, strict=True))
        prefill = tuple(map(self._prefill, round.prefill))
        forks = tuple(self._fork(fork, round.prefill) for fork in round.forks)
        logprobs = {span.request.id: prompt_logprobs(span) for span in round.prefill if span.request.prompt_logprobs}
        return RoundResult(verify, prefill, RoundTimes(), forks, prompt_logprobs=logprobs)

    def _verify(self, span: VerifySpan, right: int) -> tuple[int, ...]:
        assert span.start == self.lanes.committed[span.lane] == len(self.state[span.lane])
        assert span.start + span.length <= self.lanes.reserved[span.lane]
        history = [*self.state[span.lane], span.anchor]
        if span.known is not None:
            self._commit(span.lane, [*history, *span.known[: span.drafts]])
            return (-1,) * span.length
        emitted = []
        for _ in range(min(right, span.drafts) + 1):
            emitted.append(next_token(history, span.request.choice))
            history.append(emitted[-1])
        self._commit(span.lane, history[:-1])
        return tuple(emitted)

    def _prefill(self, span: PrefillSpan) -> int | None:
        assert span.start == self.lanes.committed[span.lane]
        ends = span.start + span.length == len(span.request.prompt)
        assert span.start % CHUNK_SIZE == 0 and (ends or span.length % CHUNK_SIZE == 0), "off the grid"
        history = [*self.state[span.lane], *span.tokens] if span.start else list(span.tokens)
        self._commit(span.lane, history)
        return next_token(history, span.request.choice) if span.final else None

    def _fork(self, fork: Fork, prefill: tuple[PrefillSpan, ...]) -> int:
        assert self.lanes.committed[fork.lane] == 0
        assert any(span.lane == fork.source and span.final for span in prefill)
        assert self.state[fork.source] == list(fork.request.prompt)
        self._commit(fork.lane, self.state[fork.source])
        return next_token(self.state[fork.lane], fork.request.choice)

    def _commit(self, lane: int, history: list[int]) -> None:
        self.state[lane] = history
        self.lanes.committed[lane] = len(history)


def next_token(history: SequenceOf[int], choice: int) -> int:
    return (zlib.crc32(bytes(history)) + 7 * choice) % VOCAB


def prompt_logprobs(span: PrefillSpan) -> list[TokenLogprob]:
    """Made up of the tokens behind those of a chunk."""
    return [TokenLogprob(-float(token)) for token in span.request.prompt[span.start + 1 : span.start + span.length + 1]]


def answer(request: Request) -> tuple[tuple[int, ...], str]:
    """What the request must get, computed alone."""
    history = list(request.prompt)
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        tokens.append(next_token(history, request.choice))
        history.append(tokens[-1])
        if tokens[-1] in request.stop_ids:
            return tuple(tokens), "stop"
    return tuple(tokens), "length"


def request(
    name: str, prompt: int = 5, max_tokens: int = 10, stops: SequenceOf[int] = (), speculate: bool = True
) -> Request:
    """A prompt of ``prompt`` tokens that depends on the name."""
    tokens = tuple(zlib.crc32(f"{name} {i}".encode()) % VOCAB for i in range(prompt))
    return Request(name, tokens, 0.0, 1.0, 0, 0.0, 0, max_tokens, frozenset(stops), speculate)


class Bench:
    """A scheduler, a model, and what every client has heard."""

    def __init__(self, lanes: int = 3, tokens: int = 3 * MAX_CTX, budget: int = 128, block: int = BLOCK) -> None:
        self.lanes = FakeLanes(lanes, tokens)
        self.model = FakeModel(self.lanes)
        self.now = 0.0
        self.scheduler = Scheduler(
            self.lanes, max_ctx=MAX_CTX, block_size=block, pacer=Pacer(budget), clock=lambda: self.now
        )
        self.heard: dict[str, list[Emission]] = {}

    def hear(self, emissions: SequenceOf[Emission]) -> None:
        for emission in emissions:
            past = self.heard.setdefault(emission.request_id, [])
            assert not past or past[-1].finish_reason is None, "spoke after its end"
            past.append(emission)

    def round(self, right: int = BLOCK) -> Round:
        self.now += 1.0
        round = self.scheduler.plan()
        if round:
            self.hear(self.scheduler.apply(round, self.model.run(round, [right] * len(round.verify))))
        return round

    def finish(self, right: int = BLOCK) -> None:
        for _ in range(10_000):
            if self.scheduler.idle:
                return
            self.round(right)
        raise AssertionError("never idle")

    def tokens(self, name: str) -> tuple[int, ...]:
        return tuple(token for emission in self.heard.get(name, []) for token in emission.tokens)

    def reason(self, name: str) -> str | None:
        past = self.heard.get(name)
        return past[-1].finish_reason if past else None


# -- admission -------------------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    """A request that would fit does not overtake one that has to wait."""
    bench = Bench(lanes=3, tokens=100)
    for name, prompt, new in (("a", 40, 10), ("b", 60, 10), ("c", 5, 5)):
        bench.scheduler.add(request(name, prompt, new))
    assert [span.request.id for span in bench.round().prefill] == ["a"]
    bench.finish()
    assert list(bench.heard) == ["a", "b", "c"]


def test_admission_reserves_what_is_needed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SOON", 10)
    bench = Bench(lanes=3, tokens=100)
    bench.scheduler.add(request("a", 40, 50))
    bench.scheduler.add(request("b", 20, 5))
    bench.scheduler.add(request("c", 20, 50))
    bench.round()
    assert bench.lanes.reserved == {2: 50, 1: 25}
    assert bench.scheduler.stats(0, 0).queued == 1


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "numbers"),
    [(0, 1, ["empty"]), (MAX_CTX, 1, [str(MAX_CTX)]), (MAX_CTX - 5, 6, ["595", "6", "600"]), (5, 0, ["5", "0"])],
)
def test_what_can_never_run_is_refused(prompt: int, max_tokens: int, numbers: list[str]) -> None:
    bench = Bench()
    with pytest.raises(InvalidRequest) as caught:
        bench.scheduler.add(request("a", prompt, max_tokens))
    assert all(number in caught.value.message for number in numbers)
    assert bench.scheduler.idle


def test_what_exceeds_the_pool_is_refused() -> None:
    bench = Bench(tokens=100)
    bench.scheduler.add(request("a", 50, 50))
    with pytest.raises(InvalidRequest, match="101 tokens .* 100 "):
        bench.scheduler.add(request("b", 51, 50))


# -- prompts ---------------------------------------------------------------------------------------------------------------


def test_prompts_are_cut_on_the_grid_within_the_budget() -> None:
    bench = Bench(lanes=2, budget=128)
    bench.scheduler.add(request("talks", 3, 200))
    bench.round()
    bench.scheduler.add(request("long", 500, 5))
    chunks = []
    while not bench.tokens("long"):
        chunks += [(span.start, span.length, span.final) for span in bench.round(right=0).prefill]
    assert chunks == [(0, 128, False), (128, 128, False), (256, 128, False), (384, 116, True)]


def test_a_budget_is_never_exceeded() -> None:
    """Prompts in turn, a quantum each; who goes short is the first in the next round."""
    bench = Bench(lanes=4, budget=100)
    bench.scheduler.add(request("talks", 3, 200))
    bench.round()
    for name, prompt in (("a", 150), ("b", 200), ("c", 5)):
        bench.scheduler.add(request(name, prompt, 50))
    chunks = [[(span.request.id, span.length) for span in bench.round(right=0).prefill] for _ in range(5)]
    assert chunks == [[("a", 64)], [("b", 64), ("c", 5)], [("a", 64)], [("b", 64), ("a", 22)], [("b", 72)]]


def test_an_idle_engine_reads_four_budgets() -> None:
    bench = Bench(lanes=3, budget=64)
    for name in ("a", "b"):
        bench.scheduler.add(request(name, 300, 5))
    assert [(span.request.id, span.length) for span in bench.round().prefill] == [("a", 128), ("b", 128)]


def test_short_prompts_share_a_round() -> None:
    bench = Bench(lanes=3)
    for name in ("a", "b", "c"):
        bench.scheduler.add(request(name, 20, 5))
    assert [span.final for span in bench.round().prefill] == [True, True, True]
    assert all(len(bench.tokens(name)) == 1 for name in "abc")


def test_decoding_goes_on_beside_a_prompt() -> None:
    bench = Bench(lanes=2, budget=64)
    bench.scheduler.add(request("talks", 3, 200))
    bench.round()
    bench.scheduler.add(request("long", 500, 5))
    for _ in range(7):
        round = bench.round(right=2)
        assert round.prefill and [span.drafts for span in round.verify] == [BLOCK - 1]


def test_a_round_that_is_out_of_reach_alternates() -> None:
    """Decoding takes a second a round, the bound is a tenth: every other round reads one quantum."""
    bench = Bench(lanes=2, budget=512)
    bench.scheduler.pacer = pacer = Pacer(512, 100.0)
    for _ in range(4):
        pacer.observe(True, 64, 1.2, 0.2)
    bench.scheduler.add(request("talks", 3, 200))
    bench.round()
    bench.scheduler.add(request("long", 200, 5))
    read = [sum(span.length for span in bench.round(right=0).prefill) for _ in range(8)]
    assert read == [0, 64, 0, 64, 0, 64, 0, 8]
    assert bench.scheduler.stats(0, 0).itl_out_of_reach == 4
    assert bench.tokens("long") == answer(request("long", 200, 5))[0][:1]


# -- parking ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, BLOCK])
def test_the_youngest_is_parked_and_goes_on(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(admission, "SOON", block)
    bench = Bench(lanes=3, tokens=130, block=block)
    asked = [request("a", 20, 60), request("b", 20, 60), request("c", 20, 60)]
    for one in asked:
        bench.scheduler.add(one)
    parked = set()
    for _ in range(300):
        bench.round(right=2)
        parked |= {one.request.id for one in bench.scheduler.waiting}
    assert parked == {"b", "c"}, "the oldest never is"
    assert [(bench.tokens(one.id), bench.reason(one.id)) for one in asked] == [answer(one) for one in asked]
    stats = bench.scheduler.stats(0, 0)
    assert stats.parkings["pages"] >= 2 and stats.parkings["priority"] == 0 == stats.parked
    assert stats.restored_tokens > 40 and stats.generated_tokens == 180


def test_a_parked_request_can_be_cancelled_and_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SOON", BLOCK)
    bench = Bench(lanes=2, tokens=100)
    bench.scheduler.add(request("a", 20, 60))
    bench.scheduler.add(request("b", 20, 60))
    bench.round()
    while not bench.scheduler.waiting:
        bench.round(right=3)
    assert (bench.scheduler.stats(0, 0).parked, bench.scheduler.stats(0, 0).queued) == (1, 1)
    said = bench.tokens("b")
    bench.hear(bench.scheduler.cancel("b"))
    assert bench.reason("b") == "cancelled" and bench.tokens("b") == said
    bench.finish()
    assert bench.tokens("a") == answer(request("a", 20, 60))[0]


# -- priorities and deadlines ----------------------------------------------------------------------------------------------


def ranked(name: str, priority: int, max_tokens: int = 10) -> Request:
    return replace(request(name, 5, max_tokens), priority=priority)


def test_a_lower_priority_number_goes_first_and_takes_a_lane_away() -> None:
    bench = Bench(lanes=1)
    for one in (ranked("batch", 5, 40), ranked("later", 5), ranked("now", 0)):
        bench.scheduler.add(one)
    bench.round()
    assert list(bench.heard) == ["now"]
    bench.finish()
    assert list(bench.heard) == ["now", "batch", "later"]
    bench.scheduler.add(ranked("long", 5, 60))
    for _ in range(3):
        bench.round(right=3)
    bench.scheduler.add(ranked("urgent", 0))
    bench.round()
    assert bench.reason("long") is None and len(bench.tokens("urgent")) == 1
    assert bench.scheduler.stats(0, 0).parkings == {"pages": 0, "priority": 1}
    bench.finish()
    assert bench.tokens("long") == answer(ranked("long", 5, 60))[0]


def test_waiting_makes_up_for_priority() -> None:
    """A step is worth ten seconds: after 60 a batch request goes before an urgent one that has just come."""
    bench = Bench(lanes=1)
    bench.scheduler.add(ranked("runs", 0, 100))
    bench.round()
    bench.scheduler.add(ranked("batch", 5, 40))
    bench.now += 60.0
    bench.scheduler.add(ranked("urgent", 0))
    bench.finish()
    assert list(bench.heard) == ["runs", "batch", "urgent"]
    assert bench.scheduler.stats(0, 0).parkings["priority"] == 0


def test_nobody_is_parked_for_a_request_that_would_not_fit_then() -> None:
    bench = Bench(lanes=2, tokens=200)
    bench.scheduler.add(ranked("first", 0, 100))
    bench.scheduler.add(ranked("batch", 5, 80))
    bench.round()
    bench.scheduler.add(replace(request("large", 100, 50), priority=1))
    bench.round()
    assert bench.scheduler.stats(0, 0).parkings["priority"] == 0
    assert [one.request.id for one in bench.scheduler.waiting] == ["large"]


def test_a_request_ends_when_its_time_is_over() -> None:
    """One that runs and one that waits; the lane is free for the next."""
    bench = Bench(lanes=1)
    bench.scheduler.add(replace(request("runs", 5, 100), timeout=4.0))
    bench.scheduler.add(replace(request("waits", 5, 5), timeout=4.0))
    bench.scheduler.add(request("next", 5, 5))
    for _ in range(3):
        assert bench.scheduler.expire() == []
        bench.round(right=0)
    bench.now += 1.0
    bench.hear(bench.scheduler.expire())
    assert (bench.reason("runs"), bench.reason("waits")) == ("timeout", "timeout")
    assert "timeout is over, 4 s" in (bench.heard["waits"][-1].error or "")
    assert len(bench.tokens("runs")) == 3
    bench.finish()
    assert bench.tokens("next") == answer(request("next", 5, 5))[0]
    assert bench.scheduler.stats(0, 0).requests_finished == {"timeout": 2, "length": 1}


# -- faults of one lane ----------------------------------------------------------------------------------------------------


def test_a_fault_while_booking_ends_its_lane_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.scheduler.add(request(name, 5, 20))
    bench.round()
    extend = Sequence.extend

    def fail(self: Sequence, tokens: tuple[int, ...]) -> object:
        if self.request.id == "a" and len(self.tokens) > 5:
            raise ValueError("cannot count")
        return extend(self, tokens)

    monkeypatch.setattr(Sequence, "extend", fail)
    bench.finish(right=2)
    assert bench.reason("a") == "error" and "cannot count" in (bench.heard["a"][-1].error or "")
    assert bench.tokens("b") == answer(request("b", 5, 20))[0]
    assert not bench.lanes.reserved


def test_logits_that_are_not_numbers_end_their_lane_alone() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.scheduler.add(request(name, 5, 20))
    bench.round()
    round = bench.scheduler.plan()
    result = replace(bench.model.run(round, [3, 3]), broken=("a",))
    bench.hear(bench.scheduler.apply(round, result))
    assert bench.reason("a") == "error" and len(bench.tokens("a")) == 1
    bench.finish(right=2)
    assert bench.tokens("b") == answer(request("b", 5, 20))[0]


# -- ends ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", range(BLOCK))
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9, 17])
def test_max_tokens_is_never_exceeded_nor_drafted_past(right: int, max_tokens: int) -> None:
    bench = Bench()
    asked = request("a", 4, max_tokens)
    bench.scheduler.add(asked)
    bench.finish(right)
    assert (bench.tokens("a"), bench.reason("a")) == answer(asked)
    stats = bench.heard["a"][-1].stats
    assert stats is not None
    assert 1 + sum(stats.keeps) == stats.completion_tokens == max_tokens
    assert all(keep <= right + 1 for keep in stats.keeps)


@pytest.mark.parametrize("right", range(BLOCK))
def test_a_stop_inside_a_burst_drops_what_follows(right: int) -> None:
    """Every token of the answer is tried as the stop."""
    whole = request("a", 4, 20)
    for stop in set(answer(whole)[0]):
        asked = replace(whole, stop_ids=frozenset((stop,)))
        bench = Bench()
        bench.scheduler.add(asked)
        bench.finish(right)
        assert (bench.tokens("a"), bench.reason("a")) == answer(asked)
        stats = bench.heard["a"][-1].stats
        assert stats is not None and 1 + sum(stats.keeps) == stats.completion_tokens == len(bench.tokens("a"))
        assert not bench.lanes.reserved


def test_a_lane_is_free_in_the_round_after_its_request_ends() -> None:
    bench = Bench(lanes=1)
    bench.scheduler.add(request("a", 4, 1))
    bench.scheduler.add(request("b", 4, 1))
    bench.round()
    assert bench.reason("a") == "length"
    assert [span.request.id for span in bench.round().prefill] == ["b"]


def test_a_request_without_speculation_gets_no_drafts() -> None:
    bench = Bench()
    bench.scheduler.add(request("plain", 4, 9, speculate=False))
    bench.scheduler.add(request("fast", 4, 9))
    bench.round()
    assert [span.drafts for span in bench.round(right=2).verify] == [0, 7]
    bench.finish(2)
    assert bench.tokens("plain") == answer(request("plain", 4, 9))[0]


def test_without_a_drafter_nothing_is_drafted() -> None:
    bench = Bench(block=1)
    bench.scheduler.add(request("a", 4, 9))
    bench.round()
    assert [span.drafts for span in bench.round().verify] == [0]
    assert bench.scheduler.stats(0, 0).drafted == ()


# -- the policy of drafts --------------------------------------------------------------------------------------------------


class Scripted(AutoPolicy):
    """Gives each lane two drafts, if it may have them, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[LaneDrafts]] = []
        self.told: list[tuple[list[LaneOutcome], DecodeSeconds | None]] = []
        self.gone: list[str] = []

    def plan(self, lanes: SequenceOf[LaneDrafts]) -> list[int]:
        self.asked.append(list(lanes))
        return [min(2, lane.most) for lane in lanes]

    def observe(self, outcomes: SequenceOf[LaneOutcome], seconds: DecodeSeconds | None) -> None:
        self.told.append((list(outcomes), seconds))

    def forget(self, request_id: str) -> None:
        self.gone.append(request_id)


def test_the_policy_is_asked_and_taught() -> None:
    bench, policy = Bench(), Scripted()
    bench.scheduler.policy = policy
    bench.scheduler.add(request("greedy", 4, 5))
    bench.scheduler.add(replace(request("drawn", 4, 20), temperature=0.5))
    bench.scheduler.add(request("plain", 4, 20, speculate=False))
    bench.round()
    assert policy.told == [([], None)]
    round = bench.scheduler.plan()
    now, behind = policy.asked
    assert now == [LaneDrafts("greedy", 3, False), LaneDrafts("drawn", 7, True), LaneDrafts("plain", 0, False)]
    assert behind == [LaneDrafts("greedy", 2, False), LaneDrafts("drawn", 7, True), LaneDrafts("plain", 0, False)]
    assert [span.drafts for span in round.verify] == [2, 2, 0] and round.following == ((0, 2), (1, 2), (2, 0))
    result = replace(bench.model.run(round, [2, 1, 0]), times=RoundTimes(draft=1.0, verify=2.0, commit=0.5, prefill=0.1))
    bench.hear(bench.scheduler.apply(round, result))
    outcomes = [LaneOutcome("greedy", False, 2, 2), LaneOutcome("drawn", True, 2, 1), LaneOutcome("plain", False, 0, 0)]
    assert policy.told[-1] == (outcomes, DecodeSeconds(1.0, 2.5))
    bench.round()
    assert policy.gone == ["greedy"]
    bench.hear(bench.scheduler.cancel("drawn"))
    assert policy.gone == ["greedy", "drawn"]


def test_what_follows_is_planned_with_the_round_and_kept() -> None:
    """The forward of the next round may be begun; who asks the policy once more would have it thrown away."""
    bench, policy = Bench(lanes=3), Scripted()
    bench.scheduler.policy = policy
    bench.scheduler.add(request("short", 4, 4))
    bench.scheduler.add(request("long", 4, 40))
    bench.round()
    for right, drafts, following in ((0, [2, 2], [1, 2]), (0, [1, 2], [0, 2]), (2, [2], [2]), (1, [2], [2])):
        round = asked_once(bench, policy)
        assert [span.drafts for span in round.verify] == drafts
        assert round.following is not None and [each.drafts for each in round.following] == following
        bench.hear(bench.scheduler.apply(round, bench.model.run(round, [right] * len(round.verify))))
        if drafts == [1, 2]:
            bench.hear(bench.scheduler.cancel("short"))
    bench.scheduler.add(request("new", 4, 40))
    round = asked_once(bench, policy)
    assert round.following == ((0, 2), (1, 2)) and round.going_on[1].request.id == "new", "somebody joins"
    bench.hear(bench.scheduler.apply(round, bench.model.run(round, [0])))
    assert [span.drafts for span in asked_once(bench, policy).verify] == [2, 2]


def asked_once(bench: Bench, policy: Scripted) -> Round:
    before = len(policy.asked)
    round = bench.scheduler.plan()
    assert len(policy.asked) == before + 1
    return round


def test_a_probe_follows_like_any_other_round() -> None:
    """Nothing that is drafted holds, so the lane soon decodes without drafts, but for probes."""
    bench = Bench(lanes=1)
    bench.scheduler.policy = AutoPolicy()
    bench.scheduler.add(request("a", 4, 180))
    bench.round()
    probes = 0
    for number in range(170):
        round = bench.scheduler.plan()
        probes += bench.scheduler.policy.probing and number > 20
        assert round.following is not None
        result = bench.model.run(round, [0] * len(round.verify))
        bench.hear(bench.scheduler.apply(round, replace(result, times=RoundTimes(draft=0.002, verify=0.008, commit=0.001))))
    assert probes > 1


def test_lanes_follow_in_the_order_of_the_next_round() -> None:
    """Who was admitted first may have the longer prompt, and decode later."""
    bench = Bench(lanes=2, budget=64)
    bench.scheduler.add(request("long", 550, 40))
    bench.scheduler.add(request("short", 4, 40))
    for _ in range(10):
        round = bench.scheduler.plan()
        bench.hear(bench.scheduler.apply(round, bench.model.run(round, [0] * len(round.verify))))
        if len(round.going_on) == 2:
            break
    assert [span.request.id for span in round.going_on] == ["short", "long"]
    assert round.following is not None and [each.place for each in round.following] == [1, 0]
    assert [span.request.id for span in bench.scheduler.plan().verify] == ["long", "short"]


def test_nothing_follows_where_tokens_are_put_into_state_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SOON", 1)
    bench = Bench(lanes=2, tokens=90, block=1)
    for name in "ab":
        bench.scheduler.add(request(name, 20, 60))
    seen = set()
    while not bench.scheduler.idle:
        round = bench.scheduler.plan()
        again = any(span.known for span in round.verify) or any(
            not span.final and span.start + span.length == len(span.request.prompt) for span in round.prefill
        )
        assert not again or round.following is None
        seen.add(again)
        bench.hear(bench.scheduler.apply(round, bench.model.run(round, [0] * len(round.verify))))
    assert seen == {True, False}


@pytest.mark.parametrize(("left", "follows"), [(2, False), (3, False), (4, True)])
def test_nothing_follows_where_everybody_may_end(left: int, follows: bool) -> None:
    bench = Bench(lanes=2)
    bench.scheduler.policy = Scripted()
    bench.scheduler.add(request("a", 4, left + 1))
    bench.scheduler.add(request("b", 4, left + 1))
    bench.round()
    assert (bench.scheduler.plan().following is not None) == follows


def test_times_beside_a_prompt_teach_nothing() -> None:
    bench, policy = Bench(lanes=2, budget=64), Scripted()
    bench.scheduler.policy = policy
    bench.scheduler.add(request("talks", 3, 200))
    bench.round()
    bench.scheduler.add(request("long", 100, 5))
    bench.round(right=1)
    bench.round(right=1)
    bench.round(right=1)
    assert [(len(outcomes), seconds is None) for outcomes, seconds in policy.told[1:]] == [(1, True), (1, True), (2, False)]


def test_rounds_are_counted_as_they_were_planned() -> None:
    """Drafts of which none holds: drafting, then plain rounds with a probe among fifty."""
    bench = Bench(lanes=1)
    bench.scheduler.policy = AutoPolicy()
    bench.scheduler.policy.seed({1: 1.0}, {(1, 1): 4.0, (1, 8): 4.5})
    bench.scheduler.add(request("a", 4, 200))
    bench.finish(right=0)
    rounds = bench.scheduler.stats(0, 0).decode_rounds
    assert sum(rounds.values()) == 199 and 1 <= rounds["probe"] <= 3 and 1 <= rounds["drafting"] < 12
    stats = bench.scheduler.stats(0, 0)
    assert stats.mean_drafts == sum(stats.drafted) / 199


# -- cancellation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(8))
def test_cancel_at_every_point(after: int) -> None:
    """Before admission, in each chunk of the prompt, between the bursts of the answer, after the end."""
    bench = Bench(lanes=1, budget=64)
    asked = request("a", 500, 30)
    bench.scheduler.add(asked)
    bench.scheduler.add(request("b", 4, 3))
    for _ in range(after):
        bench.round(right=7)
    over = bench.reason("a") is not None
    said = bench.tokens("a")
    bench.hear(bench.scheduler.cancel("a"))
    bench.hear(bench.scheduler.cancel("a"))
    assert bench.reason("a") == ("length" if over else "cancelled")
    assert bench.tokens("a") == said == answer(asked)[0][: len(said)]
    assert over or not bench.lanes.reserved
    bench.finish()
    assert (bench.tokens("b"), bench.reason("b")) == answer(request("b", 4, 3))
    stats = bench.heard["a"][-1].stats
    assert stats is not None and stats.completion_tokens == len(said)


def test_cancelling_what_waits_leaves_the_order() -> None:
    bench = Bench(lanes=1)
    for name in ("a", "b", "c"):
        bench.scheduler.add(request(name, 4, 3))
    bench.round()
    assert bench.scheduler.cancel("b")[0].stats is not None
    assert bench.scheduler.cancel("unknown") == []
    bench.finish()
    assert list(bench.heard) == ["a", "c"]


def test_a_failed_request_says_why() -> None:
    bench = Bench()
    bench.scheduler.add(request("a"))
    bench.round()
    [emission] = bench.scheduler.fail("a", "out of memory")
    assert (emission.finish_reason, emission.error, emission.tokens) == ("error", "out of memory", ())
    assert bench.scheduler.idle and not bench.lanes.reserved


# -- several answers to a prompt -------------------------------------------------------------------------------------------


def choices(asked: Request, n: int) -> list[Request]:
    return [replace(asked, id=f"{asked.id}.{choice}", choice=choice, group=asked.id) for choice in range(n)]


def test_a_prompt_is_read_once_for_all_lanes_of_a_group() -> None:
    """Those without a lane at its end read it when they get one, again once for all that have one then."""
    bench = Bench(lanes=4, budget=64)
    bench.scheduler.add(request("other", 5, 30))
    for one in choices(request("a", 500, 6), 5):
        bench.scheduler.add(one)
    rounds = [bench.round(right=0) for _ in range(16)]
    forks = [[fork.request.id for fork in round.forks] for round in rounds if round.forks]
    assert forks[0] == ["a.1", "a.2"]
    assert {span.request.id for round in rounds for span in round.prefill} >= {"other", "a.0", "a.3"}
    bench.finish()
    for one in choices(request("a", 500, 6), 5):
        assert (bench.tokens(one.id), bench.reason(one.id)) == answer(one)
    assert len({bench.tokens(f"a.{choice}") for choice in range(5)}) == 5
    assert bench.scheduler.stats(0, 0).prompt_tokens == 5 + 2 * 500


def test_the_next_of_a_group_reads_when_the_first_is_gone() -> None:
    bench = Bench(budget=64)
    for one in choices(request("a", 500, 6), 3):
        bench.scheduler.add(one)
    assert [span.request.id for span in bench.round().prefill] == ["a.0"]
    bench.hear(bench.scheduler.cancel("a.0"))
    assert [span.request.id for span in bench.round().prefill] == ["a.1"]
    bench.finish()
    for one in choices(request("a", 500, 6), 3)[1:]:
        assert (bench.tokens(one.id), bench.reason(one.id)) == answer(one)


# -- statistics ------------------------------------------------------------------------------------------------------------


def test_statistics_of_a_request_and_of_the_engine() -> None:
    bench = Bench(lanes=1, budget=64)
    bench.scheduler.add(request("a", 300, 12))  # arrives at 0; two rounds of prompt, at 1 and 2
    bench.scheduler.add(request("b", 4, 1))
    bench.finish(right=2)  # 1 + 3 + 3 + 3 + 2: four verify rounds, at 3 … 6; then b at 7
    stats = bench.heard["a"][-1].stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.completion_tokens, stats.rounds, stats.keeps) == (300, 12, 4, (3, 3, 3, 2))
    assert (stats.drafted, stats.accepted) == (7 + 7 + 4 + 1, 2 + 2 + 2 + 1)
    assert (stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds) == (1.0, 1.0, 4.0)
    engine = bench.scheduler.stats(7, 9)
    assert (engine.queued, engine.lanes, engine.pages_free, engine.pages_total) == (0, 0, 7, 9)
    assert engine.requests_finished == {"length": 2}
    assert (engine.prompt_tokens, engine.generated_tokens, engine.rounds) == (304, 13, 7)
    assert (engine.verify_spans, engine.emitted_in_verify) == (4, 11)
    assert engine.drafted == (4, 3, 3, 3, 2, 2, 2)
    assert engine.accepted == (4, 3, 0, 0, 0, 0, 0)
    assert engine.acceptance_length == 11 / 4


# -- interleavings ---------------------------------------------------------------------------------------------------------


class Interleavings(RuleBasedStateMachine):
    """Requests come and go at random between rounds with random acceptances; every answer must be the one computed alone."""

    @initialize(
        lanes=st.integers(1, 4),
        tokens=st.sampled_from([300, MAX_CTX, 4 * MAX_CTX]),
        budget=st.sampled_from([64, 100, 128, 512]),
        block=st.sampled_from([1, 2, BLOCK]),
    )
    def start(self, lanes: int, tokens: int, budget: int, block: int) -> None:
        self.bench = Bench(lanes, tokens, budget, block)
        self.soon, admission.SOON = admission.SOON, block
        self.asked: dict[str, Request] = {}
        self.cancelled: set[str] = set()

    @rule(
        prompt=st.one_of(st.integers(1, 20), st.integers(60, 210)),
        max_tokens=st.one_of(st.integers(1, 40), st.just(90)),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        speculate=st.booleans(),
        priority=st.sampled_from([0, 0, 2]),
        timeout=st.sampled_from([None, None, 20.0]),
        n=st.sampled_from([1, 1, 3]),
    )
    def submit(
        self, prompt: int, max_tokens: int, stops: list[int], speculate: bool, priority: int, timeout: float | None, n: int
    ) -> None:
        asked = request(str(len(self.asked)), prompt, max_tokens, stops, speculate)
        asked = replace(asked, priority=priority, timeout=timeout, prompt_logprobs=n)
        for one in (asked,) if n == 1 else choices(asked, n):
            self.bench.scheduler.add(one)
            self.asked[one.id] = one

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        if self.bench.reason(name) is None:
            self.cancelled.add(name)
        self.bench.hear(self.bench.scheduler.cancel(name))
        assert self.bench.reason(name) is not None

    @rule(data=st.data())
    def round(self, data: st.DataObject) -> None:
        bench = self.bench
        bench.now += 1.0
        ended = bench.scheduler.expire()
        self.cancelled |= {emission.request_id for emission in ended}
        bench.hear(ended)
        round = self.planned()
        assert bool(round) == (not bench.scheduler.idle), "somebody always gets on"
        limit = bench.scheduler.pacer.prefill_tokens * (1 if any(span.known is None for span in round.verify) else 4)
        assert sum(span.length for span in round.prefill) <= limit
        accepted = [data.draw(st.integers(0, BLOCK)) for _ in round.verify]
        bench.hear(bench.scheduler.apply(round, bench.model.run(round, accepted)))

    def planned(self) -> Round:
        scheduler = self.bench.scheduler
        before = set(map(id, scheduler.running))
        round = scheduler.plan()
        admitted = [one.rank for one in scheduler.running if id(one) not in before]
        assert not admitted or not scheduler.waiting or max(admitted) < scheduler.waiting[0].rank, "overtaken"
        return round

    @rule(data=st.data())
    def retried_round(self, data: st.DataObject) -> None:
        """A round that failed and is run again lane by lane, without drafts; one lane may fail for good."""
        bench = self.bench
        round = self.planned()
        names = [span.request.id for span in round.verify] + [span.request.id for span in round.prefill]
        doomed = data.draw(st.sampled_from([None, *names]))
        singles = [Round((replace(span, drafts=0),), ()) for span in round.verify]
        for single in (*singles, *(Round((), (span,)) for span in round.prefill)):
            name = (single.verify or single.prefill)[0].request.id
            if name == doomed:
                bench.hear(bench.scheduler.fail(name, "failed"))
                self.cancelled.add(name)
            else:
                bench.hear(bench.scheduler.apply(single, bench.model.run(single, [0] * len(single.verify))))

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "bench"):
            return
        scheduler = self.bench.scheduler
        live = {sequence.lane for sequence in scheduler.running}
        assert live == set(self.bench.lanes.reserved), "a lane leaked"
        for name, asked in self.asked.items():
            tokens, reason = answer(asked)
            said = self.bench.tokens(name)
            assert said == tokens[: len(said)]
            if said:
                first, *others = (emission.prompt_logprobs for emission in self.bench.heard[name])
                assert [-entry.logprob for entry in first] == list(asked.prompt[1:]) and not any(others)
            if self.bench.reason(name) is not None and name not in self.cancelled:
                assert (said, self.bench.reason(name)) == (tokens, reason)

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.finish(3)
            self.nothing_is_lost()
            assert all(self.bench.reason(name) is not None for name in self.asked)
            assert not self.bench.lanes.reserved
            finished = self.bench.scheduler.stats(0, 0).requests_finished
            assert sum(finished.values()) == len(self.asked)
            admission.SOON = self.soon


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
