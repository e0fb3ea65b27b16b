"""Lanes in isolation, and rounds of any kind against plain stepping: equal to the bit, tokens and state.

Contexts hold real features, are longer than the drafter's window (shrunk to 32), and its rings have wrapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from demo_pair import Pair, goldens, greedy_request, pair
from torch import Tensor

from paceline.config import PAGE_SIZE, CacheType
from paceline.engine.drafting import DFlashDrafter
from paceline.engine.plan import PrefillSpan, Round, RoundResult, VerifySpan
from paceline.engine.runner import Runner
from paceline.models.qwen35 import Hidden
from paceline.ops.features import keep_features
from paceline.ops.kv import PagedTensor
from paceline.state.pool import SpanRows, StatePool, Txn
from paceline.state.shapes import StateShape
from paceline.types import Request

WINDOW = 32
MIXED = (True, False, True)
"""A drafter whose middle layer attends to everything: its K/V lives in the target's pages instead of a ring."""
TEXTS = [golden["prompt_tokens"] for golden in goldens() if len(golden["prompt_tokens"]) > 250][:3]


# -- several lanes against one ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Context:
    """A lane's way to its committed position: a prompt, then verify rounds as (rows fed, rows kept)."""

    text: list[int]
    prompt: int
    rounds: tuple[tuple[int, int], ...]

    @property
    def committed(self) -> int:
        return self.prompt + sum(keep for _, keep in self.rounds)


