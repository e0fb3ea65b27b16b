"""The property of every kernel: the table of cases on a GPU."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.arithmetic import configure
from paceline.selfcheck import Outcome, all_cases, run_all, thread_counts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda")


def test_rows_do_not_depend_on_their_batch() -> None:
    configure(DEVICE)
    cases = all_cases(DEVICE)
    assert all(case.device.type == "cuda" for case in cases) and thread_counts(DEVICE) == (1,)
    seen: list[Outcome] = []
    failed = run_all(seen.append, cases=cases)
    slowest = sorted(seen, key=lambda outcome: outcome.seconds, reverse=True)[:8]
    print(f"{sum(outcome.seconds for outcome in seen):.1f} s; " + ", ".join(f"{o.name} {o.seconds:.1f} s" for o in slowest))
    assert len(seen) == len(cases)
    assert not failed, "\n".join(f"{outcome.name}: {outcome.violation}" for outcome in failed)
