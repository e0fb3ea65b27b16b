"""The decode half as CUDA graphs: the two forwards of a round, captured once per bucket and run by one launch each.

Captured and not, it is the same functions on the same kernels. A verify graph is for so many rows and spans, a draft graph
for so many lanes, and so is the graph that makes the context for it; a prefill graph is for short prompts. What is missing
is padding, which is of a lane and a page of nobody. Graphs of verify and draft forwards share their memory, where each may
overwrite what another has left: what is read later is copied, or in the pool. Those of prompts may run beside them and have
memory of their own, and one place for what each of them leaves: a round has one such forward, and the next round's does not
begin before this round has been committed (``beside.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.config import CHUNK_SIZE
from paceline.engine.decode import (
    Behind,
    DecodeInputs,
    DecodeShape,
    pack_decode,
    unpack_decode,
    verify_forward,
)
from paceline.engine.drafting import ContextInputs, DFlashDrafter, Drafter, DraftInputs
from paceline.engine.memory import nothing_collected
from paceline.engine.plan import PrefillSpan, VerifySpan
from paceline.engine.prompts import (
    PromptInputs,
    PromptShape,
    pack_prompts,
    prefill_forward,
    unpack_prompts,
)
from paceline.models.qwen35 import Hidden, Qwen35
from paceline.sampling import Kind
from paceline.state.pool import StatePool
from paceline.transfer import to_device
from paceline.views import ContextView, GdnRoom

log = logging.getLogger("paceline.engine")

_ROW_STEP = 8
_FINE_ROWS = 64
_COARSE_STEP = 32
_FINE_LANES = 8
_TIMED_RUNS = 3
_GRAPH_PROMPT_ROWS = (*range(128, 768, 32), *range(768, 1025, 64))
_GRAPH_PROMPTS, _FEWEST_PROMPT_ROWS = 8, 32
"""A graph is for at most so many prompts, and on average each has at least so many rows."""


class Graphs:
    """``block_size`` is the drafter's, 1 without one. Capturing logs its progress."""

    def __init__(self, target: Qwen35, drafter: Drafter | None, pool: StatePool) -> None:
        self._target, self._drafter, self._pool = target, drafter, pool
        block = drafter.block_size if drafter else 1
        before = torch.cuda.mem_get_info(pool.device)[0]
        self._span_buckets = span_buckets(pool.shape.lanes)
        shapes = decode_shapes(pool.shape.lanes, block)
        self._draft_buckets = draft_buckets(pool.shape.lanes) if isinstance(drafter, DFlashDrafter) else ()
        # lanes that decode wait for each of their kernels, a prompt only for its last: they go first where both are ready
        self._decoding = _Capture(torch.cuda.graph_pool_handle(), torch.cuda.Stream(pool.device, priority=-1))
        self._reading = _Capture(torch.cuda.graph_pool_handle(), torch.cuda.Stream(pool.device))
        vocab = target.config.vocab_size
        self._logits = torch.empty(max(shape.rows for shape in shapes), vocab, device=pool.device)
        self._verify: dict[int, list[CapturedVerify]] = {}
        self._context: dict[int, CapturedContext] = {}
        self._draft: dict[int, CapturedDraft] = {}
        prompts = prompt_shapes(pool.shape.lanes)
        self._left = _Left.of(pool, prompts)
        self._prefill: list[CapturedPrefill] = []
        started, total = time.perf_counter(), len(shapes) + len(self._draft_buckets) + len(prompts)
        for done, shape in enumerate(reversed(shapes), 1):  # the largest first: the others fit into its memory
            self._verify.setdefault(shape.spans - 1, []).insert(0, self._capture_verify(shape))
            _progress(done, total, started)
        for done, lanes in enumerate(reversed(self._draft_buckets), len(shapes) + 1):
            assert isinstance(drafter, DFlashDrafter)
            self._context[lanes] = self._capture_context(drafter, lanes)
            self._draft[lanes] = self._capture_draft(drafter, lanes)
            _progress(done, total, started)
        for done, prompt in enumerate(reversed(prompts), total - len(prompts) + 1):
            self._prefill.insert(0, self._capture_prefill(prompt))
            _progress(done, total, started)
        torch.cuda.synchronize(pool.device)
        log.info("captured forwards have taken %.0f MiB", (before - torch.cuda.mem_get_info(pool.device)[0]) / 2**20)

    def verify(self, spans: Sequence[VerifySpan], behind: Sequence[Behind] | None = None) -> CapturedVerify | None:
        """The smallest graph that has room for these spans, fed with them; None if there is none. ``behind`` as in
        ``pack_decode``."""
        bucket = _smallest(self._span_buckets, len(spans))
        rows = sum(span.length for span in spans)
        captured = next((c for c in self._verify.get(bucket or 0, ()) if rows <= c.shape.rows), None)
        return captured.fed(spans, self._drafter.block_size if self._drafter else 1, behind) if captured else None

    def verify_behind(self, spans: Sequence[VerifySpan], behind: Sequence[Behind], ends: Tensor) -> CapturedVerify | None:
        """The same for the round behind the one that these spans begin in, each with its drafts then, and which ends in
        ``ends`` [G, 2]."""
        captured = self.verify(spans, behind)
        if captured is not None:
            captured.inputs.advance(ends)
        return captured

    def prefill(self, spans: Sequence[PrefillSpan]) -> CapturedPrefill | None:
        """The smallest graph that has room for these chunks, fed with them; None if there is none."""
        rows = sum(span.length for span in spans)
        fitting = (c for c in self._prefill if rows <= c.shape.rows and len(spans) < c.shape.spans)
        captured = next(fitting, None)
        return captured.fed(spans) if captured else None

    def catch_up(self, spans: Sequence[VerifySpan]) -> bool:
        """Make context of all that the lanes of these spans have committed; False if there is no graph for so many."""
        captured = self._context.get(self._draft_bucket(spans))
        if captured is not None and any(self._pool.backlog(span.lane) for span in spans):
            captured.run(spans)
        return captured is not None

    def draft(self, spans: Sequence[VerifySpan]) -> Tensor | None:
        """Drafts [>= D, B - 1] for the drafting spans, once they have caught up; None if there is no graph for so many."""
        return self._draft[self._draft_bucket(spans)].run(spans) if self.catch_up(spans) else None

    def draft_behind(self, spans: Sequence[VerifySpan], places: Sequence[int], ends: Tensor) -> Tensor | None:
        """The same for the round behind the one of these drafting spans, which go on from these ``places`` of its ``ends``
        [G, 2]."""
        bucket = self._draft_bucket(spans)
        if bucket not in self._draft:
            return None
        self._context[bucket].run(spans, places, ends)
        return self._draft[bucket].run(spans, places, ends)

    def _draft_bucket(self, spans: Sequence[VerifySpan]) -> int:
        """0 if there is none for so many."""
        return _smallest(self._draft_buckets, len(spans)) or 0

    def costs(self) -> tuple[dict[int, float], dict[tuple[int, int], float]]:
        """Seconds of a draft forward and its context by lanes, and of a verify forward by (spans, rows), as measured after
        capture."""
        draft = {lanes: captured.seconds + self._context[lanes].seconds for lanes, captured in self._draft.items()}
        return draft, {(spans, c.shape.rows): c.seconds for spans, row in self._verify.items() for c in row}

    def _capture_verify(self, shape: DecodeShape) -> CapturedVerify:
        pool, widest = self._pool, self._drafter.block_size if self._drafter else 1
        packed = to_device(pack_decode((), widest, shape, pool.spare_lane), pool.device)
        longest = pool.shape.max_ctx - widest
        batch, *others = unpack_decode(packed, shape, [widest] * shape.spans, [longest] * shape.spans)
        inputs = DecodeInputs(pool.half(batch), *others)
        tokens = torch.zeros(shape.rows, dtype=torch.long, device=pool.device)
        logits = self._logits[: shape.rows]

        def forward() -> None:
            logits.copy_(verify_forward(self._target, self._drafter, tokens, inputs.half.afresh()))

        graph = self._captured(forward, self._decoding)
        return CapturedVerify(shape, graph, _seconds(graph), packed, inputs, tokens, logits, pool.spare_lane)

    def _capture_context(self, drafter: DFlashDrafter, lanes: int) -> CapturedContext:
        pool = self._pool
        packed = torch.zeros(drafter.context_size(lanes), dtype=torch.long, device=pool.device)
        inputs = drafter.unpack_context(packed, [pool.shape.max_ctx - 1] * lanes)
        inputs.batch.lanes.fill_(pool.spare_lane)

        def forward() -> None:
            drafter.make_context(inputs.batch.without_plans(), inputs.counts, pool)

        graph = self._captured(forward, self._decoding)
        return CapturedContext(drafter, lanes, graph, _seconds(graph), packed, inputs, pool)

    def _capture_draft(self, drafter: DFlashDrafter, lanes: int) -> CapturedDraft:
        pool, rows = self._pool, lanes * (drafter.block_size - 1)
        packed = torch.zeros(drafter.packed_size(lanes), dtype=torch.long, device=pool.device)
        longest = pool.shape.max_ctx - 1
        kind: Kind = "unfiltered"  # the drafter's draws do not depend on it
        inputs = drafter.unpack(packed, [longest] * lanes, (kind,) * rows, (0,) * rows)
        inputs.batch.lanes.fill_(pool.spare_lane)
        drafts = torch.zeros(lanes, drafter.block_size - 1, dtype=torch.long, device=pool.device)
        views = pool.draft_views()

        def forward() -> None:
            drafts.copy_(drafter.forward(replace(inputs, batch=inputs.batch.without_plans()), views))

        graph = self._captured(forward, self._decoding)
        return CapturedDraft(drafter, lanes, graph, _seconds(graph), packed, inputs, drafts, pool.spare_lane)

    def _capture_prefill(self, shape: PromptShape) -> CapturedPrefill:
        pool = self._pool
        packed = to_device(pack_prompts((), shape, pool.spare_lane), pool.device)
        longest = pool.shape.max_ctx - shape.rows
        batch, tokens = unpack_prompts(packed, shape, [shape.rows] * shape.spans, [max(0, longest)] * shape.spans)
        chunks = batch.plans
        inputs = PromptInputs(pool.half(batch, self._left.room), tokens)
        hidden = Hidden(*self._left.hidden[:, : shape.rows])

        def forward() -> None:
            afresh = replace(inputs.half, batch=replace(batch, plans=dict(chunks)))
            left = prefill_forward(self._target, self._drafter, replace(inputs, half=afresh))
            self._left.take(left, inputs.half.context)

        graph = self._captured(forward, self._reading)
        return CapturedPrefill(shape, graph, packed, inputs, hidden, pool.spare_lane)

    def _captured(self, forward: Callable[[], None], capture: _Capture) -> torch.cuda.CUDAGraph:
        """The first call compiles what has to be compiled."""
        forward()
        torch.cuda.synchronize(self._pool.device)
        graph = torch.cuda.CUDAGraph()
        # what other threads do on their streams is no part of it: another engine may be running
        with nothing_collected(), torch.cuda.graph(graph, *capture, capture_error_mode="thread_local"):
            forward()
        return graph


