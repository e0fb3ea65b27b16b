"""Elements behind the 2^31st of a tensor on a GPU: states of many lanes and layers, raw inputs, logits of many rows. (Pages:
``test_kv_gpu`` and ``test_attention_gpu``.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.batch import pack
from paceline.ops.conv import advance_history
from paceline.ops.gdn import gdn_prefill, gdn_replay, gdn_verify
from paceline.ops.sample import draw
from paceline.ops.topk import argmax, top_k
from paceline.types import RowKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda")
KEY_HEADS, HEADS, DIM = 16, 48, 128
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
LIMIT = 2**31


def large(*shape: int) -> Tensor:
    """Unwritten float32 numbers, more than 2^31."""
    tensor_bytes = 4 * torch.Size(shape).numel()
    assert tensor_bytes > 4 * LIMIT
    if DEVICE.type == "cuda" and torch.cuda.mem_get_info(DEVICE)[0] < 1.2 * tensor_bytes:
        pytest.skip(f"needs {tensor_bytes / 2**30:.0f} GiB")
    return torch.empty(*shape, device=DEVICE)


def inputs(rows: int) -> tuple[Tensor, ...]:
    """q, k, v, beta and g of some rows."""
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator).to(DEVICE)

    q, k = (torch.nn.functional.normalize(random(KEY_HEADS, DIM), dim=-1) for _ in range(2))
    return q, k, random(HEADS, DIM), random(HEADS).sigmoid(), -random(HEADS).abs()


def head_map() -> Tensor:
    return torch.arange(HEADS, device=DEVICE) % KEY_HEADS


@pytest.mark.parametrize(("op", "kind"), [(gdn_verify, "decode"), (gdn_prefill, "prefill")])
def test_the_state_of_a_far_lane(op: Callable[..., tuple[Tensor, Tensor]], kind: RowKind) -> None:
    lanes = LIMIT // (HEADS * DIM * DIM) + 2
    states = large(lanes, HEADS, DIM, DIM)
    states[-1] = near = torch.randn(HEADS, DIM, DIM, device=DEVICE)
    arguments = inputs(3)
    expected = op(*arguments, near.unsqueeze(0), head_map(), pack(kind, [3], [64], DEVICE, [0]))
    got = op(*arguments, states, head_map(), pack(kind, [3], [64], DEVICE, [lanes - 1]))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_replay_of_a_far_layer() -> None:
    layers = 24
    lanes = LIMIT // (layers * HEADS * DIM * DIM) + 2
    states = large(layers, lanes, HEADS, DIM, DIM)
    near = torch.randn(layers, 1, HEADS, DIM, DIM, device=DEVICE)
    states[:, -1:] = near
    _, k, d, _, g = inputs(layers * 4)
    k, d, g = (x.unflatten(0, (layers, 4)) for x in (k, d, g))
    keep = torch.tensor([3], device=DEVICE)
    gdn_replay(near, k, d, g, keep, head_map(), pack("decode", [4], [64], DEVICE, [0]))
    gdn_replay(states, k, d, g, keep, head_map(), pack("decode", [4], [64], DEVICE, [lanes - 1]))
    assert torch.equal(states[:, -1:], near)


def test_raw_inputs_of_a_far_layer() -> None:
    layers = 24
    rows = LIMIT // (layers * CHANNELS) + 64
    raw = large(layers, rows, CHANNELS)
    raw[:, -4:] = near = torch.randn(layers, 4, CHANNELS, device=DEVICE)
    history = torch.zeros(layers, 2, 3, CHANNELS, device=DEVICE)
    batch = pack("decode", [rows - 4, 4], [0, 64], DEVICE, [0, 1])
    advance_history(history, raw, torch.tensor([0, 4], device=DEVICE), batch)
    assert torch.equal(history[:, 1], near[:, 1:]) and not history[:, 0].any()


def test_logits_of_a_far_row() -> None:
    vocab = 248_320
    rows = LIMIT // vocab + 4
    logits = large(rows, vocab)
    logits[:] = 0.0
    logits[-1] = near = torch.randn(vocab, device=DEVICE)
    assert argmax(logits)[-1] == near.argmax()
    values, ids = top_k(logits, 16)
    expected_values, expected_ids = top_k(near.unsqueeze(0), 16)
    assert torch.equal(values[-1:], expected_values) and torch.equal(ids[-1:], expected_ids)
    facts = [torch.full((rows,), value, device=DEVICE) for value in (0.7, 0.0)]
    facts += [torch.full((rows,), value, dtype=torch.int64, device=DEVICE) for value in (9, 0, 77)]
    assert draw(logits, *facts)[-1] == draw(near.unsqueeze(0), *(fact[-1:] for fact in facts))[0]