CONTEXTS = [
    Context(TEXTS[0], 58, ((8, 3), (4, 4))),
    Context(TEXTS[1], 72, ((8, 8), (3, 1))),
    Context(TEXTS[2], 130, ((1, 1), (6, 2))),
]
COMMITTED = (65, 81, 133)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one round computed for a lane: the drafter's hidden states, drafts, and the target's verify logits."""

    hidden: Tensor
    drafts: Tensor
    logits: Tensor


def request_of(context: Context) -> Request:
    return greedy_request(context.text[: context.prompt], 100)


def at_positions(everything: Pair, contexts: Sequence[Context]) -> list[int]:
    """Lanes brought to their committed positions together; their numbers."""
    pool = everything.pool
    lanes = [admitted(pool, context.prompt + 100) for context in contexts]
    txn = pool.begin([SpanRows(lane, 0, c.prompt, "prefill") for lane, c in zip(lanes, contexts, strict=True)])
    forward(everything, txn, [token for c in contexts for token in c.text[: c.prompt]])
    pool.commit(txn, [context.prompt for context in contexts])
    for index in range(len(contexts[0].rounds)):
        fed, keep = zip(*(context.rounds[index] for context in contexts), strict=True)
        starts = [pool.committed(lane) for lane in lanes]
        txn = pool.begin([SpanRows(*rows, "decode", drafting=True) for rows in zip(lanes, starts, fed, strict=True)])
        tokens = [c.text[start : start + rows] for c, start, rows in zip(contexts, starts, fed, strict=True)]
        everything.drafter.catch_up(spans_of(lanes, contexts, starts), pool)
        forward(everything, txn, [token for part in tokens for token in part])
        pool.commit(txn, keep)
    return lanes


def spans_of(lanes: Sequence[int], contexts: Sequence[Context], starts: Sequence[int], drafts: int = 0) -> list[VerifySpan]:
    return [
        VerifySpan(request_of(context), lane, start, context.text[start], drafts)
        for lane, context, start in zip(lanes, contexts, starts, strict=True)
    ]


def admitted(pool: StatePool, tokens: int) -> int:
    lane = pool.admit(tokens)
    assert lane is not None
    return lane


def forward(everything: Pair, txn: Txn, tokens: list[int]) -> Hidden:
    half = txn.decode or txn.prefill
    assert half is not None
    hidden, features = everything.target(torch.tensor(tokens), half.batch, half.target, everything.drafter.taps)
    assert features is not None
    if half.features is None:
        everything.drafter.project(features, half.batch, half.context)
    else:
        keep_features(half.features, features, half.batch)
    return hidden


@torch.inference_mode()
def one_round(everything: Pair, contexts: Sequence[Context]) -> list[Outcome]:
    lanes, drafter = at_positions(everything, contexts), everything.drafter
    assert [everything.pool.committed(lane) for lane in lanes] == [context.committed for context in contexts]
    block = drafter.block_size
    spans = spans_of(lanes, contexts, [context.committed for context in contexts], block - 1)
    drafter.catch_up(spans, everything.pool)
    txn = everything.pool.begin([SpanRows(span.lane, span.start, block, "decode", drafting=True) for span in spans])
    anchors = torch.tensor([span.anchor for span in spans])
    packed, kinds, limits = drafter.pack(spans, len(spans), everything.pool.spare_lane)
    inputs = drafter.unpack(torch.from_numpy(packed), [span.start for span in spans], kinds, limits)
    views = everything.pool.draft_views()
    hidden = drafter.model.hidden(anchors, everything.target.embed_tokens, inputs.batch, views)
    drafts = drafter.forward(inputs, views)
    tokens = torch.cat((anchors.unsqueeze(1), drafts), dim=1).flatten().tolist()
    logits = everything.target.logits(forward(everything, txn, tokens)).unflatten(0, (len(spans), block))
    everything.pool.abort(txn)
    return [Outcome(*parts) for parts in zip(hidden, drafts, logits, strict=True)]


def soiled(everything: Pair) -> Pair:
    """The same pool after other lanes have come, drafted, and gone."""
    junk = [Context(text[::-1], rows, ((8, 5),)) for text, rows in zip(TEXTS, (200, 90, 150), strict=True)]
    with torch.inference_mode():
        for lane in at_positions(everything, junk):
            everything.pool.release(lane)
    return everything


@pytest.mark.parametrize("sliding", [None, MIXED], ids=["all sliding", "mixed"])
@pytest.mark.parametrize(("dtype", "cache"), [(torch.float32, "f32"), (torch.bfloat16, "q8_0")], ids=["float32", "bfloat16"])
def test_three_lanes_beyond_the_window_equal_one(
    dtype: torch.dtype, cache: CacheType, sliding: tuple[bool, ...] | None
) -> None:
    def pool_of(lanes: int) -> Pair:
        return pair(lanes=lanes, dtype=dtype, cache_type=cache, window=WINDOW, sliding=sliding)

    assert tuple(context.committed for context in CONTEXTS) == COMMITTED
    order = (2, 0, 1)
    together = dict(zip(order, one_round(soiled(pool_of(3)), [CONTEXTS[i] for i in order]), strict=True))
    for index, context in enumerate(CONTEXTS):
        alone, among = one_round(pool_of(1), [context])[0], together[index]
        assert alone.logits.isfinite().all() and alone.hidden.isfinite().all()
        assert torch.equal(alone.hidden, among.hidden)
        assert torch.equal(alone.drafts, among.drafts)
        assert torch.equal(alone.logits, among.logits)


def test_the_window_hides_what_is_behind_it() -> None:
    """Otherwise the test above would not reach beyond the window."""
    narrow, wide = (one_round(pair(lanes=1, window=window), [CONTEXTS[0]])[0] for window in (WINDOW, WINDOW + 1))
    assert not torch.equal(narrow.hidden, wide.hidden)


@pytest.mark.parametrize("window", [32, 120, 122, 128])
def test_a_ring_shows_what_pages_without_an_end_would(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 120 and a block of 8 just fill a ring of 128 rows."""
    ring = one_round(pair(lanes=3, window=window), CONTEXTS)
    rows = pair(lanes=1, window=window).pool.shape.ring_pages * PAGE_SIZE
    monkeypatch.setattr(StateShape, "ring_pages", 512 // PAGE_SIZE)
    for wrapped, endless in zip(ring, one_round(pair(lanes=3, window=window), CONTEXTS), strict=True):
        assert torch.equal(wrapped.hidden, endless.hidden)
    assert rows == (128 if window <= 120 else 256)


# -- rounds of any kind against plain steps --------------------------------------------------------------------------------

PROMPT, STEPS = 107, 46
BEYOND = 8
"""Plain steps behind the last committed one: drafts of the last rounds reach that far."""
SCRIPT = (
    # (drafts K, the wrong one or 0 for none) -> committed
    (7, 1),  # 108
    (7, 2),  # 110
    (0, 0),  # 111, one before a page edge
    (7, 1),  # 112, on it
    (7, 1),  # 113, behind it
    (7, 3),  # 116
    (7, 0),  # 124
    (0, 0),  # 125
    (7, 3),  # 128, on an edge of pages, key blocks and the ring
    (3, 2),  # 130
    (0, 0),  # 131
    (7, 0),  # 139
    (7, 5),  # 144, on a page edge
    (0, 0),  # 145
    (7, 0),  # 153
)


def test_the_script_ends_on_before_and_behind_page_edges() -> None:
    ends, committed = [], PROMPT
    for drafts, wrong in SCRIPT:
        committed += wrong or drafts + 1
        ends.append(committed)
    assert committed == PROMPT + STEPS
    assert {end % PAGE_SIZE for end in ends} >= {0, 1, PAGE_SIZE - 1}
    assert {wrong for _, wrong in SCRIPT} >= {1, 2, 3}


class Scripted(DFlashDrafter):
    """Makes context as the real drafter does and runs its block, but proposes a script: the coming tokens, but for one."""

    def __init__(self, everything: Pair) -> None:
        super().__init__(everything.drafter.model, everything.target)
        self.coming: dict[int, list[int]] = {}
        self.wrong: dict[int, int] = {}

    def propose(self, spans: Sequence[VerifySpan], pool: StatePool) -> Tensor:
        drafts = super().propose(spans, pool).clone()
        for row, span in zip(drafts, spans, strict=True):
            row[: span.drafts] = torch.tensor(self.coming[span.lane][: span.drafts])
            if wrong := self.wrong[span.lane]:
                row[wrong - 1] = (row[wrong - 1] + 1) % self.target.config.vocab_size
        return drafts


State = dict[str, Tensor]


@torch.inference_mode()
def state_of(runner: Runner, lane: int) -> State:
    """Everything committed of a lane, K/V in the order of positions; of the rings what a coming row may see. Of what waits
    for the drafter the context is made, but it goes on waiting."""
    pool, drafter = runner.pool, runner.drafter
    committed, projected = pool.committed(lane), pool._lanes[lane].projected
    assert drafter is not None
    drafter.catch_up([VerifySpan(greedy_request([0], 1), lane, committed, 0, 0)], pool)
    pool._lanes[lane].projected = projected
    state = {"gdn": pool.gdn[:, lane], "history": pool.history[:, lane]}
    pages = pool.table[lane]
    for layer, caches in enumerate(zip(pool.k, pool.v, strict=True)):
        state |= stored(f"layer {layer}", caches, pages, 0, committed)
    assert pool.shape.drafter is not None
    for layer, sliding in enumerate(pool.shape.drafter.sliding):
        pages = (pool.ring_table if sliding else pool.table)[lane]
        first = max(0, committed - WINDOW + 1) if sliding else 0
        state |= stored(f"drafter layer {layer}", (pool.draft_k[layer], pool.draft_v[layer]), pages, first, committed)
    return {name: tensor.clone() for name, tensor in state.items()}


def stored(name: str, caches: tuple[PagedTensor, PagedTensor], pages: Tensor, first: int, end: int) -> State:
    parts = {"k": caches[0].data, "v": caches[1].data}
    if caches[0].scale is not None and caches[1].scale is not None:
        parts |= {"k scale": caches[0].scale, "v scale": caches[1].scale}
    return {f"{name} {part}": data[pages].flatten(0, 1)[first:end] for part, data in parts.items()}


def assert_same(got: State, expected: State, where: str) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].shape == expected[name].shape and torch.equal(got[name], expected[name]), f"{name} {where}"


