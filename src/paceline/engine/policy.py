"""How many drafts of each lane are verified in a round (K). Pure Python: no tensors, no clock, no dice.

The law makes K invisible in the tokens, so it may be chosen anew for every lane in every round. ``AutoPolicy`` maximises the
expected tokens per second of the round, from what rounds were measured to cost (``Costs``) and from how often drafts held
(``Acceptance``); where drafting does not pay, the round is plain, but for a rare probe. ``FixedPolicy`` always drafts fully.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from operator import mul
from typing import Protocol

from paceline.config import DraftPolicy

_GUESSED_FIXED_ROWS = 16
"""Before a forward is measured, one of N rows is taken to cost in proportion to 16 + N."""
_GUESSED_BLOCK = 8
"""Rows per drafting lane in that guess."""
_MEASUREMENTS = 7
"""Measurements kept per shape."""
_MEMORY_ROUNDS = 1000
"""A measurement that is older is forgotten, so that what was slow once gets another chance."""

_LANE_FADE = 0.95
"""By which a lane's evidence shrinks in each round in which it drafts: a memory of about 20 rounds."""
_IDLE_FADE = 0.98
"""The same in a round in which the lane does not draft."""
_EVEN_DRAFTS = 4.0
"""So many drafts at even odds tell the log odds of success with a variance of one."""
_FIRST_WEIGHT = 20.0
"""What it counts for that lanes are taken to differ by a variance of one before it is known by how much they do."""
_LEAST_SPREAD = 0.04
"""The variance that lanes are taken to differ by at least."""
_SHARED_FADE = 0.98
"""The same over all lanes, by drafting span."""
_SHARED_PRIOR = 2.0
"""Drafts that the position before counts for in the estimate over all lanes."""
_FIRST_GUESS = 0.9
"""The acceptance of drafts of which nothing is known. It is high: trying costs a few rounds, not trying costs them all."""
_NEGLIGIBLE = 0.002
"""A draft no likelier than this is not worth a thought."""

_GAIN_TO_START = 1.03
"""How much better than a plain round drafting must look before it starts again, so that noise does not make it flip."""
_PROBE_ROUNDS = 50
"""Rounds from one probe to the next, at least: 2 % of them."""
_PROBE_TIME = 0.01
"""The share of the time that probes may cost."""
_PROBE_DRAFTS = 3


@dataclass(frozen=True, slots=True)
class LaneDrafts:
    """A decoding lane: its request, the drafts it may have (0: none), and whether its tokens are drawn (temperature > 0)."""

    request_id: str
    most: int
    sampled: bool


@dataclass(frozen=True, slots=True)
class LaneOutcome:
    """What a lane's verify span came to: ``drafts`` verified (0: a plain row), of which the first ``accepted`` held."""

    request_id: str
    sampled: bool
    drafts: int
    accepted: int


@dataclass(frozen=True, slots=True)
class DecodeSeconds:
    """Time of a round's draft forward, and of everything else that decoding took in it (verify, accept, commit)."""

    draft: float
    verify: float


class Policy(Protocol):
    """``probing``: whether the round planned last drafts only in order to learn."""

    probing: bool

    def plan(self, lanes: Sequence[LaneDrafts]) -> list[int]:
        """K of each lane, in their order, at most its ``most``."""

    def observe(self, outcomes: Sequence[LaneOutcome], seconds: DecodeSeconds | None) -> None:
        """Learn from a finished round. ``seconds`` is None when they are not those of the decode rows alone."""

    def forget(self, request_id: str) -> None:
        """The request has ended."""

    def seed(self, draft: Mapping[int, float], verify: Mapping[tuple[int, int], float]) -> None:
        """See ``Costs.seed``."""


def make_policy(name: DraftPolicy) -> Policy:
    return AutoPolicy() if name == "auto" else FixedPolicy()