class _Capture(NamedTuple):
    """Where graphs of a kind take their memory, and the stream whose priority their kernels have."""

    memory: Any
    stream: torch.cuda.Stream


@dataclass(frozen=True, slots=True)
class _Left:
    """The one place for what prefill graphs leave, of which each has the first rows and spans: ``room`` for states, the
    residual stream ``hidden`` [2, N, H] and the drafter's ``context`` K/V [2, layers, N, Hkv, D]."""

    room: GdnRoom
    hidden: Tensor
    context: Tensor

    @classmethod
    def of(cls, pool: StatePool, shapes: Sequence[PromptShape]) -> _Left:
        rows, drafter = max(shape.rows for shape in shapes), pool.shape.drafter
        hidden = torch.zeros(2, rows, pool.shape.target.hidden_size, device=pool.device)
        sizes = (drafter.num_layers, rows, drafter.num_kv_heads, drafter.head_dim) if drafter else (0, rows, 0, 0)
        room = pool.prompt_room(max(shape.spans for shape in shapes))
        return cls(room, hidden, torch.zeros(2, *sizes, device=pool.device))

    def take(self, hidden: Hidden, context: Sequence[ContextView]) -> None:
        """Copy what a forward has left where it is, and let the views show the copies. States are here already."""
        assert hidden.delta is not None, "a target without layers"
        for place, part in zip(self.hidden, (hidden.x, hidden.delta), strict=True):
            place[: len(part)] = part
        for view, *places in zip(context, *self.context, strict=True):
            assert view.k is not None and view.v is not None, "the forward left no drafter context"
            k, v = (place[: len(part)].copy_(part) for place, part in zip(places, (view.k, view.v), strict=True))
            view.stage(k, v)


