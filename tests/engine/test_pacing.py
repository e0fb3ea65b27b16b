"""The pacer against machines whose rounds take as long as we say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import CHUNK_SIZE
from paceline.engine.pacing import IDLE_FACTOR, Joining, Pacer, deal

Machine = Callable[[int], float]


def run(pacer: Pacer, rounds: int, decode: float, machine: Machine) -> list[tuple[int, float]]:
    """Tokens read and seconds of each round, while lanes decode and a prompt waits."""
    log = []
    for _ in range(rounds):
        tokens = pacer.budget(True)
        reading = machine(tokens) if tokens else 0.0
        pacer.observe(True, tokens, decode + reading, reading)
        log.append((tokens, decode + reading))
    return log


def linear(fixed_ms: float, ms_per_quantum: float) -> Machine:
    return lambda tokens: (fixed_ms + ms_per_quantum * tokens / CHUNK_SIZE) / 1000.0


@pytest.mark.parametrize(
    ("machine", "tokens"),
    [(linear(0, 10), 256), (linear(20, 5), 256), (linear(15, 0.5), 512), (linear(0, 30), 64)],
    ids=["by tokens", "partly fixed", "mostly fixed", "dear"],
)
def test_rounds_stay_within_the_bound_and_use_it(machine: Machine, tokens: int) -> None:
    """60 ms, of which decoding takes 10."""
    pacer = Pacer(512, 60.0)
    log = run(pacer, 60, 0.010, machine)
    assert sum(seconds > 0.060 for _, seconds in log) <= 4, "what was not known yet"
    assert all(seconds <= 0.060 for _, seconds in log[-40:])
    assert log[-1][0] == tokens
    assert pacer.out_of_reach == 0


def test_what_an_idle_engine_read_is_known_when_lanes_decode() -> None:
    pacer, machine = Pacer(512, 60.0), linear(0, 10)
    for _ in range(3):
        tokens = pacer.budget(False)
        assert tokens == IDLE_FACTOR * 512
        pacer.observe(False, tokens, machine(tokens), machine(tokens))
    assert all(seconds <= 0.0601 for _, seconds in run(pacer, 30, 0.010, machine))


def test_out_of_reach_every_other_round_reads() -> None:
    pacer = Pacer(512, 60.0)
    log = run(pacer, 40, 0.050, linear(0, 20))
    assert [tokens for tokens, _ in log[-6:]] == [0, 64, 0, 64, 0, 64]
    assert pacer.out_of_reach >= 15


def test_a_stall_is_forgotten_and_a_lasting_change_is_not() -> None:
    pacer, machine = Pacer(512, 60.0), linear(0, 10)
    run(pacer, 40, 0.010, machine)
    pacer.observe(True, 256, 3.0, 1.5)
    assert pacer.budget(True) == 256
    run(pacer, 40, 0.030, machine)
    assert pacer.budget(True) == 128


def test_without_a_bound_the_budget_is_the_option() -> None:
    pacer = Pacer(500)
    run(pacer, 5, 9.0, linear(0, 1000))
    assert (pacer.budget(True), pacer.budget(False), pacer.out_of_reach) == (500, 2000, 0)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=8), st.integers(0, 3000))
def test_dealing_is_fair_on_the_grid_and_within_the_budget(unread: list[int], budget: int) -> None:
    dealt, short = deal(unread, budget)
    assert sum(dealt) <= budget
    for done, size in zip(dealt, unread, strict=True):
        assert done == size or (done < size and done % CHUNK_SIZE == 0)
    waiting = [done for done, size in zip(dealt, unread, strict=True) if done < size]
    assert not waiting or max(waiting) - min(waiting) <= CHUNK_SIZE
    if waiting:
        left = min(CHUNK_SIZE, unread[short] - dealt[short])
        assert 0 < left > budget - sum(dealt), "who goes short is the first in whose turn the budget was spent"
    else:
        assert short == 0


def test_few_lanes_wait_for_many_prompts() -> None:
    joining = Joining()
    for _ in range(2):
        joining.observe_round(0.009)
        joining.observe_reading(107, 0.028, 3, beside=False)
        joining.observe_reading(535, 0.062, 3, beside=False)
    assert [joining.now(107, 0.0, lanes, 1) for lanes in (1, 2, 5)] == [True, False, False]
    assert [joining.now(535, 0.0, lanes, 5) for lanes in (1, 3, 6)] == [True, True, False]
    for _ in range(2):  # on this device it is not slower beside them
        joining.observe_reading(107, 0.028, 3, beside=True)
        joining.observe_reading(535, 0.062, 3, beside=True)
    assert not joining.now(107, 0.0, 1, 1) and not joining.now(535, 0.0, 3, 5)


def test_what_an_idle_engine_reads_says_nothing_about_who_should_wait() -> None:
    joining = Joining()
    joining.observe_round(0.010)
    for _ in range(2):
        joining.observe_reading(107, 0.020, 0, beside=False)
    assert joining.now(107, 0.0, 5, 1), "nothing is known yet"
    for _ in range(2):
        joining.observe_reading(107, 0.028, 5, beside=False)
        joining.observe_reading(107, 0.030, 5, beside=True)
        joining.observe_reading(107, 0.020, 0, beside=False)
    assert not joining.now(107, 0.0, 5, 1), "with the idle engine's time they would wait"


def test_where_lanes_do_not_wait_more_is_read() -> None:
    assert [Pacer(64, beside=beside).budget(decoding=True) for beside in (False, True)] == [64, 128]
    assert Pacer(64, beside=True).budget(decoding=False) == IDLE_FACTOR * 64


def test_prompts_join_a_round_when_that_loses_least() -> None:
    joining = Joining()
    assert joining.now(107, 0.0, 3, 1), "nothing is known yet"
    for _ in range(2):
        joining.observe_round(0.010)
        joining.observe_reading(107, 0.045, 3, beside=True)
    assert joining.now(107, 0.0, 0, 1), "nobody decodes"
    elapsed = [0.010 * round for round in range(6)]
    # it is over in the middle of the fifth round: alone among many it comes in that round's end or later
    assert [joining.now(107, seconds, 5, 1) for seconds in elapsed] == [False, False, False, False, True, True]
    # as many prompts as lanes, being read already, do not wait for a round more
    assert [joining.now(107, seconds, 2, 10) for seconds in elapsed[1:]] == [False, False, True, True, True]
    assert not joining.now(2000, 0.100, 5, 1), "so many tokens were never read, but take longer"