class FixedPolicy:
    """Every lane drafts as much as it may, always."""

    probing = False

    def plan(self, lanes: Sequence[LaneDrafts]) -> list[int]:
        return [lane.most for lane in lanes]

    def observe(self, outcomes: Sequence[LaneOutcome], seconds: DecodeSeconds | None) -> None:
        """Nothing depends on it."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""

    def seed(self, draft: Mapping[int, float], verify: Mapping[tuple[int, int], float]) -> None:
        """Nothing depends on it."""


class AutoPolicy:
    """As many drafts as pay. Starts by drafting fully and learns within a few rounds."""

    def __init__(self) -> None:
        self.costs, self.acceptance = Costs(), Acceptance()
        self.probing = False
        self._plain = False
        self._since_probe, self._next_look = 0, _PROBE_ROUNDS

    def plan(self, lanes: Sequence[LaneDrafts]) -> list[int]:
        self.probing = False
        if not lanes:
            return []
        self._since_probe += 1
        # a draft of probability p adds p tokens and one row, whichever lane it is of
        ranked = sorted(
            (-survival, position, index)
            for index, lane in enumerate(lanes)
            for position, survival in enumerate(self.acceptance.survival(lane))
        )
        drafts = [0] * len(lanes)
        for _, _, index in ranked[: self._best_count(len(lanes), ranked)]:
            drafts[index] += 1
        self._plain = not any(drafts)
        return self._with_probe(lanes, drafts)

    def _best_count(self, spans: int, ranked: Sequence[tuple[float, int, int]]) -> int:
        """How many drafts, likeliest first, make the most tokens per second. Exact for costs by rows: as survival falls with
        the position, the first n are the best n and hold no draft without those before it."""
        verify = self.costs.verify_row(spans, spans + len(ranked))
        draft = self.costs.draft_row(spans)
        tokens, drafting = float(spans), 0
        plain = best = tokens / verify[0]
        count = 0
        for number, (minus_survival, position, _) in enumerate(ranked, start=1):
            tokens -= minus_survival
            drafting += position == 0
            rate = tokens / (draft[drafting] + verify[number])
            if rate > best:
                best, count = rate, number
        return 0 if self._plain and best < plain * _GAIN_TO_START else count

    def _with_probe(self, lanes: Sequence[LaneDrafts], drafts: list[int]) -> list[int]:
        """The plan, or now and then one to learn from: with some drafts of lanes that have none in it, as what is not
        drafted is not observed; or a plain round, if none of so many lanes was measured to compare drafting with."""
        if self._since_probe < self._next_look:
            return drafts
        probe = [count or min(lane.most, _PROBE_DRAFTS) for lane, count in zip(lanes, drafts, strict=True)]
        if probe == drafts and not self.costs.knows_plain(len(lanes)):
            probe = [0] * len(lanes)
        usual = self.costs.of(drafts)
        extra = self.costs.of(probe) - usual
        if probe != drafts and extra > _PROBE_TIME * self._since_probe * usual:
            self._next_look = self._since_probe + _PROBE_ROUNDS
            return drafts
        self._since_probe, self._next_look = 0, _PROBE_ROUNDS
        self.probing = probe != drafts
        return probe

    def observe(self, outcomes: Sequence[LaneOutcome], seconds: DecodeSeconds | None) -> None:
        if seconds is not None and outcomes:
            self.costs.observe([outcome.drafts for outcome in outcomes], seconds)
        for outcome in outcomes:
            self.acceptance.observe(outcome)

    def forget(self, request_id: str) -> None:
        self.acceptance.forget(request_id)

    def seed(self, draft: Mapping[int, float], verify: Mapping[tuple[int, int], float]) -> None:
        self.costs.seed(draft, verify)


# -- costs -----------------------------------------------------------------------------------------------------------------


class Costs:
    """Seconds of the draft forward by drafting lanes, and of the rest of a round's decoding by spans and rows.

    Either is a shape times a ratio. The shape comes from seeds, or is a guess; the ratio is that of measurements to the
    shape, interpolated between the row counts that were measured. So a long context or a busy machine, which slows what is
    measured, is taken to slow the rest as well. What was padded to the same seed counts as the same: it cost the same.
    """

    def __init__(self) -> None:
        self._draft_shape, self._draft_ratio = _Steps(), Points()
        self._verify_shape: dict[int, _Steps] = {}
        self._verify_ratio: dict[int, Points] = {}
        self._round = 0

    def seed(self, draft: Mapping[int, float], verify: Mapping[tuple[int, int], float]) -> None:
        """Seconds measured beforehand: ``draft`` by drafting lanes, ``verify`` by (spans, rows of all of them together).

        What lies between two given counts costs what the larger costs: it is padded to that.
        """
        if any(seconds <= 0.0 for seconds in (*draft.values(), *verify.values())):
            raise ValueError(f"costs must be positive, got draft {dict(draft)}, verify {dict(verify)}")
        for drafting, seconds in draft.items():
            self._draft_shape.set(drafting, seconds)
        for (spans, rows), seconds in verify.items():
            self._verify_shape.setdefault(spans, _Steps()).set(rows, seconds)

    def observe(self, drafts: Sequence[int], seconds: DecodeSeconds) -> None:
        """A finished round with ``drafts[i]`` drafts of span i. One too short for its clock is passed over."""
        if seconds.verify <= 0.0:
            return
        self._round += 1
        for points in (self._draft_ratio, *self._verify_ratio.values()):
            points.forget(self._round - _MEMORY_ROUNDS)
        drafting, (spans, shape) = sum(count > 0 for count in drafts), self._shape_for(len(drafts))
        rows = shape.padded(len(drafts) + sum(drafts))
        [base] = _base(shape, 1, rows, rows, rows)
        self._verify_ratio.setdefault(spans, Points()).measure(rows, seconds.verify / base, self._round)
        if drafting:
            drafting = self._draft_shape.padded(drafting)
            [base] = _base(self._draft_shape, _GUESSED_BLOCK, drafting, drafting, drafting)
            self._draft_ratio.measure(drafting, seconds.draft / base, self._round)

    def draft_row(self, most: int) -> list[float]:
        """Of 0 … ``most`` drafting lanes. Free until something is known."""
        return [0.0, *(_row(self._draft_shape, self._draft_ratio, _GUESSED_BLOCK, 1, most) or [0.0] * most)]

    def verify_row(self, spans: int, most: int) -> list[float]:
        """Of ``spans`` … ``most`` rows in ``spans`` spans. The same for all until something is known."""
        batch, shape = self._shape_for(spans)
        return _row(shape, _nearest(self._verify_ratio, batch), 1, spans, most) or [1.0] * (most - spans + 1)

    def _shape_for(self, spans: int) -> tuple[int, _Steps]:
        """The smallest batch with seeds that holds so many spans, and its seeds; itself and none if there are none."""
        known = sorted(self._verify_shape)
        if not known:
            return spans, _Steps()
        batch = known[min(bisect_left(known, spans), len(known) - 1)]
        return batch, self._verify_shape[batch]

    def knows_plain(self, spans: int) -> bool:
        """Whether a plain round of so many spans was measured."""
        return bool(self._verify_shape) or (spans in self._verify_ratio and self._verify_ratio[spans].knows(spans))

    def of(self, drafts: Sequence[int]) -> float:
        """Of a whole round."""
        rows, drafting = len(drafts) + sum(drafts), sum(count > 0 for count in drafts)
        return self.draft_row(len(drafts))[drafting] + self.verify_row(len(drafts), rows)[-1]


class Points:
    """A function of a count, known at some: each the lower median of its latest measurements, which no delay can raise."""

    def __init__(self) -> None:
        self._measured: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}
        self._values: dict[int, float] = {}
        self._counts: list[int] = []
        self._rows: dict[tuple[int, int], list[float]] = {}
        """What ``along`` gave since the last change."""

    @property
    def known(self) -> bool:
        return bool(self._values)

    def knows(self, at: int) -> bool:
        return at in self._values

    @property
    def largest(self) -> int:
        return self._counts[-1]

    def set(self, at: int, value: float) -> None:
        if self._values.get(at) != value:
            self._values[at] = value
            self._changed()

    def _changed(self) -> None:
        self._counts = sorted(self._values)
        self._rows.clear()

    def measure(self, at: int, value: float, round: int) -> None:
        """The first of a count is not used alone: the first run of a shape may pay for setting things up."""
        measured = self._measured.setdefault(at, deque(maxlen=_MEASUREMENTS))
        measured.append(value)
        self._seen[at] = round
        if len(measured) > 1:
            self.set(at, sorted(measured)[(len(measured) - 1) // 2])

    def forget(self, before: int) -> None:
        """What was last measured before this round."""
        for at in [at for at, seen in self._seen.items() if seen < before]:
            del self._seen[at], self._measured[at]
            self._values.pop(at, None)
            self._changed()

    def along(self, first: int, last: int) -> list[float]:
        """At first … last: between known counts a straight line, outside them the nearest; empty if nothing is known."""
        if (first, last) not in self._rows:
            self._rows[first, last] = self._lines(first, last)
        return self._rows[first, last]

    def _lines(self, first: int, last: int) -> list[float]:
        if not self._counts:
            return []
        counts, values = self._counts, self._values
        row = [values[counts[0]]] * max(0, min(last, counts[0]) - first + 1)
        for low, high in pairwise(counts):
            slope = (values[high] - values[low]) / (high - low)
            row += [values[low] + slope * (at - low) for at in range(max(low + 1, first), min(high, last) + 1)]
        return row + [values[counts[-1]]] * (last - first + 1 - len(row))


class _Steps(Points):
    """At a count that is not known: what the next larger known one has, or the largest."""

    def padded(self, count: int) -> int:
        """The known count that it is padded to; itself if none is as large."""
        index = bisect_left(self._counts, count)
        return self._counts[index] if index < len(self._counts) else count

    def _lines(self, first: int, last: int) -> list[float]:
        counts = self._counts
        larger = (bisect_left(counts, at) for at in range(first, last + 1)) if counts else ()
        return [self._values[counts[min(index, len(counts) - 1)]] for index in larger]


def _row(shape: _Steps, ratio: Points | None, rows_each: int, first: int, last: int) -> list[float]:
    """Seconds at the counts first … last; empty if nothing is known. Fewer rows never cost more, whatever noise says.

    A guess is never trusted above the largest count that was measured: until it is tried, more costs no more.
    """
    if ratio is None or not ratio.known:
        row = shape.along(first, last)
    else:
        ratios = ratio.along(first, shape.padded(last))
        base = _base(shape, rows_each, first, last, ratio.largest)
        row = [seconds * ratios[shape.padded(at) - first] for at, seconds in enumerate(base, start=first)]
    return list(accumulate(reversed(row), min))[::-1]


def _base(shape: _Steps, rows_each: int, first: int, last: int, largest: int) -> list[float]:
    """The shape, or in its place the guess: of a forward of 16 rows, half the cost is fixed."""
    known = shape.along(first, last)
    return known or [float(_GUESSED_FIXED_ROWS + min(count, largest) * rows_each) for count in range(first, last + 1)]


def _nearest(by_spans: Mapping[int, Points], spans: int) -> Points | None:
    """Known points of this number of spans, or of that closest to it."""
    known = [count for count, points in by_spans.items() if points.known]
    return by_spans[min(known, key=lambda count: (abs(count - spans), count))] if known else None


# -- acceptance ------------------------------------------------------------------------------------------------------------


class Acceptance:
    """How likely draft i is to hold if those before it did, per lane and over all lanes.

    With K drafts of which a held, 1 … a are successes, a + 1 is a failure if a < K, and of the others nothing is known.
    Evidence fades, so that a change is noticed. A lane's estimate starts from the one over all requests, kept apart for
    drawn and for greedy tokens, and leaves it the sooner the more lanes were found to differ: where they do not, what looks
    like a difference is chance, and choosing by chance loses.
    """

    def __init__(self) -> None:
        self._all = {sampled: _AllLanes() for sampled in (False, True)}
        self._lanes: dict[str, _Evidence] = {}

    def observe(self, outcome: LaneOutcome) -> None:
        lane = self._lanes.setdefault(outcome.request_id, _Evidence())
        lane.fade(_LANE_FADE if outcome.drafts else _IDLE_FADE)
        if outcome.drafts:
            self._all[outcome.sampled].observe(lane, outcome)
            lane.add(outcome.drafts, outcome.accepted)

    def forget(self, request_id: str) -> None:
        self._lanes.pop(request_id, None)

    def survival(self, lane: LaneDrafts) -> list[float]:
        """The probability that the first 1 … ``most`` drafts hold: strictly falling, and cut where it is negligible."""
        everybody = self._all[lane.sampled]
        rates = _lane_rates(everybody.rates(lane.most), self._lanes.get(lane.request_id, _NOTHING), everybody.prior)
        return list(takewhile(lambda survival: survival > _NEGLIGIBLE, accumulate(rates, mul)))


class _Evidence:
    """Faded counts of successes and trials by draft position; a position that was never tried has none."""

    def __init__(self) -> None:
        self.held: list[float] = []
        self.tried: list[float] = []
        self.weight = 1.0
        """Fading that the counts have still to be multiplied by."""

    def fade(self, factor: float) -> None:
        self.weight *= factor

    def add(self, drafts: int, accepted: int) -> None:
        observed = min(accepted + 1, drafts)
        missing = [0.0] * (observed - len(self.tried))
        self.held = [count * self.weight for count in self.held] + missing
        self.tried = [count * self.weight for count in self.tried] + missing
        self.weight = 1.0
        for position in range(observed):
            self.tried[position] += 1.0
            self.held[position] += position < accepted

    def at(self, position: int) -> tuple[float, float]:
        """Held and tried."""
        if position >= len(self.tried):
            return 0.0, 0.0
        return self.held[position] * self.weight, self.tried[position] * self.weight

    def surplus(self, rates: Sequence[float]) -> tuple[float, float]:
        """Successes beyond those that these rates let expect, and the information about log odds in as many trials."""
        expected = list(map(mul, self.tried, rates))
        information = sum(count * (1.0 - rate) for count, rate in zip(expected, rates, strict=False))
        return self.weight * (sum(self.held) - sum(expected)), self.weight * information


_NOTHING = _Evidence()


class _AllLanes:
    """The acceptance over all lanes by position, and how much lanes differ: the variance among their log odds.

    That is found from how well a lane's surplus of accepted drafts predicts that of its next round. Two rounds have chance
    apart and the lane in common, so the mean product of their surpluses is the variance times that of their information.
    """

    def __init__(self) -> None:
        self._evidence = _Evidence()
        self._products = self._scale = _FIRST_WEIGHT

    def observe(self, lane: _Evidence, outcome: LaneOutcome) -> None:
        """A round of a lane, of which so much was known."""
        latest = _Evidence()
        latest.add(outcome.drafts, outcome.accepted)
        if lane.tried:
            rates = list(self.rates(max(len(lane.tried), len(latest.tried))))
            (before, known), (surplus, information) = lane.surplus(rates), latest.surplus(rates)
            self._products = self._products * _SHARED_FADE + before * surplus
            self._scale = self._scale * _SHARED_FADE + known * information
        self._evidence.fade(_SHARED_FADE)
        self._evidence.add(outcome.drafts, outcome.accepted)

    @property
    def prior(self) -> float:
        """Drafts that the estimate over all lanes counts for in a lane's own."""
        return _EVEN_DRAFTS / max(self._products / self._scale, _LEAST_SPREAD)

    def rates(self, most: int) -> Iterator[float]:
        """Conditional acceptance at the first ``most`` positions. One of which little is known is taken to be like the one
        before it."""
        rate = _FIRST_GUESS
        for position in range(most):
            held, tried = self._evidence.at(position)
            rate = _bounded((held + _SHARED_PRIOR * rate) / (tried + _SHARED_PRIOR))
            yield rate


def _lane_rates(everybody: Iterable[float], own: _Evidence, prior: float) -> Iterator[float]:
    """Conditional acceptance in a lane: at a position of which little is known as much better or worse (in odds) than over
    all lanes as at the position before it."""
    odds = 1.0
    for position, usual in enumerate(everybody):
        expected = usual * odds / (1.0 - usual + usual * odds)
        held, tried = own.at(position)
        rate = _bounded((held + prior * expected) / (tried + prior))
        odds = rate * (1.0 - usual) / ((1.0 - rate) * usual)
        yield rate


def _bounded(rate: float) -> float:
    return min(max(rate, 0.01), 0.99)
