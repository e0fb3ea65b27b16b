"""Who has a lane and who waits for one. Pure Python: no tensors, no clock of its own.

One order decides everything: a request that arrived earlier goes first, and a step of priority counts for some seconds of
waiting, so that nobody waits for ever. The first in this order that waits is admitted next, and nothing overtakes it; when
pages run out the last that runs is parked: its lane and its pages are given up, and when it is its turn again its state is
made anew from its tokens.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Literal, Protocol

from paceline.engine.sequence import Sequence

SOON = 256
"""Tokens for which everybody must have room before one more is admitted: who comes in only to be parked, or parks another
at once, has everything read twice."""

Cause = Literal["pages", "priority"]
_rank = attrgetter("rank")


class Lanes(Protocol):
    """What is needed of the state pool."""

    @property
    def count(self) -> int: ...
    @property
    def longest(self) -> int: ...
    def fits(self, tokens: Iterable[int]) -> bool: ...
    def admit(self, tokens: int) -> int | None: ...
    def grow(self, lane: int, tokens: int) -> bool: ...
    def release(self, lane: int) -> None: ...


class Admission:
    """``waiting`` is in order; ``running`` as admitted. ``parkings`` counts by cause: no pages, or a higher priority."""

    def __init__(self, lanes: Lanes, clock: Callable[[], float]) -> None:
        self.lanes, self.clock = lanes, clock
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.parkings: dict[str, int] = {"pages": 0, "priority": 0}

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody who has not ended."""
        return iter((*self.waiting, *self.running))

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """The end of a sequence, wherever it is."""
        if sequence.lane < 0:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    @property
    def parked(self) -> int:
        """How many of those who wait had a lane before."""
        return sum(sequence.admitted is not None for sequence in self.waiting)

    def make_room(self, rows: int) -> None:
        """Room for the next round, in which no lane gets more than ``rows`` rows behind its prompt. The first are served
        first, and where there is no room the last are parked. One alone always has room: ``longest`` is checked before."""
        for sequence in sorted(self.running, key=_rank):
            while sequence.lane >= 0 and not self.lanes.grow(sequence.lane, sequence.reach(rows)):
                self._park(max(self.running, key=_rank), "pages")

    def admit(self) -> None:
        """Give lanes to the first who wait, while there are lanes and room."""
        while self.waiting and self._yield_to(self.waiting[0]):
            sequence = self.waiting[0]
            lane = self.lanes.admit(sequence.reach(SOON))
            assert lane is not None, "nobody has more reserved than what is looked at here"
            del self.waiting[0]
            sequence.lane = lane
            sequence.admissions += 1
            sequence.admitted = self.clock() if sequence.admitted is None else sequence.admitted
            self.running.append(sequence)

    def _yield_to(self, sequence: Sequence) -> bool:
        """Whether there is a lane and room, once the last of those that it outranks by priority are parked: as few as are
        needed, and nobody if even all of them would not do."""
        staying = sorted(self.running, key=_rank)
        going: list[Sequence] = []
        while not self._has_place(sequence, staying):
            if not staying or not _outranks(sequence, staying[-1]):
                return False
            going.append(staying.pop())
        for parked in going:
            self._park(parked, "priority")
        return True

    def _has_place(self, sequence: Sequence, beside: list[Sequence]) -> bool:
        return len(beside) < self.lanes.count and self.lanes.fits(one.reach(SOON) for one in (*beside, sequence))

    def _park(self, sequence: Sequence, cause: Cause) -> None:
        self.parkings[cause] += 1
        self._leave(sequence)
        sequence.park()
        self.add(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.lanes.release(sequence.lane)


def _outranks(sequence: Sequence, other: Sequence) -> bool:
    """Being earlier alone takes no lane away from anybody."""
    return sequence.request.priority < other.request.priority and sequence.rank < other.rank
