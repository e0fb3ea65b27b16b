"""The gated delta rule's kernels against the recurrence in float64, and their bits against one another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.batch import PackedBatch, pack
from paceline.ops.gdn import gdn_prefill, gdn_replay, gdn_verify

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda")
LANES = 9
SHAPES = [(2, 6, 128, 128), (1, 2, 16, 16), (2, 2, 48, 80), (1, 3, 64, 24)]
"""Key heads, value heads, Dk, Dv."""
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, beta, g."""


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rows_of(count: int, shape: tuple[int, int, int, int], magnitude: float = 1.0) -> Rows:
    """v is a slice of a wider tensor, as in the model."""
    key_heads, heads, dk, dv = shape
    q = F.normalize(randn(count, key_heads, dk, seed=1), dim=-1) * dk**-0.5
    k = F.normalize(randn(count, key_heads, dk, seed=2), dim=-1)
    v = magnitude * randn(count, 64 + heads * dv, seed=3)[:, 64:].unflatten(1, (heads, dv))
    beta = torch.sigmoid(randn(count, heads, seed=4))
    return q, k, v, beta, -0.2 * F.softplus(randn(count, heads, seed=5))


def states(lanes: list[int], shape: tuple[int, int, int, int]) -> Tensor:
    """Of all lanes; NaN in those that no span is of."""
    state = torch.full((LANES, shape[1], shape[2], shape[3]), torch.nan, device=DEVICE)
    state[lanes] = 0.3 * randn(len(lanes), *shape[1:], seed=6)
    return state


def heads_of(shape: tuple[int, int, int, int], tiled: bool) -> Tensor:
    heads = torch.arange(shape[1], device=DEVICE)
    return heads % shape[0] if tiled else heads // (shape[1] // shape[0])


def decode_batch(lengths: list[int], lanes: list[int]) -> PackedBatch:
    return pack("decode", lengths, [0] * len(lengths), DEVICE, lanes)


def cut(rows: Rows, start: int, end: int) -> Rows:
    q, k, v, beta, g = (x[start:end] for x in rows)
    return q, k, v, beta, g


