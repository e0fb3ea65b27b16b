"""Kernels that begin before the last one has ended give the bits of kernels that run one after another: a small decode round
from the embedding to the commit, run eagerly and as a CUDA graph, whose memory is used again and again."""

from __future__ import annotations

import importlib

import pytest
import torch
from block_data import random_blocks
from torch import Tensor

from paceline.batch import facts, unpack
from paceline.config import PAGE_SIZE
from paceline.ops.activation import swiglu
from paceline.ops.attention import attention_inputs, gated_attention, value_bound
from paceline.ops.conv import Convolved, advance_history, dynamic_conv
from paceline.ops.gdn import ReplayLog, gdn_mixer, gdn_replay, output_bound
from paceline.ops.kv import PagedTensor, StagedRows, allocate_pages, slots, write_kept, write_rows
from paceline.ops.linear import Merged, PackedWeight, Rows, TiledWeight, linear, linears, merge, pack
from paceline.ops.norm import add_rms_norm, add_rms_norm_twice, rms_norm
from paceline.ops.quant import dequantize_rows
from paceline.ops.rope import RopeTable, norm_and_rope
from paceline.ops.sample import draw, last_kept
from paceline.ops.selector import selector_walk
from paceline.ops.topk import top_k

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda")
HIDDEN, INNER, VOCAB, EPS = 1024, 3072, 5000, 1e-6
KEY_HEADS, VALUE_HEADS, DIM, TAPS = 4, 8, 128, 4
HEADS, KV_HEADS, HEAD_DIM, HALF = 4, 2, 256, 32
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM
LANES, LENGTHS, BASES, ROWS, REAL = 4, [5, 1], [700, 300], 8, 6
"""Two spans, one that has no rows, and two rows that are nobody's."""
LAYERS, ROUNDS = 4, 50
TOP_K = [0, 100, 40, 40, 40, 40]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def packed(qtype: str, outputs: int, inputs: int, seed: int) -> PackedWeight | TiledWeight:
    return pack(random_blocks(qtype, outputs, inputs, seed), torch.bfloat16, DEVICE)