@dataclass(frozen=True, slots=True)
class CapturedVerify:
    """A verify forward; ``packed``, ``tokens`` and ``logits`` are where it reads and writes."""

    shape: DecodeShape
    graph: torch.cuda.CUDAGraph
    seconds: float
    packed: Tensor
    inputs: DecodeInputs
    static_tokens: Tensor
    logits: Tensor
    spare_lane: int

    def fed(self, spans: Sequence[VerifySpan], block: int, behind: Sequence[Behind] | None) -> CapturedVerify:
        """The same graph with other spans."""
        packed = pack_decode(spans, block, self.shape, self.spare_lane, behind=behind)
        to_device(packed, self.packed.device, self.packed)
        return replace(self, inputs=replace(self.inputs, half=self.inputs.half.afresh()))

    def settled(self, spans: Sequence[VerifySpan], block: int, counts: Sequence[int]) -> DecodeInputs:
        """The inputs, once it is known what they advanced to: ``counts`` as in ``pack_decode``."""
        to_device(pack_decode(spans, block, self.shape, self.spare_lane, counts), self.packed.device, self.packed)
        return replace(self.inputs, half=self.inputs.half.afresh())

    def run(self, drafts: Tensor | None) -> tuple[Tensor, Tensor]:
        """(tokens [N], logits [N, V]) with padding at the end."""
        self.inputs.tokens(drafts, out=self.static_tokens)
        self.graph.replay()
        return self.static_tokens, self.logits


