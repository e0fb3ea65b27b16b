"""What is compiled after the engine has warmed up, as a program of its own: ``specializations.py LENGTHS...``, each the
lengths of the prompts of a round, such as 107,107. Prints the names of kernels that a round needs in another form, or draws
of several kinds, as JSON. Kernels are chosen as for a GPU, and not run: what they would write is zero. Forwards count as
captured, and are not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from absent_gpu import pretend
from triton.runtime.jit import JITFunction

from paceline import sampling
from paceline.config import EngineOptions
from paceline.engine import graphs, runner
from paceline.engine.build import build
from paceline.engine.graphs import Graphs
from paceline.engine.plan import Following, PrefillSpan, Round, VerifySpan
from paceline.engine.runner import Runner
from paceline.engine.warmup import warm_up
from paceline.ops import attention, dispatch
from paceline.ops.accept import accept, ref
from paceline.ops.linear import kernel as products
from paceline.types import Request

KINDS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.1),
    (0.7, 0, 0.9, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.5, 40, 0.5, 0.1),
    (0.7, 1000, 1.0, 0.0),
    (0.7, 1000, 0.9, 0.0),
)
"""temperature, top_k, top_p and min_p."""


def note_forms(new: list[str]) -> None:
    """Launches only note the names of kernels in forms that no launch before had."""
    seen: set[tuple[str, str]] = set()

    def noted(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        bind = self.device_caches[0][-1]
        form = (self.fn.__name__, str(bind(*arguments, **options, debug=False)[1:]))
        if form not in seen:
            seen.add(form)
            new.append(self.fn.__name__)

    JITFunction.run = noted


def zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*arguments: Any, **keywords: Any) -> torch.Tensor:
        tensor = make(*arguments, **keywords)
        return tensor.zero_() if tensor.device.type == "cpu" else tensor

    return made


def not_captured(self: Graphs, forward: Callable[[], None], capture: Any) -> Any:
    forward()
    return SimpleNamespace(replay=forward)


def as_on_a_gpu() -> None:
    """All that torch itself does otherwise there, or cannot do here."""
    torch.empty, torch.empty_like = zeroed(torch.empty), zeroed(torch.empty_like)
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "mem_get_info", lambda device: (0, 0)),
        (torch.cuda, "synchronize", lambda device: None),
        (torch.cuda, "graph_pool_handle", lambda: None),
        (torch.cuda, "Stream", lambda device, priority=0: None),
        (Graphs, "_captured", not_captured),
        (graphs, "_seconds", lambda graph: 1.0),
        (products, "_multiply_panel", lambda *panel: None),
        (attention, "row_norms", lambda weight: torch.ones(weight.shape[0])),  # of zeros there would be no bound
        (products, "_heights", lambda *shape: products._PANELS),
        (sampling, "_pick_by_kind", sampling._pick_together),
        (runner, "accept", lambda *given: (accept(*given), ref.accept(*given))[1]),  # the host goes on with what it says
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)


def decode(runner: Runner, lengths: list[int]) -> None:
    """A round of prompts, and rounds behind it with drafts, without, and with tokens that are known."""
    pool, spans = runner.pool, []
    for number, length in enumerate(lengths):
        lane = pool.admit(length + 64)
        assert lane is not None, f"no room for {lengths}"
        request = Request(f"{number}", (0,) * length, 0.7 * (number % 2), 1.0, 0, 0.0, number, 64)
        spans.append(PrefillSpan(request, lane, 0, request.prompt, final=True))
    runner.run(Round((), tuple(spans)))
    for drafts in (7, 7, 3, 0, 0):
        verify = [VerifySpan(span.request, span.lane, runner.pool.committed(span.lane), 5, drafts) for span in spans]
        runner.run(Round(tuple(verify), (), following=tuple(Following(place, drafts) for place in range(len(verify)))))
    known = [replace(span, start=runner.pool.committed(span.lane), drafts=2, known=(1, 2)) for span in verify]
    runner.run(Round(tuple(known), ()))
    for span in spans:
        pool.release(span.lane)


def draw(vocab: int, rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    each = ([temperature] * rows, [top_k] * rows, [top_p] * rows, [min_p] * rows)
    numbers = ([*range(rows)], [0] * rows, [*range(rows)])
    sampling.pick(torch.zeros(rows, vocab), sampling.SamplingRows.from_lists(*each, *numbers))


def main(rounds: list[list[int]]) -> None:
    pretend(90)
    new: list[str] = []
    note_forms(new)
    as_on_a_gpu()
    with dispatch.force("kernel"):
        options = EngineOptions(device="cpu", max_concurrency=8, max_ctx=1024, cache_type_k="q8_0", cache_type_v="q8_0")
        parts = build(options)
        target, drafter, pool = parts.runner.target, parts.runner.drafter, parts.runner.pool
        of_rounds = Runner(target, drafter, pool, graphs=Graphs(target, drafter, pool), run_ahead=True)
        warm_up(of_rounds)
        assert new, "nothing was launched"
        found = {}
        for lengths in rounds:
            new.clear()
            decode(of_rounds, lengths)
            found[",".join(map(str, lengths))] = sorted(new)
        new.clear()
        for rows in (1, 2, 3, 5, 16, 48):
            for params in KINDS:
                draw(parts.info.vocab_size, rows, *params)
        found["draws"] = sorted(new)
    print(json.dumps(found))


if __name__ == "__main__":
    main([[*map(int, lengths.split(","))] for lengths in sys.argv[1:]])