class Round:
    """``run`` computes everything from the token ids alone, so that it may be repeated."""

    def __init__(self) -> None:
        self.batch = unpack(
            "decode",
            torch.from_numpy(facts(LENGTHS, BASES, [2, 0], ROWS, 3, LANES - 1)).to(DEVICE),
            [max(LENGTHS)] * 3,
            [max(BASES)] * 3,
            ROWS,
            3,
        )
        self.table = random_blocks("Q6_K", VOCAB, HIDDEN).to(DEVICE)
        self.norm, self.head_norm = 1e-3 * randn(HIDDEN), 1e-3 * randn(DIM)
        self.in_proj = self.merged("Q5_K", HIDDEN, CHANNELS, VALUE_HEADS * DIM, VALUE_HEADS, VALUE_HEADS)
        self.bound = output_bound(self.in_proj, 1, self.head_norm)
        self.out_proj = packed("Q6_K", HIDDEN, VALUE_HEADS * DIM, 1)
        self.qkv = self.merged("Q4_K", HIDDEN, 2 * HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        self.value_bound = value_bound(self.qkv, 2, self.norm)
        self.o_proj = packed("F16", HIDDEN, HEADS * HEAD_DIM, 2)
        self.gate_up = self.merged("IQ4_XS", HIDDEN, INNER, INNER)
        self.down = packed("Q8_0", HIDDEN, INNER, 3)
        self.head = packed("Q4_K", VOCAB, HIDDEN, 4)
        self.conv, self.decay, self.dt_bias = randn(CHANNELS, TAPS), -randn(VALUE_HEADS).abs(), randn(VALUE_HEADS)
        self.head_map = torch.arange(VALUE_HEADS, device=DEVICE) % KEY_HEADS
        self.before = 0.1 * randn(LAYERS, LANES, VALUE_HEADS, DIM, DIM), randn(LAYERS, LANES, TAPS - 1, CHANNELS)
        self.state, self.history = (part.clone() for part in self.before)
        sizes = ((CHANNELS,), (KEY_HEADS, DIM), (VALUE_HEADS, DIM), (VALUE_HEADS,))
        self.log = ReplayLog(*(torch.zeros(LAYERS, ROWS, *size, device=DEVICE) for size in sizes))
        self.keep = torch.tensor([3, 1, 0], device=DEVICE)
        width = 1 + (max(BASES) + ROWS) // PAGE_SIZE
        self.pages = torch.randperm(LANES * width, device=DEVICE, dtype=torch.int32).view(LANES, width)
        self.k, self.v = (self.filled(LANES * width, seed) for seed in (5, 6))
        self.context = self.filled(LANES * width, 11)
        self.angles = randn(ROWS, 1, HALF, seed=7), randn(ROWS, 1, HALF, seed=8)
        self.per_head, self.per_layer = 1.0 + 0.1 * randn(HEAD_DIM), 1.0 + 0.1 * randn(2, HEAD_DIM)
        self.rope = RopeTable(max(BASES) + ROWS, 2 * HALF, 1e6, None, DEVICE)
        self.codebooks = randn(VOCAB, 64, seed=9), randn(VOCAB, 64, seed=10)
        self.base_kernel, self.kernels = randn(2, HIDDEN), packed("Q8_0", 16, HIDDEN, 6)
        numbers = torch.arange(REAL, device=DEVICE)
        self.sampling = torch.full((REAL,), 0.8, device=DEVICE), numbers + 3, torch.zeros_like(numbers), numbers
        self.limits = torch.tensor(TOP_K, device=DEVICE), torch.full((REAL,), 0.9, device=DEVICE)

    @staticmethod
    def merged(qtype: str, inputs: int, *outputs: int) -> Merged:
        return merge([packed(qtype, count, inputs, seed) for seed, count in enumerate(outputs)])

    @staticmethod
    def filled(pages: int, seed: int) -> PagedTensor:
        cache = allocate_pages("q8_0", pages, KV_HEADS, HEAD_DIM, DEVICE)
        rows = pages * PAGE_SIZE
        write_rows(cache, torch.arange(rows, device=DEVICE), randn(rows, KV_HEADS, HEAD_DIM, seed=seed))
        return cache

    def run(self, token_ids: Tensor) -> list[Tensor]:
        self.batch = self.batch.without_plans()
        self.state.copy_(self.before[0])
        self.history.copy_(self.before[1])
        x, delta = dequantize_rows(self.table, token_ids), None
        for layer in range(LAYERS):
            x, n = add_rms_norm(x, delta, self.norm, EPS, torch.float16)
            delta = self.attend(n) if layer % 2 else self.walk(n, layer)
            x, n = add_rms_norm(x, delta, self.norm, EPS, torch.float16)
            gate, up = linears(n, self.gate_up, "decode")
            delta = linear(swiglu(gate, up, torch.float16), self.down, "decode")
        x, n = add_rms_norm(x, delta, self.norm, EPS, torch.float16)
        logits = linear(n, self.head, "decode")
        gdn_replay(self.state, self.log.k, self.log.d, self.log.g, self.keep, self.head_map, self.batch)
        advance_history(self.history, self.log.raw, self.keep, self.batch)
        values = rms_norm(x, 1e3 * self.norm, EPS)[:, : KV_HEADS * HEAD_DIM].unflatten(1, (KV_HEADS, HEAD_DIM))
        write_kept([StagedRows(self.context, values, self.pages)], self.keep, self.batch)
        stored = [part.data[self.pages[: LANES - 1]] for part in (self.k, self.v, self.context)]
        return [self.state, self.history, *stored, *self.picks(x[:REAL], logits[:REAL])]

    def walk(self, n: Tensor | Rows, layer: int) -> Tensor:
        raw, z, b, a = linears(n, self.in_proj, "decode")
        log = ReplayLog(*(part[layer] for part in self.log))
        z = z.unflatten(-1, (VALUE_HEADS, DIM))
        of_layer = (self.history[layer], self.conv, self.decay, self.dt_bias, KEY_HEADS, self.state[layer], self.head_map)
        norms = n.norms if isinstance(n, Rows) else None
        rest = (self.head_norm, EPS, self.batch, log, torch.float16, norms, self.bound)
        return linear(gdn_mixer(raw, z, b, a, *of_layer, *rest), self.out_proj, "decode")

    def attend(self, n: Tensor | Rows) -> Tensor:
        q, k, v = linears(n, self.qkv, "decode")
        q, gate = q.unflatten(-1, (HEADS, 2, HEAD_DIM)).unbind(2)
        k, v = (x.unflatten(-1, (KV_HEADS, HEAD_DIM)) for x in (k, v))
        weights = (self.per_head, self.per_head, EPS)
        q = attention_inputs(q, k, v, *weights, self.angles, self.k, self.v, slots(self.pages, self.batch))
        of_lanes = (self.k, self.v, self.pages, self.batch)
        scale, bound = HEAD_DIM**-0.5, self.value_bound
        o = gated_attention(q, gate, *of_lanes, scale=scale, causal=True, operand=torch.float16, bound=bound)
        return linear(o, self.o_proj, "decode")

    def picks(self, x: Tensor, logits: Tensor) -> list[Tensor]:
        """What sampling and a drafter do with the rows."""
        temperature, seed, choice, position = self.sampling
        cut = last_kept(logits, temperature, *self.limits, TOP_K)
        drawn = draw(logits, temperature, torch.zeros_like(temperature), seed, choice, position, cut)
        _, n, rows = add_rms_norm_twice(x, None, 1e3 * self.norm, EPS, torch.float16)
        kernels = linear(rows, self.kernels, "decode").view(2, -1, 2, 8)
        mixed = dynamic_conv(n.unflatten(0, (2, -1)), self.base_kernel, kernels)
        assert isinstance(mixed, Tensor)
        left = Convolved(mixed.flatten(0, 1), self.base_kernel, kernels)
        mixed = add_rms_norm_twice(n, left, 1e3 * self.norm, EPS, torch.float16)[1]
        heads = [part.unflatten(1, (-1, HEAD_DIM)) for part in mixed.chunk(2, 1)]
        turned = norm_and_rope(heads, self.per_layer, EPS, self.rope, self.batch.positions[:REAL])
        scores, ids = (part.unflatten(0, (2, -1)) for part in top_k(logits, 16))
        query = mixed[:, :64].reshape(2, -1, 64)
        return [x, logits, cut, drawn, turned, selector_walk(scores, ids, query, drawn[:2], *self.codebooks, *self.sampling)]


def clones(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def assert_equal(got: list[Tensor], expected: list[Tensor], number: int) -> None:
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"result {index} of round {number}"


def test_bits_are_those_of_one_after_another() -> None:
    whole = Round()
    inputs = [torch.randint(VOCAB, (ROWS,), generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in range(ROUNDS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("paceline.ops.launch"), "_has_pdl", lambda device: False)
        expected = [clones(whole.run(ids)) for ids in inputs]
    assert all(part.isfinite().all() for part in expected[0])
    assert all(not torch.equal(a, b) for a, b in zip(expected[0], expected[1], strict=True))

    for number, ids in enumerate(inputs):
        assert_equal(whole.run(ids), expected[number], number)

    static = inputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = whole.run(static)
    results = []
    for ids in inputs:  # nothing waits between them
        static.copy_(ids)
        graph.replay()
        results.append(clones(outputs))
    for number, got in enumerate(results):
        assert_equal(got, expected[number], number)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0"
)
def test_launches_ask_for_it() -> None:
    rms_norm(randn(3, 64), randn(64), EPS)
    kernel = importlib.import_module("paceline.ops.norm.kernel")._norm
    compiled = list(kernel.device_caches[torch.cuda.current_device()][0].values())
    assert any(one.metadata.launch_pdl and "griddepcontrol.wait" in one.asm["ptx"] for one in compiled)
