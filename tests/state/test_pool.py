"""The pool on tiny models whose forwards are made up: what is committed is compared with a plain list of rows per lane."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

import paceline.state.pool as pool_module
from paceline.batch import pack
from paceline.config import CHUNK_SIZE, PAGE_SIZE, DrafterConfig, TargetConfig
from paceline.ops.conv import conv_history
from paceline.ops.features import keep_features, kept_features
from paceline.ops.gdn import gdn_replay
from paceline.ops.kv import read_pages, slots, write_rows
from paceline.state.pool import Half, LaneFork, SpanRows, StatePool, Txn
from paceline.state.shapes import StateShape, kv_bytes_per_token, lane_bytes, pages_for, spare_bytes
from paceline.views import AttentionView, ContextView

BLOCK, WINDOW, MAX_CTX = 8, 60, 220
KV, GDN, HEADS, DK, DV, TAPS = 2, 2, 2, 4, 4, 4
HEAD_DIM = 32
CHANNELS = 2 * DK + HEADS * DV
HEAD_MAP = torch.zeros(HEADS, dtype=torch.long)

TARGET = TargetConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    layer_types=("gdn", "attention", "gdn", "attention"),
    num_heads=1,
    num_kv_heads=1,
    head_dim=HEAD_DIM,
    rotary_dim=8,
    rope_theta=1e4,
    rms_eps=1e-6,
    context_length=MAX_CTX,
    conv_kernel=TAPS,
    gdn_key_heads=1,
    gdn_value_heads=HEADS,
    gdn_key_dim=DK,
    gdn_value_dim=DV,
    head_layout="grouped",
    tie_embeddings=True,
)
DRAFTER = DrafterConfig(
    hidden_size=8,
    intermediate_size=8,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=HEAD_DIM,
    rope_theta=1e4,
    rms_eps=1e-6,
    context_length=MAX_CTX,
    block_size=BLOCK,
    target_layer_ids=(0,),
    mask_token_id=0,
    sliding_window=WINDOW,
    sliding=(True, False),
    causal=(False, False),
)
SHAPE = StateShape(
    target=TARGET,
    drafter=DRAFTER,
    lanes=3,
    max_ctx=MAX_CTX,
    pool_tokens=400,
    cache_type_k="f32",
    cache_type_v="q8_0",
    draft_cache_type="f32",
)


def new_pool(shape: StateShape = SHAPE) -> StatePool:
    return StatePool(shape, HEAD_MAP, torch.device("cpu"))


class Rows:
    """Everything that a forward would make of the tokens of one sequence, by position: random, but always the same for a
    seed. A rejected draft is a row of another seed."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        self.kv = values(2, KV, MAX_CTX, 1, HEAD_DIM)
        self.features = values(MAX_CTX, TARGET.hidden_size)
        self.raw = values(GDN, MAX_CTX, CHANNELS)
        self.k, self.d = values(GDN, MAX_CTX, 1, DK), values(GDN, MAX_CTX, HEADS, DV)
        self.g = -values(GDN, MAX_CTX, HEADS).abs()
        self.states = values(GDN, MAX_CTX, HEADS, DK, DV)

    @property
    def context(self) -> Tensor:
        return projected(self.features)