@dataclass(frozen=True, slots=True)
class CapturedPrefill:
    """A prefill forward; ``packed`` is where it reads; where it writes, ``hidden`` and the views of ``inputs``, others write
    too."""

    shape: PromptShape
    graph: torch.cuda.CUDAGraph
    packed: Tensor
    inputs: PromptInputs
    hidden: Hidden
    spare_lane: int

    def fed(self, spans: Sequence[PrefillSpan]) -> CapturedPrefill:
        """The same graph with other chunks."""
        to_device(pack_prompts(spans, self.shape, self.spare_lane), self.packed.device, self.packed)
        return replace(self, inputs=replace(self.inputs, half=self.inputs.half.afresh()))

    def run(self) -> Hidden:
        """The residual stream of the rows, with padding at the end."""
        self.graph.replay()
        return self.hidden


@dataclass(frozen=True, slots=True)
class CapturedContext:
    """What makes the context for a draft forward; ``packed``, of which ``inputs`` are views, is where it reads. It writes to
    the pool."""

    drafter: DFlashDrafter
    lanes: int
    graph: torch.cuda.CUDAGraph
    seconds: float
    packed: Tensor
    inputs: ContextInputs
    pool: StatePool

    def run(self, spans: Sequence[VerifySpan], places: Sequence[int] = (), ends: Tensor | None = None) -> None:
        """``places`` and ``ends`` as in ``CapturedDraft.run``."""
        to_device(self.drafter.pack_context(spans, self.lanes, self.pool, places), self.packed.device, self.packed)
        if ends is not None:
            self.inputs.advance(ends)
        self.graph.replay()


@dataclass(frozen=True, slots=True)
class CapturedDraft:
    """A draft forward; ``packed``, of which ``inputs`` are views, and ``drafts`` are where it reads and writes."""

    drafter: DFlashDrafter
    lanes: int
    graph: torch.cuda.CUDAGraph
    seconds: float
    packed: Tensor
    inputs: DraftInputs
    drafts: Tensor
    spare_lane: int

    def run(self, spans: Sequence[VerifySpan], places: Sequence[int] = (), ends: Tensor | None = None) -> Tensor:
        """``places`` and ``ends``: where the spans go on from, for drafts of the next round."""
        packed, _, _ = self.drafter.pack(spans, self.lanes, self.spare_lane, places)
        to_device(packed, self.packed.device, self.packed)
        if ends is not None:
            self.inputs.advance(ends)
        self.graph.replay()
        return self.drafts


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of a run."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(_TIMED_RUNS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000.0 / _TIMED_RUNS


def span_buckets(lanes: int) -> tuple[int, ...]:
    """Numbers of spans that get graphs: powers of two, and all lanes."""
    powers = [2**power for power in range(lanes.bit_length()) if 2**power < lanes]
    return (*powers, lanes)


def draft_buckets(lanes: int) -> tuple[int, ...]:
    """Numbers of lanes that get draft graphs. A lane of padding costs a whole block of rows, so there are more of them."""
    few = range(1, min(lanes, _FINE_LANES) + 1)
    return (*few, *(count for count in span_buckets(lanes) if count > _FINE_LANES))


def decode_shapes(lanes: int, block: int) -> list[DecodeShape]:
    """The buckets of rows: per number of spans one row each, then steps up to a full block each. One more is padding."""
    shapes, below = [], 0
    for spans in span_buckets(lanes):
        most = spans * block
        steps = [spans, *range(_ROW_STEP, min(most, _FINE_ROWS) + 1, _ROW_STEP)]
        steps += [*range(_FINE_ROWS + _COARSE_STEP, most, _COARSE_STEP), most]
        rows = sorted({rows for rows in steps if spans <= rows <= most and rows > below})
        shapes += [DecodeShape(count, spans + 1, padded=True) for count in rows]
        below = spans
    return shapes


def prompt_shapes(lanes: int) -> list[PromptShape]:
    """Prefill forwards that get graphs. Longer ones take the device longer than the host needs to launch them, and more
    prompts more room for their states. One span more is padding."""
    spans = [(rows, min(lanes, _GRAPH_PROMPTS, rows // _FEWEST_PROMPT_ROWS)) for rows in _GRAPH_PROMPT_ROWS]
    return [PromptShape(rows, count + 1, rows // CHUNK_SIZE + count, padded=True) for rows, count in spans]


def _smallest(buckets: Sequence[int], count: int) -> int | None:
    return next((bucket for bucket in buckets if count <= bucket), None)


def _progress(done: int, total: int, started: float) -> None:
    if done % 8 == 0 or done in (1, total):
        log.info("captured %d of %d decode graphs in %.1f s", done, total, time.perf_counter() - started)
