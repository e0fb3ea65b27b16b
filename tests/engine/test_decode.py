"""What a round's forwards are fed, with and without padding, and the buckets of the captured ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from paceline.engine.decode import Behind, DecodeShape, pack_decode, unpack_decode
from paceline.engine.graphs import decode_shapes, draft_buckets, prompt_shapes, span_buckets
from paceline.engine.plan import PrefillSpan, VerifySpan
from paceline.engine.prompts import PromptShape, pack_prompts, unpack_prompts
from paceline.ops.gdn import CHUNK_PLAN
from paceline.types import Request

BLOCK, SPARE = 4, 9
REQUEST = Request("0", (1, 2, 3), 0.0, 1.0, 0, 0.0, 0, 10)
SPANS = [VerifySpan(REQUEST, 5, 100, 11, 3), VerifySpan(REQUEST, 2, 40, 12, 0), VerifySpan(REQUEST, 0, 7, 13, 1)]
TOKENS = [11, 21, 22, 23, 12, 13, 31]


def unpacked(shape: DecodeShape) -> tuple[list[list[int]], list[int]]:
    """Fields of the batch, and the tokens of its rows."""
    packed = torch.from_numpy(pack_decode(SPANS, BLOCK, shape, SPARE))
    assert len(packed) == shape.size
    batch, anchors, behind, sources = unpack_decode(packed, shape, [4] * shape.spans, [0] * shape.spans)
    assert behind[0].tolist() == [-1] * shape.spans
    drafts = torch.tensor([[21, 22, 23], [31, 32, 33]])
    fields = (batch.positions, batch.row_span, batch.starts, batch.span_lengths, batch.span_bases, batch.lanes)
    return [field.tolist() for field in fields], torch.cat((anchors, drafts.flatten()))[sources].tolist()


def test_rows_lie_one_after_another() -> None:
    fields, tokens = unpacked(DecodeShape(7, 3))
    assert fields == [[100, 101, 102, 103, 40, 7, 8], [0, 0, 0, 0, 1, 2, 2], [0, 4, 5], [4, 1, 2], [100, 40, 7], [5, 2, 0]]
    assert tokens == TOKENS


def test_padding_is_an_empty_span_of_the_spare_lane() -> None:
    fields, tokens = unpacked(DecodeShape(10, 5, padded=True))
    positions, row_span, starts, lengths, bases, lanes = fields
    assert positions[7:] == [0, 0, 0] and row_span[7:] == [4, 4, 4]
    assert starts == [0, 4, 5, 7, 7] and lengths == [4, 1, 2, 0, 0] and bases[3:] == [0, 0] and lanes[3:] == [SPARE, SPARE]
    assert tokens[:7] == TOKENS


def test_where_spans_go_on_from_lies_beside_them() -> None:
    shape = DecodeShape(10, 5, padded=True)
    packed = pack_decode(SPANS, BLOCK, shape, SPARE, behind=[Behind(2, 30), Behind(0, 20), Behind(1, 10)])
    _, anchors, behind, sources = unpack_decode(torch.from_numpy(packed), shape, [4] * 5, [0] * 5)
    assert anchors.tolist() == [11, 12, 13, 0, 0] and sources[:2].tolist() == [0, 5]
    assert behind.tolist() == [[2, 0, 1, -1, -1], [30, 20, 10, 0, 0]]


@pytest.mark.parametrize("block", [1, 4, 8, 16])
@pytest.mark.parametrize("lanes", [1, 2, 3, 6, 8, 32])
def test_every_round_has_a_bucket_with_little_padding(lanes: int, block: int) -> None:
    drafting = draft_buckets(lanes)
    assert (
        drafting == tuple(sorted(set(drafting)))
        and drafting[-1] == lanes
        and drafting[:8] == (*range(1, min(lanes, 8) + 1),)
    )
    buckets, shapes = span_buckets(lanes), decode_shapes(lanes, block)
    assert buckets[-1] == lanes and all(below < above <= 2 * below for below, above in pairwise(buckets))
    for spans in range(1, lanes + 1):
        bucket = next(b for b in buckets if b >= spans)
        rows = [shape.rows for shape in shapes if shape.spans == bucket + 1]
        assert rows == sorted(set(rows)) and rows[-1] == bucket * block
        for count in range(spans, spans * block + 1):
            assert min(r for r in rows if r >= count) - count < max(bucket, 32 if count > 64 else 8)


CHUNKS = [
    PrefillSpan(REQUEST, 4, 64, tuple(range(100, 230)), True),
    PrefillSpan(REQUEST, 1, 0, tuple(range(500, 564)), False),
    PrefillSpan(REQUEST, 7, 128, (9, 8, 7), True),
]


@pytest.mark.parametrize("padded", [False, True])
def test_prompt_chunks_and_their_padding(padded: bool) -> None:
    shape = prompt_shapes(6)[3] if padded else PromptShape.of(CHUNKS)
    packed = torch.from_numpy(pack_prompts(CHUNKS, shape, SPARE))
    batch, tokens = unpack_prompts(packed, shape, [130, 64, 3], [64, 0, 128])
    assert tokens[:197].tolist() == [*range(100, 230), *range(500, 564), 9, 8, 7]
    assert batch.positions[:197].tolist() == [*range(64, 194), *range(64), 128, 129, 130]
    assert batch.lanes[:3].tolist() == [4, 1, 7] and batch.span_lengths[:3].tolist() == [130, 64, 3]
    first_rows, rows, first_chunks = (part.tolist() for part in batch.plans[CHUNK_PLAN])
    assert first_rows[:5] == [0, 64, 128, 130, 194] and rows[:5] == [64, 64, 2, 64, 3] and first_chunks[:3] == [0, 3, 4]
    if padded:
        assert not any(rows[5:]) and not batch.span_lengths[3:].any() and set(batch.lanes[3:].tolist()) == {SPARE}
        assert set(batch.row_span[197:].tolist()) == {shape.spans - 1} and not batch.positions[197:].any()
