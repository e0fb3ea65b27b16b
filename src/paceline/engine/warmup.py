"""Rounds that nobody asked for, before the first that somebody does.

Kernels are compiled when they are first launched, other ones for multiples of 16 than for numbers that are not; the first
requests would wait for that for seconds.
"""

from __future__ import annotations

import logging
import time

from paceline.engine.plan import Following, PrefillSpan, Round, VerifySpan
from paceline.engine.runner import Runner
from paceline.types import Request

log = logging.getLogger("paceline.engine")

_PROMPTS = ((1025,), (600, 400, 77), (1040, 64), (20,), (33,))
"""Of each round. Some are longer together than any captured forward, odd and even."""
_SAMPLING = ((1.0, 0, 1.0), (0.7, 20, 0.9), (0.7, 0, 0.9), (0.0, 0, 1.0), (0.7, 200, 1.0))
"""temperature, top_k and top_p: every kind of draw. The first prompt of each round has the next one, and so have those
behind it. Noise without filters, and no noise, are of a round of their own."""


def warm_up(runner: Runner) -> None:
    """Read prompts, verify drafts, decode without, verify what is known, and forget it all. Rounds that do not fit the pool
    are left out."""
    started = time.perf_counter()
    block = runner.drafter.block_size if runner.drafter else 1
    answer = 3 * block  # room for the rows of the three rounds behind a prompt, whatever they keep
    lanes, longest = runner.pool.shape.lanes, runner.pool.shape.max_ctx - answer
    for first, lengths in enumerate(_PROMPTS):
        _rounds(runner, [min(length, longest) for length in lengths[:lanes]], first, block - 1, answer)
    runner.forget()
    log.info("warmed up in %.1f s", time.perf_counter() - started)


def _rounds(runner: Runner, lengths: list[int], first: int, most: int, answer: int) -> None:
    pool = runner.pool
    requests, lanes = [], []
    try:
        for number, length in enumerate(lengths):
            lane = pool.admit(length + answer) if length > 0 else None
            if lane is None:
                break
            lanes.append(lane)
            temperature, top_k, top_p = _SAMPLING[(first + number) % len(_SAMPLING)]
            prompt = (0,) * length
            requests.append(Request(f"warm-up {number}", prompt, temperature, top_p, top_k, 0.0, number, answer, logprobs=1))
        if not lanes:
            return
        pairs = list(zip(requests, lanes, strict=True))
        prompts = tuple(PrefillSpan(request, lane, 0, request.prompt, final=True) for request, lane in pairs)
        anchors = runner.run(Round((), prompts)).prefill
        for drafts, known in ((most, None), (0, None), (most, (0,) * most)):
            spans = tuple(
                VerifySpan(request, lane, pool.committed(lane), anchor or 0, drafts, known=known)
                for (request, lane), anchor in zip(pairs, anchors, strict=True)
            )
            runner.run(Round(spans, (), following=tuple(Following(place, drafts) for place in range(len(spans)))))
    finally:
        for lane in lanes:
            pool.release(lane)