def recurrence(rows: Rows, state: Tensor, head_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(o [n, Hv, Dv], d [n, Hv, Dv], S after) of one span in float64."""
    q, k, v, beta, g = (x.double() for x in rows)
    q, k, s = q[:, head_map], k[:, head_map], state.double()
    out, deltas = [torch.empty_like(v[:0])], [torch.empty_like(v[:0])]
    for t in range(len(v)):
        s = g[t].exp()[:, None, None] * s
        d = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
        s = s + k[t, :, :, None] * d[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", s, q[t])[None])
        deltas.append(d[None])
    return torch.cat(out), torch.cat(deltas), s


def close(got: Tensor, expected: Tensor, magnitude: float = 1.0, what: str = "") -> None:
    # values and states are of order ``magnitude``; single roundings decay with the state and do not pile up. exp is good to
    # 2^-22, tf32x3 products to about 1e-6
    error = (got.double() - expected).abs().max().item() if got.numel() else 0.0
    assert error <= 6e-6 * magnitude, f"{what}: error {error}"


@pytest.fixture(autouse=True)
def poison() -> None:
    """Memory that is handed out again holds NaN: what a kernel leaves unwritten is seen."""
    blocks = [
        torch.full((size,), torch.nan, device=DEVICE) for size in (2**10, 2**14, 2**17, 2**18, 2**20) for _ in range(4)
    ]
    del blocks


# -- generated rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("magnitude", [1.0, 1e6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_verify_and_replay_are_the_recurrence(shape: tuple[int, int, int, int], magnitude: float, tiled: bool) -> None:
    lengths, lanes, head_map = [3, 8, 1, 16], [4, 0, 3, 7], heads_of(shape, tiled)
    rows, state, batch = rows_of(sum(lengths), shape, magnitude), states(lanes, shape), decode_batch(lengths, lanes)
    before = state.clone()
    o, d = gdn_verify(*rows, state, head_map, batch)
    assert torch.equal(state.nan_to_num(9.0), before.nan_to_num(9.0)), "verify must leave the committed state alone"
    for kept in (0, 1, 2, 7, 16):
        keep = [min(kept, length) for length in lengths]
        after = torch.stack((before, before))
        log = [torch.stack((torch.zeros_like(x), x)) for x in (rows[1], d, rows[4])]
        gdn_replay(after, log[0], log[1], log[2], torch.tensor(keep, device=DEVICE), head_map, batch)
        assert after[:, [1, 2, 5, 6, 8]].isnan().all(), "the lanes of no span"
        for offset, length, rows_kept, lane in zip(batch.offsets, lengths, keep, lanes, strict=True):
            expected = recurrence(cut(rows, offset, offset + rows_kept), before[lane], head_map)
            close(after[1, lane], expected[2], magnitude, f"state of lane {lane} after {rows_kept}")
            assert torch.equal(after[0, lane], before[lane]), "a log of zeros"
            if kept == 16:
                close(o[offset : offset + length], expected[0], magnitude, f"o of lane {lane}")
                close(d[offset : offset + length], expected[1], magnitude, f"d of lane {lane}")


def stepped(rows: Rows, state: Tensor, head_map: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One lane, one row at a time: o, d, and the state after each number of rows."""
    outs, deltas, after = [], [], [state]
    batch = decode_batch([1], [0])
    for t in range(len(rows[0])):
        row = cut(rows, t, t + 1)
        o, d = gdn_verify(*row, after[-1][None], head_map, batch)
        outs.append(o)
        deltas.append(d)
        pool = after[-1].clone()[None, None]
        gdn_replay(
            pool, row[1][None], d[None], row[4][None], torch.ones(1, dtype=torch.long, device=DEVICE), head_map, batch
        )
        after.append(pool[0, 0])
    return torch.cat(outs), torch.cat(deltas), after


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_spans_have_the_bits_of_steps_in_any_company(shape: tuple[int, int, int, int]) -> None:
    lengths, head_map = [8, 1, 3, 16, 2, 8], heads_of(shape, True)
    lanes = [4, 0, 3, 7, 8, 1]
    rows, state = rows_of(sum(lengths), shape), states(lanes, shape)
    batch = decode_batch(lengths, lanes)
    parts = [cut(rows, offset, offset + length) for offset, length in zip(batch.offsets, lengths, strict=True)]
    plain = [stepped(part, state[lane], head_map) for part, lane in zip(parts, lanes, strict=True)]
    for order in ([0, 1, 2, 3, 4, 5], [3, 5, 0], [2, 4, 1, 0], [1], [3]):
        q, k, v, beta, g = (torch.cat(x) for x in zip(*(parts[span] for span in order), strict=True))
        together = decode_batch([lengths[span] for span in order], [lanes[span] for span in order])
        o, d = gdn_verify(q, k, v, beta, g, state, head_map, together)
        assert torch.equal(o, torch.cat([plain[span][0] for span in order])), f"o, spans {order}"
        assert torch.equal(d, torch.cat([plain[span][1] for span in order])), f"d, spans {order}"
        for kept in range(17):
            keep = [min(max(kept - span, 0), lengths[span]) for span in order]
            after = torch.stack([state, state, state])
            log = [torch.stack((0.5 * x, x, x)) for x in (k, d, g)]
            gdn_replay(after, log[0], log[1], log[2], torch.tensor(keep, device=DEVICE), head_map, together)
            for span, rows_kept in zip(order, keep, strict=True):
                got, expected = after[1:, lanes[span]], plain[span][2][rows_kept]
                assert torch.equal(got, expected.expand_as(got)), f"state, span {span} of {order}, keep {rows_kept}"


@pytest.mark.parametrize("offset", [1, 4])
def test_where_tensors_lie_does_not_matter(offset: int) -> None:
    shape, lengths, lanes = SHAPES[0], [3, 8], [1, 0]
    rows, state, head_map, batch = (
        rows_of(11, shape),
        states(lanes, shape),
        heads_of(shape, True),
        decode_batch(lengths, lanes),
    )
    moved = []
    for x in (*rows, state):
        place = torch.empty(x.numel() + offset, device=DEVICE)[offset:].view(x.shape)
        moved.append(place.copy_(x))
    expected = gdn_verify(*rows, state, head_map, batch)
    q, k, v, beta, g, elsewhere = moved
    got = gdn_verify(q, k, v, beta, g, elsewhere, head_map, batch)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


# -- prompt rows -----------------------------------------------------------------------------------------------------------


def prefill(rows: Rows, lengths: list[int], lanes: list[int], state: Tensor, head_map: Tensor) -> tuple[Tensor, Tensor]:
    return gdn_prefill(*rows, state, head_map, pack("prefill", lengths, [0] * len(lengths), DEVICE, lanes))


@pytest.mark.parametrize("lengths", [[1], [64], [65, 3], [200, 128, 63], [15, 16, 17, 31, 33]], ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_are_the_recurrence(shape: tuple[int, int, int, int], magnitude: float, lengths: list[int]) -> None:
    lanes, head_map = [5, 2, 8, 0, 6][: len(lengths)], heads_of(shape, False)
    rows, state = rows_of(sum(lengths), shape, magnitude), states(lanes, shape)
    o, after = prefill(rows, lengths, lanes, state, head_map)
    offset = 0
    for span, (length, lane) in enumerate(zip(lengths, lanes, strict=True)):
        expected = recurrence(cut(rows, offset, offset + length), state[lane], head_map)
        close(o[offset : offset + length], expected[0], magnitude, f"o of span {span}")
        close(after[span], expected[2], magnitude, f"state of span {span}")
        offset += length


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_prompt_may_be_cut_and_have_company(shape: tuple[int, int, int, int]) -> None:
    """At multiples of 64, beside spans of any length."""
    length, lanes, head_map = 300, [5], heads_of(shape, True)
    rows, state = rows_of(length, shape), states([5], shape)
    others, beside = rows_of(200, shape, 3.0), states([0, 8], shape)
    whole, after = prefill(rows, [length], lanes, state, head_map)
    for cuts in ([0, 64, 300], [0, 128, 192, 300], [0, 256, 300], [0, 64, 128, 192, 256, 300]):
        now, outs = state[5], []
        for start, end in zip(cuts, cuts[1:], strict=False):
            q, k, v, beta, g = (torch.cat((x[:70], y, x[70:])) for x, y in zip(others, cut(rows, start, end), strict=True))
            beside[5] = now
            o, new = prefill((q, k, v, beta, g), [70, end - start, 130], [0, 5, 8], beside, head_map)
            outs.append(o[70 : 70 + end - start])
            now = new[1]
        assert torch.equal(torch.cat(outs), whole), f"o, cut at {cuts}"
        assert torch.equal(now, after[0]), f"state, cut at {cuts}"


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rows_that_forget_everything_and_rows_that_forget_nothing(share: float) -> None:
    """Decays of e^-1000 and of 1 in any mixture; the chunked form's sums of them are exact in float32."""
    shape = SHAPES[0]
    (q, k, v, beta, _), state, head_map = rows_of(150, shape), states([0], shape), heads_of(shape, True)
    chosen = torch.rand(150, shape[1], generator=torch.Generator().manual_seed(7)).to(DEVICE) < share
    rows = q, k, v, beta, torch.where(chosen, -1000.0, 0.0)
    expected, deltas, last = recurrence(rows, state[0], head_map)
    o, d = gdn_verify(*rows, state, head_map, decode_batch([150], [0]))
    close(o, expected, what="verify o")
    close(d, deltas, what="verify d")
    o, after = prefill(rows, [150], [0], state, head_map)
    close(o, expected, what="prefill o")
    close(after[0], last, what="prefill state")


def test_equal_keys_written_with_full_strength() -> None:
    """The hardest triangular system: every entry below the diagonal is 1, and its inverse has entries of 1 and -1 only."""
    shape = SHAPES[0]
    q, k, v, _, _ = rows_of(128, shape)
    rows = q, k[:1].expand(128, -1, -1).contiguous(), v, torch.ones(128, shape[1], device=DEVICE), v.new_zeros(128, shape[1])
    state, head_map = states([0], shape), heads_of(shape, True)
    expected = recurrence(rows, state[0], head_map)
    o, after = prefill(rows, [128], [0], state, head_map)
    # sums of up to 64 values of order 1 cancel
    close(o, expected[0], 8.0, "o")
    close(after[0], expected[2], 8.0, "state")
