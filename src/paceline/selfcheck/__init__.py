"""Row-invariance, checked on the machine that serves: an item gets the same bits alone and in any company.

Everything that Paceline promises about tokens rests on this property of the ops (``paceline.ops`` says how they keep it),
and whether it holds depends on the processor and on the libraries at hand. The tests and ``paceline selfcheck`` run the same
table of cases. On a GPU it is the kernels that are checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.selfcheck.case import CPU, Case, violation
from paceline.selfcheck.lanes import lane_cases
from paceline.selfcheck.rows import row_cases

__all__ = ["Case", "Outcome", "all_cases", "run_all", "thread_counts", "violation"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case; ``violation`` says where the property broke, None where it held."""

    name: str
    seconds: float
    violation: str | None


def all_cases(device: torch.device = CPU) -> list[Case]:
    """At least one case per op, in the order in which they are run. Makes a few MiB of random inputs on ``device``."""
    return [*row_cases(device), *lane_cases(device)]


def thread_counts(device: torch.device = CPU) -> tuple[int, ...]:
    """1 to 4 threads, and what torch uses now; a GPU's arithmetic knows nothing of threads."""
    if device.type != "cpu":
        return (1,)
    return tuple(sorted({1, 2, 3, 4, torch.get_num_threads()}))


def run_all(
    report: Callable[[Outcome], None], threads: Sequence[int] | None = None, cases: Sequence[Case] | None = None
) -> list[Outcome]:
    """Run every case under each of ``threads`` (``thread_counts()`` if not given) and return those that failed.

    ``report`` is called after each case. Takes about half a minute, on a GPU up to a minute because kernels are compiled.
    torch's number of threads is restored at the end.
    """
    failures = []
    for case in all_cases() if cases is None else cases:
        started = time.perf_counter()
        found = violation(case, threads or thread_counts(case.device))
        outcome = Outcome(case.name, time.perf_counter() - started, found)
        report(outcome)
        if found is not None:
            failures.append(outcome)
    return failures