def prefilled(runner: Runner, request: Request) -> tuple[int, int]:
    """(lane, first token) of a request whose prompt has been read."""
    lane = admitted(runner.pool, len(request.prompt) + request.max_tokens)
    first = runner.run(Round((), (PrefillSpan(request, lane, 0, request.prompt, final=True),))).prefill[0]
    assert first is not None
    return lane, first


def plain_steps(everything: Pair, request: Request) -> tuple[list[int], dict[int, State]]:
    """The tokens of plain decoding, and the state at every committed position."""
    runner = everything.runner
    lane, first = prefilled(runner, request)
    tokens, states = [first], {}
    for position in range(len(request.prompt), len(request.prompt) + STEPS + BEYOND):
        states[position] = state_of(runner, lane)
        result = runner.run(Round((VerifySpan(request, lane, position, tokens[-1], 0),), ()))
        tokens += result.verify[0]
        runner.pool.check()
    runner.pool.release(lane)
    return tokens, states


@pytest.mark.parametrize(
    ("dtype", "cache", "sliding"),
    [(torch.float32, "f32", None), (torch.bfloat16, "q8_0", MIXED)],
    ids=["float32, rings", "bfloat16, q8_0, mixed"],
)
def test_any_rounds_equal_plain_steps(dtype: torch.dtype, cache: CacheType, sliding: tuple[bool, ...] | None) -> None:
    """Three lanes in the same rounds, each at another place in the script."""
    requests = [greedy_request(text[:prompt], STEPS + BEYOND) for text, prompt in zip(TEXTS, (PROMPT, 57, 100), strict=True)]
    alone = pair(lanes=1, dtype=dtype, cache_type=cache, window=WINDOW, sliding=sliding)
    plain = [plain_steps(alone, request) for request in requests]

    everything = pair(lanes=3, dtype=dtype, cache_type=cache, window=WINDOW, sliding=sliding)
    scripted = Scripted(everything)
    runner = Runner(everything.target, scripted, everything.pool)
    lanes = []
    for request, (tokens, _) in zip(requests, plain, strict=True):
        lane, first = prefilled(runner, request)
        assert first == tokens[0]
        lanes.append(lane)
    for turn in range(len(SCRIPT)):
        spans = []
        for index, (request, lane) in enumerate(zip(requests, lanes, strict=True)):
            drafts, wrong = SCRIPT[(turn + 5 * index) % len(SCRIPT)]
            position = runner.pool.committed(lane)
            step = position - len(request.prompt)
            scripted.coming[lane], scripted.wrong[lane] = plain[index][0][step + 1 :], wrong
            spans.append(VerifySpan(request, lane, position, plain[index][0][step], drafts))
        result = runner.run(Round(tuple(spans), ()))
        runner.pool.check()
        check_round(runner, result, spans, scripted.wrong, plain)


