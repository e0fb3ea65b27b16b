"""The table of ``paceline bench ops``: what is run, at which sizes, and what it must move or compute.

A function per op yields its cases, and ``OPS`` lists the functions. Nothing is allocated before a case is prepared. Bytes
are those that must cross the memory bus at least once (weights as they are in the file, stored K/V, states, activations in
float32), operations those of the mathematics, so that neither depends on how an op is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.batch import pack
from paceline.bench.timing import rotation
from paceline.config import PAGE_SIZE
from paceline.ops import conv, dispatch, gdn, linear, norm, topk
from paceline.ops.activation import gated_heads, swiglu
from paceline.ops.attention import attention, attention_inputs
from paceline.ops.kv import PagedTensor, allocate_pages, bytes_per_token, read_pages, write_rows
from paceline.ops.mlp import longest_rows, mlp_hidden
from paceline.ops.quant import BLOCKS, QuantTensor, dequantize
from paceline.ops.rope import RopeTable, apply_rope
from paceline.ops.sample import draw
from paceline.ops.selector import selector_walk
from paceline.types import RowKind

FLOAT32 = 1e-5
"""Error of an op in float32, beside the norm of the reference."""
SPLIT_TF32 = 1e-4
FLOAT16 = 1e-3
"""Error where operands or results are rounded to 16 bits."""
EXACT = 0.0
OPERAND = torch.float16
"""What ops that are followed by products leave on a GPU."""


@dataclass(frozen=True, slots=True)
class Product:
    """A weight [N, K] of ``form``; ``prompts`` says that prompt rows go through it too."""

    name: str
    form: str
    n: int
    k: int
    prompts: bool = True


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a pair that ops see, and how many rows, lanes and tokens of context to try them with."""

    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    key_heads: int
    value_heads: int
    gdn_layers: int
    draft_heads: int
    draft_kv_heads: int
    window: int
    selector_rank: int
    products: tuple[Product, ...]
    decode_rows: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    lanes: tuple[int, ...]
    contexts: tuple[int, ...]
    gdn_dim: int = 128
    conv_taps: int = 4
    draft_head_dim: int = 128
    block: int = 8
    draft_taps: int = 2
    draft_group: int = 16
    candidates: int = 16

    @property
    def conv_channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.gdn_dim


SHAPES = {
    "qwen3.8-27b": Geometry(
        hidden=5120,
        intermediate=17408,
        vocab=248_320,
        heads=24,
        kv_heads=4,
        head_dim=256,
        rotary_dim=64,
        key_heads=16,
        value_heads=48,
        gdn_layers=48,
        draft_heads=32,
        draft_kv_heads=8,
        window=2048,
        selector_rank=256,
        products=(
            Product("gate_up", "IQ4_XS", 34816, 5120),
            Product("down", "IQ4_XS", 5120, 17408),
            Product("qkvz", "IQ4_XS", 16640, 5120),
            Product("out", "IQ4_XS", 5120, 6144),
            Product("attn_qkv", "IQ4_XS", 14336, 5120),
            Product("head", "Q6_K", 248_320, 5120, prompts=False),
            Product("draft fc", "Q8_0", 5120, 25600),
            Product("draft gate_up", "Q8_0", 34816, 5120, prompts=False),
            Product("draft down", "Q8_0", 5120, 17408, prompts=False),
            Product("draft qkv", "Q8_0", 6144, 5120),
            Product("draft out", "Q8_0", 5120, 4096, prompts=False),
        ),
        decode_rows=(1, 8, 16, 48, 64),
        prompt_rows=(512, 2048),
        lanes=(1, 6),
        contexts=(1024, 8192, 32_768, 131_072),
    ),
    "demo": Geometry(
        hidden=512,
        intermediate=1536,
        vocab=16_384,
        heads=4,
        kv_heads=2,
        head_dim=256,
        rotary_dim=64,
        key_heads=2,
        value_heads=6,
        gdn_layers=6,
        draft_heads=4,
        draft_kv_heads=2,
        window=2048,
        selector_rank=128,
        products=(
            Product("gate_up", "IQ4_XS", 3072, 512),
            Product("down", "IQ4_XS", 512, 1536),
            Product("head", "Q6_K", 16_384, 512, prompts=False),
            Product("draft fc", "Q8_0", 512, 1536),
        ),
        decode_rows=(1, 16),
        prompt_rows=(64,),
        lanes=(1, 2),
        contexts=(256,),
    ),
}


