"""How many prompt tokens a round reads, of whom, and when that is over. Pure Python: no tensors, no clock.

While lanes decode, a round is to take no longer than the bound on the time between tokens. What decoding takes, and what
reading takes by the number of tokens, is learned from the rounds before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.config import CHUNK_SIZE
from paceline.engine.policy import Points

IDLE_FACTOR = 4
"""A round in which no lane decodes reads so many times ``prefill_tokens``."""
_BESIDE_FACTOR = 2
"""A round whose lanes do not wait for prompts reads so many times ``prefill_tokens``: prompts that come together are read
together, which takes less than one after the other."""
_MARGIN = 0.9
"""The share of the bound that is planned with: rounds vary, and the bound is on the slowest."""
_DECODE_ROUNDS = 32
_DECODE_RANK = 0.9
"""Decoding is taken to last as long as in the slower ones of the last rounds; a rare stall is none of them."""
_FIXED_ROWS = 128
"""Between numbers of tokens that were measured, and beyond, reading N is taken to cost in proportion to 128 + N."""
_MEMORY_ROUNDS = 1000
_RECENT_ROUNDS = 8
_READING_BESIDE = 1.4
"""How many times as long a forward over prompts takes beside rounds, before that is known. Measured on an H200."""
_DECODING_BESIDE = 0.23
"""What decoding loses of its time beside such a forward. Measured there too."""


class Pacer:
    def __init__(self, prefill_tokens: int, itl_budget_ms: float | None = None, *, beside: bool = False) -> None:
        """``prefill_tokens``: read per round at most while lanes decode. ``itl_budget_ms``: the bound, None for none.
        ``beside``: whether lanes decode on while prompts are read."""
        self.prefill_tokens, self.beside = prefill_tokens, beside
        self.seconds = None if itl_budget_ms is None else _MARGIN * itl_budget_ms / 1000.0
        self.out_of_reach = 0
        """Rounds that read the smallest quantum although that was expected to break the bound."""
        self._decode: deque[float] = deque(maxlen=_DECODE_ROUNDS)
        self._ratio = Points()
        """Seconds of reading in proportion to the guess, by quanta."""
        self._rounds = 0
        self._held_back = False

    def budget(self, decoding: bool) -> int:
        """Prompt tokens of the next round, in which there are some to read; ``decoding``: whether lanes wait for tokens.

        Where decoding and one quantum together break the bound, every other round reads one, so that prompts get on.
        """
        if not decoding:
            return IDLE_FACTOR * self.prefill_tokens
        if self.seconds is None:
            return _BESIDE_FACTOR * self.prefill_tokens if self.beside else self.prefill_tokens
        quanta = self._quanta(self.seconds)
        if quanta:
            self._held_back = False
            return min(self.prefill_tokens, quanta * CHUNK_SIZE)
        self._held_back = not self._held_back
        self.out_of_reach += not self._held_back
        return 0 if self._held_back else CHUNK_SIZE

    def _quanta(self, seconds: float) -> int:
        """How many fit beside decoding; one as long as nothing is known."""
        costs = self.costs(self.prefill_tokens // CHUNK_SIZE)
        if not costs:
            return 1
        left = seconds - self.decode_seconds
        return max((count for count, cost in enumerate(costs, 1) if cost <= left), default=0)

    @property
    def decode_seconds(self) -> float:
        """What decoding is expected to take of the next round."""
        ordered = sorted(self._decode)
        return ordered[int(_DECODE_RANK * (len(ordered) - 1))] if ordered else 0.0

    def costs(self, most: int) -> list[float]:
        """Seconds of reading 1 … ``most`` quanta; empty until something is known."""
        return [ratio * _guess(count) for count, ratio in enumerate(self._ratio.along(1, most), 1)]

    def observe(self, decoding: bool, tokens: int, seconds: float, prefill_seconds: float) -> None:
        """A finished round of ``seconds``, of which reading ``tokens`` prompt tokens took ``prefill_seconds``."""
        if self.seconds is None:
            return
        self._rounds += 1
        self._ratio.forget(self._rounds - _MEMORY_ROUNDS)
        if decoding:
            self._decode.append(max(0.0, seconds - prefill_seconds))
        if tokens and prefill_seconds > 0.0:
            quanta = -(-tokens // CHUNK_SIZE)
            self._ratio.measure(quanta, prefill_seconds / _guess(quanta), self._rounds)


class Joining:
    """In which round a forward over prompts is committed that runs beside rounds: the lanes that decode wait for it in that
    round if it takes longer, the prompts wait for the end of a round if it is over earlier.

    Each makes the other slower. Where many prompts would so wait for few lanes, these wait instead: the round in which it
    begins has it.
    """

    def __init__(self) -> None:
        self._rounds: deque[float] = deque(maxlen=_RECENT_ROUNDS)
        self._waited_for, self._beside = Points(), Points()
        """Seconds of reading in proportion to the guess, by quanta, where lanes waited and where they decoded on."""
        self._count = 0

    def now(self, tokens: int, elapsed: float, decoding: int, prompts: int) -> bool:
        """Whether the round that begins commits ``prompts`` prompts, of which ``tokens`` tokens are being read for
        ``elapsed`` seconds, beside ``decoding`` lanes: if fewer seconds of lanes are lost than if the next one does. Nothing
        is left to run on before it is known how long rounds and reading take."""
        if not decoding or not self._rounds or not (self._waited_for.known or self._beside.known):
            return True
        round = sorted(self._rounds)[len(self._rounds) // 2]
        waited_for, beside = self._reading(-(-tokens // CHUNK_SIZE))
        if not elapsed:
            lost_by_waiting = prompts * waited_for + decoding * max(0.0, waited_for - round)
            lost_beside = prompts * (beside + round / 2) + decoding * beside * _DECODING_BESIDE
            if lost_by_waiting <= lost_beside:
                return True
        left = max(0.0, beside - elapsed - round)
        return decoding * left <= prompts * (round - left)

    def _reading(self, quanta: int) -> tuple[float, float]:
        """Seconds that reading is expected to take where lanes wait, and where they decode on."""
        waited_for, beside = (
            points.along(quanta, quanta)[0] * _guess(quanta) if points.known else None
            for points in (self._waited_for, self._beside)
        )
        if beside is None:
            assert waited_for is not None
            return waited_for, waited_for * _READING_BESIDE
        return beside / _READING_BESIDE if waited_for is None else waited_for, beside

    def observe_round(self, seconds: float) -> None:
        """A finished round that decoded and committed no prompts."""
        self._rounds.append(seconds)

    def observe_reading(self, tokens: int, seconds: float, decoding: int, *, beside: bool) -> None:
        """``beside``: it was committed by a later round than that in which it began. How long it takes where nobody decodes
        says nothing about either: even lanes that wait decode in the round that they wait in."""
        if not decoding:
            return
        self._count += 1
        points, quanta = self._beside if beside else self._waited_for, -(-tokens // CHUNK_SIZE)
        points.forget(self._count - _MEMORY_ROUNDS)
        points.measure(quanta, seconds / _guess(quanta), self._count)


def _guess(quanta: int) -> int:
    return _FIXED_ROWS + quanta * CHUNK_SIZE


def deal(unread: Sequence[int], budget: int) -> tuple[list[int], int]:
    """How many tokens to read of each of some prompts, of which so many are unread, and who is the first to go short (an
    index; 0 if nobody does).

    Each in turn gets a quantum, until the budget is spent. A prompt is cut only on the grid of the chunked scan, so that the
    cut cannot be seen in the result.
    """
    dealt = [0] * len(unread)
    while any(done < size for done, size in zip(dealt, unread, strict=True)):
        for index, size in enumerate(unread):
            step = min(CHUNK_SIZE, size - dealt[index])
            if step > budget:
                return dealt, index
            dealt[index] += step
            budget -= step
    return dealt, 0