def check_round(
    runner: Runner,
    result: RoundResult,
    spans: Sequence[VerifySpan],
    wrong: dict[int, int],
    plain: Sequence[tuple[list[int], dict[int, State]]],
) -> None:
    for span, emitted, (tokens, states) in zip(spans, result.verify, plain, strict=True):
        step = span.start - len(span.request.prompt)
        assert len(emitted) == (wrong[span.lane] or span.drafts + 1)
        assert list(emitted) == tokens[step + 1 : step + 1 + len(emitted)]
        committed = runner.pool.committed(span.lane)
        assert committed == span.start + len(emitted)
        assert_same(state_of(runner, span.lane), states[committed], f"at {committed}, from {span.start}")


@pytest.mark.parametrize(("dtype", "cache"), [(torch.float32, "f32"), (torch.bfloat16, "q8_0")], ids=["float32", "bfloat16"])
def test_a_prompt_may_be_cut_beside_others(dtype: torch.dtype, cache: CacheType) -> None:
    """Chunks of every multiple of 64 rows, beside a lane that decodes and one that reads another prompt: the state of a
    prompt read whole and alone."""
    alone = pair(lanes=1, dtype=dtype, cache_type=cache, window=WINDOW).runner
    request = greedy_request(TEXTS[0][:213], 8)
    lane, token = prefilled(alone, request)
    expected = state_of(alone, lane)

    runner = pair(lanes=3, dtype=dtype, cache_type=cache, window=WINDOW).runner
    for cuts in ([0, 64, 213], [0, 128, 192, 213]):
        decoding, reading = (greedy_request(text[:90], 40) for text in TEXTS[1:])
        (beside, last), lane = prefilled(runner, decoding), admitted(runner.pool, 221)
        other = admitted(runner.pool, 130)
        for turn, (start, end) in enumerate(pairwise(cuts)):
            chunks = [PrefillSpan(request, lane, start, request.prompt[start:end], final=end == 213)]
            if turn == 1:
                chunks.insert(0, PrefillSpan(reading, other, 0, reading.prompt, final=True))
            verify = VerifySpan(decoding, beside, runner.pool.committed(beside), last, 7)
            result = runner.run(Round((verify,), tuple(chunks)))
            runner.pool.check()
            last = result.verify[0][-1]
        assert result.prefill[-1] == token
        assert_same(state_of(runner, lane), expected, f"cut at {cuts[1:-1]}")
        for used in (beside, lane, other):
            runner.pool.release(used)