def projected(features: Tensor) -> Tensor:
    """[keys and values, layers, N, 1, HEAD_DIM]: what a drafter would make of features [N, H]."""
    repeated = features.repeat(1, HEAD_DIM // TARGET.hidden_size).unsqueeze(1)
    return torch.stack([torch.stack([repeated * (1 + 2 * side + layer) for layer in range(2)]) for side in range(2)])


JUNK = Rows(-1)


@dataclass
class Sequence:
    """What a lane must hold. The first ``prompt`` tokens are prefilled, the others decoded."""

    rows: Rows
    total: int
    prompt: int
    committed: int = 0
    state: Tensor = field(default_factory=lambda: torch.zeros(GDN, HEADS, DK, DV))

    def commit(self, keep: int, prefill: bool) -> None:
        """Token by token."""
        for position in range(self.committed, self.committed + keep):
            at = slice(position, position + 1)
            k, d, g = self.rows.k[:, at], self.rows.d[:, at], self.rows.g[:, at]
            batch = pack("decode", [1], [position], torch.device("cpu"))
            gdn_replay(self.state[:, None], k, d, g, torch.tensor([1]), HEAD_MAP, batch)
        self.committed += keep
        if prefill:
            self.state = self.rows.states[:, self.committed - 1].clone()

    def history(self) -> Tensor:
        padded = torch.cat((torch.zeros(GDN, TAPS - 1, CHANNELS), self.rows.raw[:, : self.committed]), dim=1)
        return padded[:, -(TAPS - 1) :]


def forward(half: Half | None, sequences: dict[int, Sequence], right: dict[int, int]) -> None:
    """Fill a half's views; of lane l the first ``right[l]`` rows are the sequence's own, the others another's."""
    if half is None:
        return
    batch = half.batch
    spans = list(zip(batch.lanes.tolist(), batch.bases, batch.lengths, strict=True))

    def pick(take: Callable[[Rows], Tensor], dim: int = 0) -> Tensor:
        parts = []
        for lane, start, length in spans:
            own = slice(start, start + right[lane])
            other = slice(own.stop, start + length)
            parts += [take(sequences[lane].rows)[own], take(JUNK)[other]]
        return torch.cat(parts, dim)

    attention = gdn = 0
    for view in half.target.layers:
        if isinstance(view, AttentionView):
            for side, cache in enumerate((view.k, view.v)):
                write_rows(cache, slots(view.page_table, batch), pick(lambda rows, at=(side, attention): rows.kv[at]))  # type: ignore[misc]
            attention += 1
            continue
        raw = pick(lambda rows, layer=gdn: rows.raw[layer])  # type: ignore[misc]
        if view.log is not None:
            for name, place in view.log._asdict().items():
                place[: batch.num_rows] = pick(lambda rows, name=name, layer=gdn: getattr(rows, name)[layer])  # type: ignore[misc]
        else:
            ends = [sequences[lane].rows.states[gdn, start + length - 1] for lane, start, length in spans]
            view.advance(torch.stack(ends), conv_history(raw, view.history, batch.span_lengths, batch))
        gdn += 1
    features = pick(lambda rows: rows.features)
    if half.features is not None:
        keep_features(half.features, features, batch)
    stage(half.context, features)


def stage(views: list[ContextView], features: Tensor) -> None:
    for view, k, v in zip(views, *projected(features), strict=True) if views else ():
        view.stage(k, v)


def catch_up(pool: StatePool, spans: list[SpanRows]) -> None:
    """Make the context that is missing of these lanes, in blocks: what is behind the committed rows is no part of it."""
    if not spans:
        return
    counts, lanes = [pool.backlog(span.lane) for span in spans], [span.lane for span in spans]
    bases = [span.start - count for span, count in zip(spans, counts, strict=True)]
    batch, views = pack("decode", [BLOCK] * len(spans), bases, pool.device, lanes), pool.context_views()
    assert pool.features is not None
    stage(views, kept_features(pool.features, batch))
    pool.write_context(views, torch.tensor(counts), batch)
    pool.caught_up(lanes)


def draft(pool: StatePool, txn: Txn) -> None:
    """Write a block behind the context of each drafting lane. Others catch up when they have to."""
    catch_up(pool, [span for span in txn.spans if span.drafting])
    waiting = [span for span in txn.of_kind("decode") if pool.backlog(span.lane) + span.length > BLOCK]
    catch_up(pool, waiting)
    drafting = [(span.start, span.lane) for span in txn.spans if span.drafting]
    if not drafting:
        return
    starts, lanes = zip(*drafting, strict=True)
    batch = pack("decode", [BLOCK] * len(starts), starts, pool.device, lanes)
    for view in pool.draft_views():
        for cache in (view.k, view.v):
            write_rows(cache, slots(view.page_table, batch), torch.randn(batch.num_rows, 1, HEAD_DIM))


def stored(values: Tensor, like: Any) -> Tensor:
    """Values [N, heads, D] as they read back from a cache of the same type."""
    pages = pages_for(len(values)) or 1
    scale = None if like.scale is None else like.scale[:1].repeat(pages, 1, 1, 1)
    cache = replace(like, data=like.data[:1].repeat(pages, 1, 1, 1), scale=scale)
    write_rows(cache, torch.arange(len(values)), values)
    return read_pages(cache, torch.arange(pages)).flatten(0, 1)[: len(values)]


def assert_holds(pool: StatePool, lane: int, sequence: Sequence) -> None:
    """The lane's committed state is the sequence's, to the bit, as the next round's forwards would see it."""
    n, rows = sequence.committed, sequence.rows
    assert pool.committed(lane) == n
    if n == 0:  # nothing is in state before the first round
        return
    assert torch.equal(pool.gdn[:, lane], sequence.state)
    assert torch.equal(pool.history[:, lane], sequence.history())
    if n == sequence.total or n < sequence.prompt:
        return
    txn = pool.begin([SpanRows(lane, n, 1, "decode", drafting=True)])
    assert txn.decode is not None
    layer = 0
    for view in txn.decode.target.layers:
        if isinstance(view, AttentionView):
            for side, cache in enumerate((view.k, view.v)):
                read = read_pages(cache, view.page_table[lane]).flatten(0, 1)[:n]
                assert torch.equal(read, stored(rows.kv[side, layer, :n], cache))
            layer += 1
    known = n - pool.backlog(lane)
    for layer, view in enumerate(pool.draft_views()):
        first = max(0, n - WINDOW + 1) if DRAFTER.sliding[layer] else 0
        for side, cache in enumerate((view.k, view.v)):
            read = read_pages(cache, view.page_table[lane]).flatten(0, 1)[first:known]
            assert torch.equal(read, rows.context[side, layer, first:known])
    assert pool.features is not None
    if known < n:
        waiting = pack("decode", [n - known], [known], pool.device, [lane])
        assert torch.equal(kept_features(pool.features, waiting), rows.features[known:n])
    pool.abort(txn)


# -- one round -------------------------------------------------------------------------------------------------------------


def prefilled(pool: StatePool, prompt: int, seed: int = 1, total: int = MAX_CTX - BLOCK) -> tuple[int, Sequence]:
    lane = pool.admit(total)
    assert lane is not None
    sequence = Sequence(Rows(seed), total, prompt)
    run(pool, {lane: sequence}, [SpanRows(lane, 0, prompt, "prefill")], {lane: prompt})
    return lane, sequence


def run(
    pool: StatePool,
    sequences: dict[int, Sequence],
    spans: list[SpanRows],
    keep: dict[int, int],
    reading: list[SpanRows] | None = None,
) -> None:
    txn = pool.begin(spans, reading=reading or ())
    draft(pool, txn)
    for half in (txn.decode, txn.prefill):
        forward(half, sequences, keep)
    pool.commit(txn, [keep[span.lane] for span in spans])
    for span in spans:
        sequences[span.lane].commit(keep[span.lane], span.kind == "prefill")
    pool.check()


@pytest.mark.parametrize("keep", range(1, BLOCK + 1))
@pytest.mark.parametrize("prompt", [8, 9, 14, 15, 16, 17, 64, 100])
def test_a_kept_span_is_as_if_stepped(prompt: int, keep: int) -> None:
    """Page edges fall before, on and behind the last kept row; rejected rows leave nothing behind."""
    pool = new_pool()
    lane, sequence = prefilled(pool, prompt)
    run(pool, {lane: sequence}, [SpanRows(lane, prompt, BLOCK, "decode", drafting=True)], {lane: keep})
    assert_holds(pool, lane, sequence)
    stepped_pool = new_pool()
    other, stepped = prefilled(stepped_pool, prompt)
    for position in range(prompt, prompt + keep):
        run(stepped_pool, {other: stepped}, [SpanRows(other, position, 1, "decode")], {other: 1})
    assert torch.equal(pool.gdn[:, lane], stepped_pool.gdn[:, other])
    assert torch.equal(pool.history[:, lane], stepped_pool.history[:, other])
    assert pool.allocator.free == stepped_pool.allocator.free
    run(pool, {lane: sequence}, [SpanRows(lane, prompt + keep, BLOCK, "decode")], {lane: BLOCK})
    assert_holds(pool, lane, sequence)


def forked(pool: StatePool, prompt: int) -> dict[int, Sequence]:
    """A lane that has read a prompt, and two forks of it."""
    source, *lanes = [lane for lane in (pool.admit(180) for _ in range(3)) if lane is not None]
    sequences = {source: Sequence(Rows(1), 180, prompt)}
    txn = pool.begin([SpanRows(source, 0, prompt, "prefill")], [LaneFork(source, lane) for lane in lanes])
    forward(txn.prefill, sequences, {source: prompt})
    pool.commit(txn, [prompt])
    sequences[source].commit(prompt, prefill=True)
    return sequences | {lane: deepcopy(sequences[source]) for lane in lanes}


@pytest.mark.parametrize("prompt", [5, 16, 64, 70, 101])
def test_forks_share_full_pages_and_go_on_by_themselves(prompt: int) -> None:
    """Each goes on with other tokens, the source first; what they write is nobody else's."""
    pool = new_pool(replace(SHAPE, pool_tokens=600))
    sequences = forked(pool, prompt)
    pool.check()
    full, partly = divmod(prompt, PAGE_SIZE)
    assert pool.allocator.total - pool.allocator.free == full + 3 * (partly > 0)
    for lane, sequence in sequences.items():
        assert_holds(pool, lane, sequence)
        sequence.rows = deepcopy(sequence.rows)
        sequence.rows.kv[:, :, prompt:] += lane
        sequence.rows.features[prompt:] += lane
    spans = [SpanRows(lane, prompt, BLOCK, "decode", drafting=True) for lane in sequences]
    run(pool, sequences, spans, {lane: 1 + 3 * index for index, lane in enumerate(sequences)})
    for lane, sequence in sequences.items():
        assert_holds(pool, lane, sequence)
    for lane in list(sequences):
        pool.release(lane)
        pool.check()
        del sequences[lane]
        for other, sequence in sequences.items():
            assert_holds(pool, other, sequence)
    assert pool.allocator.free == pool.allocator.total


def test_an_aborted_fork_leaves_nothing_behind() -> None:
    pool = new_pool()
    source, lane = pool.admit(100), pool.admit(100)
    assert source is not None and lane is not None
    for _ in range(2):
        txn = pool.begin([SpanRows(source, 0, 70, "prefill")], [LaneFork(source, lane)])
        assert pool.allocator.free == pool.allocator.total - 6
        pool.abort(txn)
        pool.check()
        assert pool.allocator.free == pool.allocator.total and pool.committed(lane) == 0


def committed_bytes(pool: StatePool) -> list[Tensor]:
    """Everything that a lane may read, except what lies behind its tokens."""
    return [pool.gdn.clone(), pool.history.clone()]


@pytest.mark.parametrize(("method", "call"), [("write_context", 1), ("_reserve", 2), ("_half", 2)])
def test_a_failed_round_changes_nothing(method: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the second half of begin, or in commit, when the first has been computed; then the round is run again."""
    pool = new_pool()
    sequences = dict([prefilled(pool, 70, seed=1, total=100), prefilled(pool, 64, seed=2, total=160)])
    (first, one), (second, two) = sequences.items()
    two.prompt = 130
    spans = [SpanRows(first, 70, 5, "decode", drafting=True), SpanRows(second, 64, 66, "prefill")]
    before, free = committed_bytes(pool), pool.allocator.free
    calls = 0
    original = getattr(StatePool, method)

    def faulty(self: StatePool, *arguments: Any) -> Any:
        nonlocal calls
        result = original(self, *arguments)
        calls += 1
        if calls == call:
            raise MemoryError("out of memory")
        return result

    monkeypatch.setattr(StatePool, method, faulty)
    with pytest.raises(MemoryError):
        txn = pool.begin(spans)
        try:
            draft(pool, txn)
            forward(txn.decode, sequences, {first: 3})
            forward(txn.prefill, sequences, {second: 66})
            pool.commit(txn, [3, 66])
        except MemoryError:
            pool.abort(txn)
            raise
    monkeypatch.undo()
    pool.check()
    assert pool.allocator.free == free
    assert all(torch.equal(a, b) for a, b in zip(before, committed_bytes(pool), strict=True))
    assert_holds(pool, first, one)
    run(pool, sequences, spans, {first: 3, second: 66})
    assert_holds(pool, first, one)
    assert_holds(pool, second, two)


def test_commit_refuses_what_cannot_be_meant() -> None:
    pool = new_pool()
    lane, sequence = prefilled(pool, 64)
    txn = pool.begin([SpanRows(lane, 64, 4, "decode")])
    forward(txn.decode, {lane: sequence}, {lane: 4})
    for keep in (0, 5):
        with pytest.raises(AssertionError, match="keep outside"):
            pool.commit(txn, [keep])
    with pytest.raises(AssertionError, match="a transaction is open"):
        pool.begin([])
    with pytest.raises(AssertionError, match="release inside"):
        pool.release(lane)
    pool.abort(txn)
    with pytest.raises(AssertionError, match="not the open transaction"):
        pool.commit(txn, [1])
    for start in (63, 65):
        with pytest.raises(AssertionError, match="lane committed 64"):
            pool.begin([SpanRows(lane, start, 1, "decode")])
    pool.check()
    txn = pool.begin([SpanRows(lane, 64, 4, "prefill")])
    with pytest.raises(AssertionError, match="prompt rows are always kept"):
        pool.commit(txn, [3])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool, lane: pool.allocator.take(1), "lost"),
        (lambda pool, lane: pool._lanes[lane].pages.__setitem__(0, pool._lanes[lane].pages[1]), "lost"),
        (lambda pool, lane: pool.allocator.share(pool._lanes[lane].pages[:1]), "miscounted"),
        (lambda pool, lane: setattr(pool._lanes[lane], "committed", 3), "do not cover"),
        (lambda pool, lane: setattr(pool._lanes[lane], "reserved", 1), "outgrew"),
        (lambda pool, lane: setattr(pool._lanes[lane], "projected", 64 - BLOCK - 1), "context is missing"),
        (lambda pool, lane: pool._free_lanes.pop(), "a lane is lost"),
        (lambda pool, lane: pool.begin([SpanRows(lane, 64, 1, "decode")]), "is open"),
    ],
)
def test_check_sees_damage(damage: Callable[[StatePool, int], Any], message: str) -> None:
    pool = new_pool()
    lane, _ = prefilled(pool, 64)
    pool.check()
    damage(pool, lane)
    with pytest.raises(AssertionError, match=message):
        pool.check()


def test_a_new_lane_is_empty_and_a_full_pool_admits_nobody() -> None:
    pool = new_pool()
    lane, _ = prefilled(pool, 64)
    pool.release(lane)
    assert pool.admit(50) == lane and pool.committed(lane) == 0
    assert pool.gdn[:, lane].any() and pool.history[:, lane].any(), "what somebody else has left"
    pool.abort(pool.begin([SpanRows(lane, 0, 8, "prefill")]))
    assert not pool.gdn[:, lane].any() and not pool.history[:, lane].any()
    assert pool.fits([392]) and not pool.fits([393]) and pool.longest == 392, "25 pages of 16, less one block"
    assert pool.admit(393 - 64) is None, "reserved pages count, not owned ones"
    assert pool.admit(320) is not None
    assert pool.admit(1) is None


def test_what_was_begun_for_a_lane_that_is_gone_does_not_see_whose_it_is_now() -> None:
    """Decode rows keep the pages that they were begun with until the table is sent in their order."""
    pool = new_pool()
    lane, _ = prefilled(pool, 20)
    before = pool.table[lane].tolist()
    pool.release(lane)
    assert pool.admit(64) == lane
    txn = pool.begin([SpanRows(lane, 0, 40, "prefill")], packed=False)
    assert pool.prompt_table[lane].tolist() == before
    pool.send_prompt_table()
    now = pool.prompt_table[lane].tolist()
    assert now[:3] == list(pool.pages(lane)) and not set(now[:3]) & set(before[:2]), "long free pages come first"
    assert pool.table[lane].tolist() == before
    prompts, rows = (pool.half(pack(kind, [8], [0], pool.device, [lane])) for kind in ("prefill", "decode"))
    for half, table in ((prompts, pool.prompt_table), (rows, pool.table)):
        views = [view for view in half.target.layers if isinstance(view, AttentionView)]
        assert views and all(view.page_table is table for view in views)
    pool.send_table()
    assert pool.table[lane].tolist() == now
    pool.abort(txn)


def test_sizes_are_what_is_allocated() -> None:
    pool = new_pool()

    def size(tensors: list[Any]) -> int:
        parts = [part for t in tensors for part in (t.data, t.scale) if part is not None]
        return sum(part.nbytes for part in parts)

    paged = size([*pool.k, *pool.v, pool.draft_k[1], pool.draft_v[1]])
    assert paged == kv_bytes_per_token(SHAPE) * (SHAPE.pages + 1) * PAGE_SIZE
    rings = size([pool.draft_k[0], pool.draft_v[0]]) * SHAPE.lanes * SHAPE.ring_pages // (SHAPE.lanes * SHAPE.ring_pages + 1)
    assert pool.features is not None
    states = pool.gdn.nbytes + pool.history.nbytes + sum(part.nbytes for part in pool.log) + pool.features.nbytes
    assert lane_bytes(SHAPE) * SHAPE.lanes + spare_bytes(SHAPE) == states + rings
    assert SHAPE.ring_pages * PAGE_SIZE >= WINDOW + BLOCK


# -- any order of events ---------------------------------------------------------------------------------------------------


class Pool(RuleBasedStateMachine):
    """Lanes come and go; rounds with any mix of spans are committed, aborted, or fail in their commit."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = new_pool()
        self.sequences: dict[int, Sequence] = {}
        self.serial = 0

    @rule(total=st.integers(1, MAX_CTX - BLOCK), data=st.data())
    def admit(self, total: int, data: st.DataObject) -> None:
        room = SHAPE.pages - sum(pages_for(s.total + BLOCK) for s in self.sequences.values())
        lane = self.pool.admit(total)
        assert (lane is not None) == (len(self.sequences) < SHAPE.lanes and pages_for(total + BLOCK) <= room)
        if lane is not None:
            assert lane not in self.sequences
            self.serial += 1
            prompt = data.draw(st.integers(1, total), label="prompt")
            self.sequences[lane] = Sequence(Rows(self.serial), total, prompt)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.sequences)))
        self.pool.release(lane)
        del self.sequences[lane]

    @precondition(lambda self: any(s.committed < s.total for s in self.sequences.values()))
    @rule(data=st.data(), end=st.sampled_from(["commit", "commit", "commit", "abort at once", "abort", "fault"]))
    def round(self, data: st.DataObject, end: str) -> None:
        live = sorted(lane for lane, s in self.sequences.items() if s.committed < s.total)
        lanes = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True), label="lanes")
        spans = [self._span(lane, data) for lane in lanes]
        keep = {span.lane: self._keep(span, data) for span in spans}
        forks = self._forks(spans, data)
        txn = self.pool.begin(spans, forks)
        for span in spans:
            assert span.start or not (self.pool.gdn[:, span.lane].any() or self.pool.history[:, span.lane].any())
        if end != "abort at once":
            draft(self.pool, txn)
            for half in (txn.decode, txn.prefill):
                forward(half, self.sequences, keep)
        if end == "fault":
            with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(pool_module, "gdn_replay", _out_of_memory)
                patch.setattr(StatePool, "write_context", _out_of_memory)
                self.pool.commit(txn, [keep[span.lane] for span in spans])
        if end != "commit":
            self.pool.abort(txn)
            return
        self.pool.commit(txn, [keep[span.lane] for span in spans])
        for span in spans:
            self.sequences[span.lane].commit(keep[span.lane], span.kind == "prefill")
        for fork in forks:
            copied = deepcopy(self.sequences[fork.source])
            copied.total, copied.prompt = self.sequences[fork.lane].total, copied.committed
            self.sequences[fork.lane] = copied

    def _forks(self, spans: list[SpanRows], data: st.DataObject) -> list[LaneFork]:
        """Of the first prompt span, into any lanes that hold nothing yet."""
        prompts = [span for span in spans if span.kind == "prefill"]
        if not prompts:
            return []
        source, end, busy = prompts[0].lane, prompts[0].start + prompts[0].length, {span.lane for span in spans}
        fresh = [at for at, s in self.sequences.items() if at not in busy and not s.committed and s.total >= end]
        chosen = data.draw(st.lists(st.sampled_from(fresh), unique=True), label="forks") if fresh else []
        return [LaneFork(source, lane) for lane in chosen]

    def _span(self, lane: int, data: st.DataObject) -> SpanRows:
        sequence = self.sequences[lane]
        start = sequence.committed
        if start < sequence.prompt:
            rest = sequence.prompt - start
            length = data.draw(st.sampled_from([*range(CHUNK_SIZE, rest, CHUNK_SIZE), rest]), label="chunk")
            return SpanRows(lane, start, length, "prefill")
        length = data.draw(st.integers(1, min(BLOCK, sequence.total - start)), label="rows")
        ahead = data.draw(st.booleans(), label="ahead")
        drafting = data.draw(st.booleans(), label="drafting")
        return SpanRows(lane, start, length, "decode", drafting=drafting, ahead=ahead)

    def _keep(self, span: SpanRows, data: st.DataObject) -> int:
        return span.length if span.kind == "prefill" else data.draw(st.integers(1, span.length), label="keep")

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        for lane, sequence in self.sequences.items():
            assert_holds(self.pool, lane, sequence)
        self.pool.check()


def _out_of_memory(*_: Any) -> None:
    raise MemoryError("out of memory")


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)


def test_rows_that_are_read_for_a_later_round_keep_their_pages() -> None:
    pool = new_pool()
    decoding, sequence = prefilled(pool, 20)
    lane = pool.admit(80)
    assert lane is not None
    rows = SpanRows(lane, 0, 50, "prefill")
    reader, spans = Sequence(Rows(2), 80, 50), [SpanRows(decoding, 20, 1, "decode")]
    run(pool, {decoding: sequence}, spans, {decoding: 1}, [rows])
    pages = pool.pages(lane)
    assert len(pages) == 4 and pool.committed(lane) == 0
    run(pool, {decoding: sequence}, [SpanRows(decoding, 21, 1, "decode")], {decoding: 1})
    assert pool.pages(lane) == pages
    run(pool, {lane: reader}, [rows], {lane: 50})
    assert pool.pages(lane) == pages and pool.committed(lane) == 50
    for gone in (lane, decoding):
        pool.release(gone)
        pool.check()