@dataclass(frozen=True, slots=True)
class Work:
    """A prepared case: ``run(copy)`` is one launch on one of ``copies`` sets of operands, ``error()`` compares it with the
    reference, which may be off by ``limit``."""

    run: Callable[[int], Any]
    error: Callable[[], float]
    limit: float
    copies: int
    bytes: int
    operations: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    prepare: Callable[[], Work]


Cases = Iterator[Case]


# -- comparing -------------------------------------------------------------------------------------------------------------


def difference(got: Any, want: Any) -> float:
    """Norm of the difference beside the norm of what is wanted, the largest over all tensors; of integers, the share that
    differs. A NaN in what was got makes it NaN, which is within no limit."""
    worst = 0.0
    for a, b in zip(_tensors(got), _tensors(want), strict=True):
        if b.dtype.is_floating_point:
            error = float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300))
        else:
            error = float((a != b).double().mean())
        worst = error if error != error else max(worst, error)
        if worst != worst:
            break
    return worst


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of a result; rows that were made for a product are read as what they stand for."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, linear.Rows):
        return [value.values[: value.rows, : value.columns].float() * value.factors[: value.rows, None]]
    return [tensor for part in value for tensor in _tensors(part)]


def _poison(device: torch.device) -> None:
    """Leave NaN in the memory that the next ``torch.empty`` is likely to get."""
    torch.full((1 << 24,), torch.nan, device=device)


def _against_reference(run: Callable[[int], Any], device: torch.device) -> float:
    _poison(device)
    got = run(0)
    with dispatch.force("ref"):
        want = run(0)
    return difference(got, want)


def _pure(op: Callable[..., Any], operands: list[tuple[Any, ...]], limit: float, nbytes: int, operations: int = 0) -> Work:
    """An op that changes nothing, on some sets of operands."""
    device = next(value.device for value in operands[0] if isinstance(value, Tensor))

    def run(copy: int) -> Any:
        return op(*operands[copy])

    return Work(run, lambda: _against_reference(run, device), limit, len(operands), nbytes, operations)


# -- products --------------------------------------------------------------------------------------------------------------

