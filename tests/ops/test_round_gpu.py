"""The kernels between a round's forwards: exactly the references."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from paceline.batch import PackedBatch, facts, unpack
from paceline.config import PAGE_SIZE
from paceline.ops.accept import accept
from paceline.ops.accept import ref as acceptance
from paceline.ops.advance import advance, advance_counts, input_tokens
from paceline.ops.advance import ref as advancing
from paceline.ops.features import keep_features, kept_features
from paceline.ops.kv import ref as storage
from paceline.ops.kv import row_slots
from paceline.ops.topk import peaks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def batch_of(lengths: list[int], rows: int, spans: int, device: str) -> PackedBatch:
    packed = torch.from_numpy(facts(lengths, [7 * at for at in range(len(lengths))], range(len(lengths)), rows, spans, 40))
    return unpack("decode", packed.to(device), [8] * spans, [400] * spans, rows, spans)


@pytest.mark.parametrize("lengths", [[1], [8], [3, 1, 8, 5], [8] * 33, [1] * 40])
@pytest.mark.parametrize("given", [False, True])
def test_acceptance(lengths: list[int], given: bool) -> None:
    batch, real = batch_of(lengths, sum(lengths) + 2, len(lengths) + 2, "cpu"), sum(lengths)
    tokens, picks = torch.randint(0, 2, (real + 2,)), torch.randint(0, 2, (real,))
    logits = torch.randn(real, 248_320)
    for at, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[at::5, 1000 * at + 17] = value
    logits[3::7] = -torch.inf
    held = (
        torch.tensor([at % 10 - 1 for at in range(len(lengths))] + [-1, -1]) if given else None
    )  # of some more than there are
    expected = acceptance.accept(tokens, picks, logits.amax(1, True), batch.starts, batch.span_lengths, max(lengths), held)
    starts, rows = batch.starts.cuda(), batch.span_lengths.cuda()
    on_device = None if held is None else held.cuda()
    got = accept(tokens.cuda(), picks.cuda(), peaks(logits.cuda()), starts, rows, max(lengths), on_device)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("lengths", [[8], [8, 8, 8], [8] * 33, [1, 8, 3, 2], [1] * 200])
def test_inputs_advance(lengths: list[int]) -> None:
    spans, drafting = len(lengths) + 1, len(set(lengths)) == 1 and lengths[0] == 8
    ends = torch.randint(0, 9, (7, 11))
    places, limits = torch.randint(-1, 7, (spans,)), torch.randint(0, 9, (spans,))
    places[-1], results = -1, []
    for op, device in ((advancing.advance, "cpu"), (advance, "cuda")):
        batch = batch_of([*lengths, 8] if drafting else lengths, sum(lengths) + 8, spans, device)
        anchors, draws = torch.arange(spans, device=device), torch.arange(7 * spans, device=device)
        rooms = None if drafting else limits.to(device)
        op(ends.to(device)[:, :2], places.to(device), anchors, batch, rooms, draws if drafting else None)
        results.append([anchors, draws, *(x for f in fields(batch) if isinstance(x := getattr(batch, f.name), Tensor))])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("spans", [1, 9, 200])
def test_counts_advance(spans: int) -> None:
    ends, places, counts = torch.randint(0, 9, (7, 11)), torch.randint(-1, 7, (spans,)), torch.randint(0, 9, (spans,))
    got = counts.cuda()
    advance_counts(ends.cuda()[:, :2], places.cuda(), got)
    advancing.advance_counts(ends[:, :2], places, counts)
    assert torch.equal(got.cpu(), counts)


@pytest.mark.parametrize("width", [1536, 25_600])
def test_features(width: int) -> None:
    """Two forwards, of which the second begins where the first has kept three rows."""
    lengths, rows, spans = [8, 1, 5, 8], 24, 5
    ring, features = torch.full((41, 16, width), torch.nan, device="cuda"), torch.randn(2, rows, width, device="cuda")
    batch = batch_of(lengths, rows, spans, "cuda")
    keep_features(ring, features[0], batch)
    batch.positions.add_(3)
    keep_features(ring, features[1], batch)
    assert torch.equal(kept_features(ring, batch)[:22], features[1, :22])
    batch.positions.sub_(3)
    first = kept_features(ring, batch)
    for start, length in zip((0, 8, 9, 14), lengths, strict=True):
        kept = min(3, length)
        assert torch.equal(first[start : start + kept], features[0, start : start + kept])


@pytest.mark.parametrize("drafts", [None, (1, 7), (33, 7)])
def test_input_tokens(drafts: tuple[int, int] | None) -> None:
    anchors, made = torch.arange(100, 140), None if drafts is None else torch.randint(0, 200_000, drafts)
    sources = torch.randint(0, 40 + (made.numel() if made is not None else 0), (300,))
    out, expected = torch.zeros(300, dtype=torch.long, device="cuda"), torch.zeros(300, dtype=torch.long)
    input_tokens(anchors.cuda(), sources.cuda(), None if made is None else made.cuda(), out)
    advancing.input_tokens(anchors, sources, made, expected)
    assert torch.equal(out.cpu(), expected)


def test_slots_of_rows() -> None:
    table = torch.randint(0, 5000, (41, 400 // PAGE_SIZE + 1), dtype=torch.int32)
    for lengths in ([1], [8] * 33, [200, 3]):
        batches = [batch_of(lengths, sum(lengths) + 3, len(lengths) + 1, device) for device in ("cpu", "cuda")]
        assert torch.equal(row_slots(table.cuda(), batches[1]).cpu(), storage.row_slots(table, batches[0]))