_FLOAT16_FIELDS = {"Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
"""Bytes of a block at which a float16 begins: any other byte may be anything."""


def random_blocks(form: str, rows: int, columns: int, device: torch.device) -> QuantTensor:
    """A weight [rows, columns] of random blocks."""
    elements, size, _ = BLOCKS[form]
    count = rows * columns // elements
    blocks = torch.randint(0, 256, (count, size), dtype=torch.uint8, device=device)
    for at in _FLOAT16_FIELDS[form]:
        factor = (1e-3 * torch.randn(count, 1, device=device)).half()
        blocks[:, at : at + 2] = factor.view(torch.uint8)
    return QuantTensor(blocks.view(rows, -1), form, (rows, columns))


class _Weights:
    """Copies of one random weight, packed for the device, and its values, made when they are first asked for."""

    def __init__(self, product: Product, device: torch.device) -> None:
        self.product, self.device = product, device

    @functools.cached_property
    def stored(self) -> QuantTensor:
        return random_blocks(self.product.form, self.product.n, self.product.k, self.device)

    @functools.cached_property
    def packed(self) -> list[Any]:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return [linear.pack(self.stored, dtype, self.device) for _ in range(rotation(self.stored.nbytes, self.device))]

    @functools.cached_property
    def values(self) -> Tensor:
        return dequantize(self.stored)


def linears(shape: Geometry, device: torch.device) -> Cases:
    for product in shape.products:
        weights = _Weights(product, device)
        kinds: list[tuple[RowKind, tuple[int, ...]]] = [("decode", shape.decode_rows)]
        if product.prompts:
            kinds.append(("prefill", shape.prompt_rows))
        for kind, counts in kinds:
            for rows in counts:
                name = f"linear {kind} {product.name} {product.form} {product.n}x{product.k} M={rows}"
                yield Case(name, functools.partial(_linear, weights, kind, rows))


def _linear(weights: _Weights, kind: RowKind, rows: int) -> Work:
    n, k = weights.product.n, weights.product.k
    gate, up = torch.randn(2, rows, k, device=weights.device)
    x = swiglu(gate, up, OPERAND)  # rows as the op before leaves them

    def run(copy: int) -> Tensor:
        return linear.linear(x, weights.packed[copy], kind)

    def error() -> float:
        _poison(weights.device)
        return difference(run(0), _tensors(x)[0] @ weights.values.T)

    nbytes = weights.stored.nbytes + 4 * rows * (n + k)
    return Work(run, error, FLOAT16, len(weights.packed), nbytes, 2 * rows * n * k)


def hidden(shape: Geometry, device: torch.device) -> Cases:
    """The first half of an MLP, on rows that come from a norm."""
    (product,) = (product for product in shape.products if product.name == "gate_up")
    weights = _Weights(product, device)
    for rows in shape.decode_rows:
        name = f"mlp hidden decode {product.form} {product.n}x{product.k} M={rows}"
        yield Case(name, functools.partial(_hidden, weights, rows))


def _hidden(weights: _Weights, rows: int) -> Work:
    n, k = weights.product.n, weights.product.k
    halves = ((0, slice(0, n // 2)), (0, slice(n // 2, n)))
    merged = [linear.Merged((weight,), halves) for weight in weights.packed]
    longest = longest_rows(merged[0])
    x, ones = torch.randn(rows, k, device=weights.device), torch.ones(k, device=weights.device)
    _, rows_of_x = norm.add_rms_norm(x, None, ones, 1e-6, OPERAND)

    def run(copy: int) -> Tensor | linear.Rows:
        return mlp_hidden(rows_of_x, merged[copy], longest, "decode", OPERAND)

    def error() -> float:
        _poison(weights.device)
        gate, up = (_tensors(rows_of_x)[0] @ weights.values.T).chunk(2, dim=1)
        got = run(0)
        with dispatch.force("ref"):
            return difference(got, swiglu(gate, up))

    nbytes = weights.stored.nbytes + 4 * rows * (n // 2 + k)
    return Work(run, error, FLOAT16, len(merged), nbytes, 2 * rows * n * k)


# -- attention -------------------------------------------------------------------------------------------------------------


def attentions(shape: Geometry, device: torch.device) -> Cases:
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    for context in shape.contexts:
        for lanes in shape.lanes:
            for width in (1, shape.block):
                yield Case(
                    f"attention decode q8_0 L={lanes} W={width} context {context}",
                    functools.partial(_attention, heads, "decode", lanes, width, context, None, device),
                )
    for rows in shape.prompt_rows:
        for context in sorted({rows, *(c for c in shape.contexts[:3] if c > rows)}):
            yield Case(
                f"attention prefill q8_0 rows={rows} context {context}",
                functools.partial(_attention, heads, "prefill", 1, rows, context, None, device),
            )
    draft = (shape.draft_heads, shape.draft_kv_heads, shape.draft_head_dim)
    for lanes in shape.lanes:
        context = shape.contexts[min(1, len(shape.contexts) - 1)]
        yield Case(
            f"attention draft q8_0 L={lanes} W={shape.block} context {context} window {shape.window}",
            functools.partial(_attention, draft, "decode", lanes, shape.block, context, shape.window, device),
        )


def _attention(
    geometry: tuple[int, int, int],
    kind: RowKind,
    lanes: int,
    rows: int,
    context: int,
    window: int | None,
    device: torch.device,
) -> Work:
    """The last ``rows`` of ``context`` tokens of every lane; with a window, a drafter's block, which looks both ways."""
    heads, kv_heads, dim = geometry
    seen = context if window is None else min(context, window + rows)
    nbytes = 2 * lanes * seen * bytes_per_token("q8_0", kv_heads, dim)
    pages = -(-context // PAGE_SIZE)
    copies = rotation(nbytes, device)
    keys, values = (_random_pages(copies * lanes * pages, kv_heads, dim, device) for _ in range(2))
    tables = torch.randperm(copies * lanes * pages, device=device).to(torch.int32).view(copies, lanes, pages).unbind()
    batch = pack(kind, [rows] * lanes, [context - rows] * lanes, device)
    q = torch.randn(lanes * rows, heads, dim, device=device)

    def run(copy: int) -> Tensor:
        return attention(q, keys, values, tables[copy], batch, scale=dim**-0.5, causal=window is None, window=window)

    visible = sum(min(p + 1, seen) for p in range(context - rows, context)) if window is None else rows * seen
    activations = 8 * q.numel()
    error = functools.partial(_against_reference, run, device)
    return Work(run, error, 2 * FLOAT16, copies, nbytes + activations, 4 * lanes * heads * dim * visible)


def _random_pages(pages: int, heads: int, dim: int, device: torch.device) -> PagedTensor:
    cache = allocate_pages("q8_0", pages, heads, dim, device)
    assert cache.scale is not None
    cache.data.random_(-127, 128)
    cache.scale.uniform_(1e-3, 2e-2)
    return cache


def kv_writes(shape: Geometry, device: torch.device) -> Cases:
    for rows in (*shape.decode_rows, *shape.prompt_rows):
        yield Case(f"kv write q8_0 rows={rows}", functools.partial(_kv_write, shape, rows, device))
        yield Case(f"kv attention_inputs q8_0 rows={rows}", functools.partial(_attention_inputs, shape, rows, device))


def _attention_inputs(shape: Geometry, rows: int, device: torch.device) -> Work:
    pages = torch.arange(-(-rows // PAGE_SIZE), device=device)
    keys, values = (_random_pages(len(pages), shape.kv_heads, shape.head_dim, device) for _ in range(2))
    q = torch.randn(rows, shape.heads, shape.head_dim, device=device)
    k, v = torch.randn(2, rows, shape.kv_heads, shape.head_dim, device=device)
    q_weight, k_weight = torch.randn(2, shape.head_dim, device=device)
    angles = RopeTable(rows, shape.rotary_dim, 1e7, None, device).at(torch.arange(rows, device=device))
    slots = torch.randperm(rows, device=device)

    def run(copy: int) -> Tensor:
        return attention_inputs(q, k, v, q_weight, k_weight, 1e-6, angles, keys, values, slots)

    def results() -> tuple[Tensor, ...]:
        return run(0), *(read_pages(cache, pages).flatten(0, 1)[slots] for cache in (keys, values))

    def error() -> float:
        got = results()
        with dispatch.force("ref"):
            return difference(got, results())

    stored = 2 * rows * bytes_per_token("q8_0", shape.kv_heads, shape.head_dim)
    # A value that lies between two levels may be rounded to either, by whatever is off in its last bit.
    return Work(run, error, FLOAT16, 1, 2 * q.nbytes + 2 * k.nbytes + stored)


def _kv_write(shape: Geometry, rows: int, device: torch.device) -> Work:
    caches = [allocate_pages("q8_0", -(-rows // PAGE_SIZE), shape.kv_heads, shape.head_dim, device) for _ in range(2)]
    slots = torch.randperm(rows, device=device)
    values = torch.randn(rows, shape.kv_heads, shape.head_dim, device=device)

    def error() -> float:
        write_rows(caches[0], slots, values)
        with dispatch.force("ref"):
            write_rows(caches[1], slots, values)
        pages = torch.arange(len(caches[0].data), device=device)
        return difference(read_pages(caches[0], pages), read_pages(caches[1], pages))

    nbytes = values.nbytes + rows * bytes_per_token("q8_0", shape.kv_heads, shape.head_dim)
    return Work(lambda copy: write_rows(caches[0], slots, values), error, FLOAT32, 1, nbytes)


# -- the gated delta rule --------------------------------------------------------------------------------------------------


def gdns(shape: Geometry, device: torch.device) -> Cases:
    for lanes in shape.lanes:
        for width in (1, shape.block):
            yield Case(
                f"gdn verify L={lanes} W={width}",
                functools.partial(_gdn, shape, "decode", lanes, width, gdn.gdn_verify, device),
            )
        for width in (1, shape.block):
            yield Case(f"gdn mixer L={lanes} W={width}", functools.partial(_gdn_mixer, shape, lanes, width, device))
    for lanes in shape.lanes:
        name = f"gdn replay {shape.gdn_layers} layers L={lanes} keep {shape.block // 2}"
        yield Case(name, functools.partial(_gdn_replay, shape, lanes, device))
    for rows in shape.prompt_rows:
        yield Case(f"gdn prefill rows={rows}", functools.partial(_gdn, shape, "prefill", 1, rows, gdn.gdn_prefill, device))
    for rows in (*shape.decode_rows, *shape.prompt_rows):
        kind: RowKind = "prefill" if rows in shape.prompt_rows else "decode"
        yield Case(f"gdn inputs {kind} rows={rows}", functools.partial(_gdn_inputs, shape, kind, rows, device))


def _head_map(shape: Geometry, device: torch.device) -> Tensor:
    return torch.arange(shape.value_heads, device=device) % shape.key_heads


def _delta_inputs(shape: Geometry, rows: int, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v, beta, g as a model makes them: unit keys, decays below one."""
    q, k = (norm.l2_norm(torch.randn(rows, shape.key_heads, shape.gdn_dim, device=device)) for _ in range(2))
    v = torch.randn(rows, shape.value_heads, shape.gdn_dim, device=device)
    beta, g = (torch.rand(rows, shape.value_heads, device=device) for _ in range(2))
    return q * shape.gdn_dim**-0.5, k, v, beta, -g


def _gdn(shape: Geometry, kind: RowKind, lanes: int, rows: int, op: Callable[..., Any], device: torch.device) -> Work:
    """Verify or prefill of ``rows`` of every lane in one layer; another layer's state each time."""
    heads, dim = shape.value_heads, shape.gdn_dim
    state_bytes = 4 * lanes * heads * dim * dim
    copies = rotation(state_bytes, device)
    states = torch.randn(copies, lanes, heads, dim, dim, device=device).unbind()
    batch = pack(kind, [rows] * lanes, [0] * lanes, device)
    inputs, head_map = _delta_inputs(shape, lanes * rows, device), _head_map(shape, device)
    activations = sum(x.nbytes for x in inputs) + inputs[2].nbytes
    operands = [(*inputs, state, head_map, batch) for state in states]
    if kind == "decode":  # two reads of the state and its advance; d is written beside o
        work = lanes * rows * heads * 7 * dim * dim
        return _pure(op, operands, FLOAT32, state_bytes + activations + inputs[2].nbytes, work)
    chunks = -(-lanes * rows // 64)
    per_chunk = 2 * (5 * 64 * 64 * dim + 3 * 64 * dim * dim) + 64**3 // 3
    return _pure(op, operands, SPLIT_TF32, 2 * state_bytes + activations, chunks * heads * per_chunk)


def _gdn_mixer(shape: Geometry, lanes: int, width: int, device: torch.device) -> Work:
    """Generated rows of one layer from its first product to its last; another layer's state each time."""
    heads, dim, keys, rows = shape.value_heads, shape.gdn_dim, shape.key_heads, lanes * width
    state_bytes = 4 * lanes * heads * dim * dim
    states = torch.randn(rotation(state_bytes, device), lanes, heads, dim, dim, device=device).unbind()
    raw, z = torch.randn(rows, shape.conv_channels, device=device), torch.randn(rows, heads, dim, device=device)
    b, a = (torch.randn(rows, heads, device=device) for _ in range(2))
    history = torch.randn(lanes, shape.conv_taps - 1, shape.conv_channels, device=device)
    weight, norm = torch.randn(shape.conv_channels, shape.conv_taps, device=device), torch.rand(dim, device=device)
    decay, dt_bias = -torch.rand(heads, device=device), torch.randn(heads, device=device)
    batch, head_map = pack("decode", [width] * lanes, [0] * lanes, device), _head_map(shape, device)
    log = gdn.ReplayLog(torch.empty_like(raw), raw.new_empty(rows, keys, dim), torch.empty_like(z), torch.empty_like(b))
    norms, bound = torch.ones(-(-rows // 256) * 256, device=device), 8.0 * dim**0.5
    before, behind = (raw, z, b, a, history, weight, decay, dt_bias, keys), (head_map, norm, 1e-6, batch, log, OPERAND)
    operands = [(*before, state, *behind, norms, bound) for state in states]
    nbytes = state_bytes + 2 * raw.nbytes + 3 * z.nbytes + history.nbytes + weight.nbytes
    return _pure(gdn.gdn_mixer, operands, FLOAT16, nbytes, rows * heads * 7 * dim * dim)


def _gdn_replay(shape: Geometry, lanes: int, device: torch.device) -> Work:
    """Half a block of every lane, all layers at once."""
    layers, heads, dim, kept = shape.gdn_layers, shape.value_heads, shape.gdn_dim, shape.block // 2
    batch = pack("decode", [shape.block] * lanes, [0] * lanes, device)
    _, k, d, _, g = _delta_inputs(shape, lanes * shape.block, device)
    k, d, g = (x.expand(layers, *x.shape).contiguous() for x in (k, d, g))
    keep, head_map = torch.full((lanes,), kept, device=device), _head_map(shape, device)
    state = torch.randn(layers, lanes, heads, dim, dim, device=device)

    def replayed(state: Tensor) -> Tensor:
        gdn.gdn_replay(state, k, d, g, keep, head_map, batch)
        return state

    def error() -> float:
        got = replayed(state.clone())
        with dispatch.force("ref"):
            return difference(got, replayed(state.clone()))

    read = kept * (k.nbytes + d.nbytes + g.nbytes) // shape.block
    work = layers * lanes * kept * heads * 3 * dim * dim
    return Work(lambda copy: replayed(state), error, FLOAT32, 1, 2 * state.nbytes + read, work)


def _gdn_inputs(shape: Geometry, kind: RowKind, rows: int, device: torch.device) -> Work:
    channels, heads = shape.conv_channels, shape.value_heads
    lanes = -(-rows // shape.block) if kind == "decode" else 1
    lengths = [rows // lanes + (lane < rows % lanes) for lane in range(lanes)]
    raw = torch.randn(rows, channels, device=device)
    b, a = (torch.randn(rows, heads, device=device) for _ in range(2))
    history = torch.randn(lanes, shape.conv_taps - 1, channels, device=device)
    weight = torch.randn(channels, shape.conv_taps, device=device)
    decay, dt_bias = -torch.rand(heads, device=device), torch.randn(heads, device=device)
    batch = pack(kind, lengths, [0] * lanes, device)
    facts = (raw, b, a, history, weight, decay, dt_bias, shape.key_heads, shape.gdn_dim, batch)
    return _pure(gdn.gdn_inputs, [facts], FLOAT32, 2 * raw.nbytes + history.nbytes + weight.nbytes + 4 * b.nbytes)


# -- convolutions, norms, elementwise --------------------------------------------------------------------------------------


def convolutions(shape: Geometry, device: torch.device) -> Cases:
    for rows in (*shape.decode_rows, *shape.prompt_rows):
        yield Case(f"causal_conv rows={rows}", functools.partial(_causal_conv, shape, rows, device))
    for lanes in shape.lanes:
        yield Case(f"dynamic_conv L={lanes} B={shape.block}", functools.partial(_dynamic_conv, shape, lanes, device))
        name = f"advance_history {shape.gdn_layers} layers L={lanes}"
        yield Case(name, functools.partial(_advance_history, shape, lanes, device))


def _causal_conv(shape: Geometry, rows: int, device: torch.device) -> Work:
    channels = shape.conv_channels
    x = torch.randn(rows, channels, device=device)
    history = torch.randn(1, shape.conv_taps - 1, channels, device=device)
    weight = torch.randn(channels, shape.conv_taps, device=device)
    kind: RowKind = "prefill" if rows in shape.prompt_rows else "decode"
    facts = (x, history, weight, pack(kind, [rows], [0], device))
    return _pure(conv.causal_conv, [facts], FLOAT32, 2 * x.nbytes + history.nbytes + weight.nbytes)


def _dynamic_conv(shape: Geometry, lanes: int, device: torch.device) -> Work:
    x = torch.randn(lanes, shape.block, shape.hidden, device=device)
    base = torch.randn(shape.draft_taps, shape.hidden, device=device)
    dynamic = torch.randn(lanes, shape.block, shape.draft_taps, shape.hidden // shape.draft_group, device=device)
    return _pure(conv.dynamic_conv, [(x, base, dynamic)], FLOAT32, 2 * x.nbytes + base.nbytes + dynamic.nbytes)


def _advance_history(shape: Geometry, lanes: int, device: torch.device) -> Work:
    channels, width = shape.conv_channels, shape.conv_taps - 1
    history = torch.randn(shape.gdn_layers, lanes, width, channels, device=device)
    raw = torch.randn(shape.gdn_layers, lanes * shape.block, channels, device=device)
    keep = torch.full((lanes,), shape.block // 2, device=device)
    batch = pack("decode", [shape.block] * lanes, [0] * lanes, device)

    def advanced(history: Tensor) -> Tensor:
        conv.advance_history(history, raw, keep, batch)
        return history

    def error() -> float:
        got = advanced(history.clone())
        with dispatch.force("ref"):
            return difference(got, advanced(history.clone()))

    return Work(lambda copy: advanced(history), error, EXACT, 1, 2 * history.nbytes)


def elementwise(shape: Geometry, device: torch.device) -> Cases:
    for rows in (*shape.decode_rows, *shape.prompt_rows):
        for name, make in _ELEMENTWISE.items():
            yield Case(f"{name} rows={rows}", functools.partial(make, shape, rows, device))


def _rms_norm(shape: Geometry, rows: int, device: torch.device) -> Work:
    x, weight = torch.randn(rows, shape.hidden, device=device), torch.randn(shape.hidden, device=device)
    return _pure(norm.rms_norm, [(x, weight, 1e-6)], FLOAT32, 2 * x.nbytes)


def _add_rms_norm(shape: Geometry, rows: int, device: torch.device) -> Work:
    x, delta = (torch.randn(rows, shape.hidden, device=device) for _ in range(2))
    weight = torch.randn(shape.hidden, device=device)
    return _pure(norm.add_rms_norm, [(x, delta, weight, 1e-6, OPERAND)], FLOAT16, 4 * x.nbytes)


def _gated_output(shape: Geometry, rows: int, device: torch.device) -> Work:
    o, z = (torch.randn(rows, shape.value_heads, shape.gdn_dim, device=device) for _ in range(2))
    return _pure(
        norm.gated_output, [(o, z, torch.randn(shape.gdn_dim, device=device), 1e-6, OPERAND)], FLOAT16, 3 * o.nbytes
    )


def _gated_heads(shape: Geometry, rows: int, device: torch.device) -> Work:
    o, gate = (torch.randn(rows, shape.heads, shape.head_dim, device=device) for _ in range(2))
    return _pure(gated_heads, [(o, gate, OPERAND)], FLOAT16, 3 * o.nbytes)


def _swiglu(shape: Geometry, rows: int, device: torch.device) -> Work:
    both = torch.randn(rows, 2 * shape.intermediate, device=device)
    return _pure(swiglu, [(*both.chunk(2, dim=1), OPERAND)], FLOAT16, 3 * both.nbytes // 2)


def _rope(shape: Geometry, rows: int, device: torch.device) -> Work:
    x = torch.randn(rows, shape.heads, shape.head_dim, device=device)
    angles = RopeTable(rows, shape.rotary_dim, 1e7, None, device).at(torch.arange(rows, device=device))
    return _pure(apply_rope, [(x, angles)], FLOAT32, 2 * x.nbytes)


_ELEMENTWISE: dict[str, Callable[[Geometry, int, torch.device], Work]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "gated_output": _gated_output,
    "gated_heads": _gated_heads,
    "swiglu": _swiglu,
    "rope": _rope,
}


# -- the vocabulary --------------------------------------------------------------------------------------------------------


def vocabulary(shape: Geometry, device: torch.device) -> Cases:
    drafts = shape.block - 1
    for rows in sorted({*(lanes * drafts for lanes in shape.lanes), shape.block * drafts}):
        yield Case(f"top_k k={shape.candidates} rows={rows}", functools.partial(_top_k, shape, rows, device))
    for rows in sorted({1, *(lanes * shape.block for lanes in shape.lanes)}):
        yield Case(f"argmax rows={rows}", functools.partial(_argmax, shape, rows, device))
        yield Case(f"draw rows={rows}", functools.partial(_draw, shape, rows, device))
    for lanes in shape.lanes:
        yield Case(f"selector walk L={lanes}", functools.partial(_selector_walk, shape, lanes, device))


def _logits(shape: Geometry, rows: int, device: torch.device) -> list[Tensor]:
    copies = rotation(4 * rows * shape.vocab, device)
    return list(torch.randn(copies, rows, shape.vocab, device=device).unbind())


def _top_k(shape: Geometry, rows: int, device: torch.device) -> Work:
    logits = _logits(shape, rows, device)
    return _pure(topk.top_k, [(x, shape.candidates) for x in logits], EXACT, logits[0].nbytes)


def _argmax(shape: Geometry, rows: int, device: torch.device) -> Work:
    logits = _logits(shape, rows, device)
    return _pure(topk.argmax, [(x,) for x in logits], EXACT, logits[0].nbytes)


def _choices(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """seed, choice and position of each row."""
    seed = torch.arange(rows, device=device)
    return seed, torch.zeros_like(seed), 1000 + seed


def _draw(shape: Geometry, rows: int, device: torch.device) -> Work:
    logits = _logits(shape, rows, device)
    temperature, min_p = torch.full((rows,), 0.7, device=device), torch.zeros(rows, device=device)
    facts = (temperature, min_p, *_choices(rows, device))
    return _pure(draw, [(x, *facts) for x in logits], EXACT, logits[0].nbytes)


def _selector_walk(shape: Geometry, lanes: int, device: torch.device) -> Work:
    slots, rank = shape.block - 1, shape.selector_rank
    logits = torch.randn(lanes, slots, shape.candidates, device=device)
    ids = torch.rand(lanes * slots, shape.vocab, device=device).topk(shape.candidates).indices.view_as(logits)
    hidden = torch.randn(lanes, slots, rank, device=device)
    predecessor, successor = (torch.randn(shape.vocab, rank, device=device) / rank**0.5 for _ in range(2))
    anchors = torch.arange(lanes, device=device)
    temperature = torch.full((lanes * slots,), 0.7, device=device)
    facts = (logits, ids, hidden, anchors, predecessor, successor, temperature, *_choices(lanes * slots, device))
    read = 4 * lanes * slots * rank * (shape.candidates + 2)
    return _pure(selector_walk, [facts], EXACT, read, 2 * lanes * slots * rank * shape.candidates)


OPS: dict[str, Callable[[Geometry, torch.device], Cases]] = {
    "linear": linears,
    "mlp": hidden,
    "attention": attentions,
    "gdn": gdns,
    "vocabulary": vocabulary,
    "kv": kv_writes,
    "conv": convolutions,
    "elementwise": elementwise,
}
