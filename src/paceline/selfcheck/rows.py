"""Cases whose items are rows: ops in which a row knows nothing of its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config import CACHE_TYPES, PAGE_SIZE, CacheType
from paceline.logprobs import score
from paceline.ops import activation, norm
from paceline.ops.attention import attention_inputs
from paceline.ops.conv import Convolved, dynamic_conv
from paceline.ops.dispatch import uses_kernels
from paceline.ops.kv import PagedTensor, allocate_pages, read_pages, write_rows
from paceline.ops.linear import PackedWeight, Rows, TiledWeight, linear, linears, merge, pack
from paceline.ops.mlp import longest_rows, mlp_hidden
from paceline.ops.quant import BLOCKS, QuantTensor, dequantize_rows
from paceline.ops.rope import RopeTable, apply_rope, norm_and_rope
from paceline.ops.sample import draw, gumbel, gumbel_of_vocabulary, last_kept
from paceline.ops.selector import candidate_scores, selector_walk
from paceline.ops.topk import argmax, peaks, top_k
from paceline.sampling import SamplingRows, pick, pick_candidates
from paceline.selfcheck.case import Case, Outputs, Rng, laid_out, randn
from paceline.types import RowKind

ROWS = 70
"""More than a prefill tile of rows, and no multiple of a decode tile."""

_KINDS: tuple[RowKind, ...] = ("decode", "prefill")
_LINEAR_SHAPES = ((6, 512), (37, 512), (512, 1536), (384, 1024))
"""(N, K) of products: the handful of outputs of the beta and decay projections, an odd number, and ordinary ones."""
_TILED_SHAPE = (600, 1024)
"""Of products on a GPU: an odd number of tiles, the last one not full, and more blocks than one in each."""
_MANY_ROWS: dict[RowKind, int] = {"decode": 150, "prefill": 300}
"""More than two decode launches, and more than a prefill panel, take."""
_SCALE_BYTES = {"Q8_0": (1,), "IQ4_XS": (1,), "Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,)}
"""Where in a block of each stored type that a product decodes the upper bytes of its float16 numbers are."""


def row_cases(device: torch.device) -> list[Case]:
    rng = Rng(1, device)
    kernels = uses_kernels(device)
    cases = _tiled_products(rng) if kernels else _dense_products(rng)
    cases += _elementwise(rng)
    cases += _norms(rng)
    if kernels:
        cases += [*_operands(rng), _dynamic_conv_as_rows(rng), _embedding(rng)]
    cases += [_mlp_hidden(rng)]
    cases += [make(rng, rotary) for make in (_rope, _norm_and_rope) for rotary in (16, 64)]
    cases += [_kv(rng, kind) for kind in CACHE_TYPES]
    cases += [_attention_inputs(rng, kind, rotary) for kind in CACHE_TYPES for rotary in (16, 64)]
    cases += [make(rng, *size) for make in (_dynamic_conv, _added_convolution) for size in ((8, 2), (3, 4))]
    cases += [_candidate_scores(rng), _selector_walk(rng), _top_k(rng)]
    cases += [_gumbel(rng), _draw(rng), _pick(rng), _pick_candidates(rng), _score(rng)]
    return cases


def _case(name: str, ops: tuple[str, ...], function: Callable[..., Any], *inputs: Tensor) -> Case:
    """A function of row tensors, each given in a memory layout of its own, to one tensor of rows or some."""

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        out = function(*(laid_out(x[chosen], rng) for x in inputs))
        return _split(*_tensors(out))

    return Case(name, ops, inputs[0].shape[0], compute, inputs[0].device)


def _split(*outputs: Tensor) -> Outputs:
    return list(zip(*(out.unbind(0) for out in outputs), strict=True))


def _tensors(out: Any) -> Iterator[Tensor]:
    """What an op returned, tensor by tensor; of ``Rows`` the rows that are some."""
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, Rows):
        yield from (out.values[: out.rows], out.factors[: out.rows])
    else:
        for part in out:
            yield from _tensors(part)


def _dense_products(rng: Rng) -> list[Case]:
    cases = [
        linear_case(rng, pack(randn(rng, *shape).to(dtype)), kind)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for shape in _LINEAR_SHAPES[: 1 if dtype == torch.float16 else None]
        for kind in _KINDS
    ]
    cases += [
        _quantised_linear(rng, qtype, dtype, kind)
        for qtype, dtype in (("Q8_0", torch.float32), ("IQ4_XS", torch.bfloat16))
        for kind in _KINDS
    ]
    return cases + [_merged_linears(rng, [pack(randn(rng, n, 512)) for n in (6, 37)], kind) for kind in _KINDS]


def _tiled_products(rng: Rng) -> list[Case]:
    """In every form that 16-bit products have on a GPU."""

    def packed(form: str, *shape: int) -> PackedWeight | TiledWeight:
        weight = _stored(rng, form, shape[0], shape[1]) if form in _SCALE_BYTES else randn(rng, *shape).bfloat16()
        return pack(weight, torch.bfloat16, rng.device)

    weights = [packed(form, *_TILED_SHAPE) for form in _SCALE_BYTES]
    weights += [packed("dense", *shape) for shape in (_TILED_SHAPE, (6, 512))]
    cases = [linear_case(rng, weight, kind) for weight in weights for kind in _KINDS]
    cases += [linear_case(rng, packed("IQ4_XS", 37, 512), kind, _MANY_ROWS[kind]) for kind in _KINDS]
    siblings = [packed(form, n, 512) for form, n in (("IQ4_XS", 300), ("IQ4_XS", 37), ("Q8_0", 6), ("dense", 6))]
    return cases + [_merged_linears(rng, siblings, kind) for kind in _KINDS]


def linear_case(rng: Rng, weight: PackedWeight | TiledWeight, kind: RowKind, rows: int = ROWS) -> Case:
    n, k = weight.shape
    x = randn(rng, rows, k)
    form = _name(weight.dtype) if isinstance(weight, PackedWeight) else weight.form
    if isinstance(weight, TiledWeight):
        x[::7] *= 1e6  # beyond float16: such a row is scaled, and has a factor that undoes it
    name = f"linear {kind} {form} {n} x {k}" + (f", up to {rows} rows" if rows != ROWS else "")
    return _case(name, ("linear",), lambda x: linear(x, weight, kind), x)


def _quantised_linear(rng: Rng, qtype: str, dtype: torch.dtype, kind: RowKind) -> Case:
    weight = _stored(rng, qtype, 37, 512)
    x = randn(rng, ROWS, 512).to(dtype)
    name = f"linear {kind} {qtype} as {_name(dtype)}"
    return _case(name, ("linear", "dequantize"), lambda x: linear(x, weight, kind), x)


def _stored(rng: Rng, qtype: str, rows: int, columns: int) -> QuantTensor:
    elements, size, _ = BLOCKS[qtype]
    data = rng.integers(0, 256, (rows, columns // elements * size), dtype=np.uint8)
    for at in _SCALE_BYTES[qtype]:
        data.reshape(rows, -1, size)[..., at] = 0x10  # a float16 of about 5e-4, never a NaN
    return QuantTensor(rng.tensor(data), qtype, (rows, columns))


def _merged_linears(rng: Rng, weights: Sequence[PackedWeight | TiledWeight], kind: RowKind) -> Case:
    merged = merge(weights)
    return _case(f"linears {kind}", ("linears",), lambda x: torch.cat(linears(x, merged, kind), 1), randn(rng, ROWS, 512))


def _elementwise(rng: Rng) -> list[Case]:
    x, y = 8.0 * randn(rng, ROWS, 37), randn(rng, ROWS, 37)
    heads, gate = randn(rng, ROWS, 3, 37), 8.0 * randn(rng, ROWS, 3, 37)
    return [
        _case("sigmoid", ("sigmoid",), activation.sigmoid, x),
        _case("silu", ("silu",), activation.silu, x),
        _case("softplus", ("softplus",), activation.softplus, x),
        _case("softcap", ("softcap",), lambda x: activation.softcap(x, 30.0), x),
        _case("swiglu", ("swiglu",), activation.swiglu, x, y),
        _case("gated_heads", ("gated_heads",), activation.gated_heads, heads, gate),
    ]


def _norms(rng: Rng) -> list[Case]:
    x, delta = randn(rng, ROWS, 512), randn(rng, ROWS, 512)
    heads, gate = randn(rng, ROWS, 3, 96), randn(rng, ROWS, 3, 96)
    wide, narrow = 1.0 + 0.1 * randn(rng, 512), 1.0 + 0.1 * randn(rng, 96)
    return [
        _case("rms_norm of rows", ("rms_norm",), lambda x: norm.rms_norm(x, wide, 1e-6), x),
        _case("rms_norm of heads", ("rms_norm",), lambda x: norm.rms_norm(x, narrow, 1e-6), heads),
        _case("l2_norm", ("l2_norm",), norm.l2_norm, heads),
        _case("add_rms_norm", ("add_rms_norm",), lambda x, d: norm.add_rms_norm(x, d, wide, 1e-6), x, delta),
        _case(
            "add_rms_norm_twice",
            ("add_rms_norm_twice",),
            lambda x, d: norm.add_rms_norm_twice(x, d, wide, 1e-6, torch.float16),
            x,
            delta,
        ),
        _case("gated_rms_norm", ("gated_rms_norm",), lambda x, g: norm.gated_rms_norm(x, g, narrow, 1e-6), heads, gate),
        _case("gated_output", ("gated_output",), lambda x, g: norm.gated_output(x, g, narrow, 1e-6), heads, gate),
    ]


def _operands(rng: Rng) -> list[Case]:
    """Ops that leave their result as the next product reads it."""
    half = torch.float16
    x, y = 8.0 * randn(rng, ROWS, 544), randn(rng, ROWS, 544)
    o, gate = randn(rng, ROWS, 3, 96), 8.0 * randn(rng, ROWS, 3, 96)
    wide, narrow = 1.0 + 0.1 * randn(rng, 544), 1.0 + 0.1 * randn(rng, 96)
    return [
        _case("swiglu as rows", ("swiglu",), lambda x, y: activation.swiglu(x, y, half), x, y),
        _case("gated_heads as rows", ("gated_heads",), lambda o, g: activation.gated_heads(o, g, half), o, gate),
        _case("add_rms_norm as rows", ("add_rms_norm",), lambda x, d: norm.add_rms_norm(x, d, wide, 1e-6, half), x, y),
        _case("gated_output as rows", ("gated_output",), lambda o, z: norm.gated_output(o, z, narrow, 1e-6, half), o, gate),
    ]


def _mlp_hidden(rng: Rng) -> Case:
    """Of rows that come from a norm, as in the models."""
    halves = [pack(_stored(rng, "IQ4_XS", 512, 512), torch.bfloat16, rng.device) for _ in range(2)]
    merged, weight = merge(halves), 1.0 + 0.1 * randn(rng, 512)
    longest = longest_rows(merged)

    def compute(x: Tensor) -> Any:
        _, n = norm.add_rms_norm(x, None, weight, 1e-6, torch.float16)
        return mlp_hidden(n, merged, longest, "decode", torch.float16)

    return _case("mlp_hidden", ("mlp_hidden",), compute, randn(rng, ROWS, 512))


def _dynamic_conv_as_rows(rng: Rng) -> Case:
    """Items are blocks of eight rows."""
    x, base, dynamic = randn(rng, 20, 8, 64), randn(rng, 2, 64), randn(rng, 20, 8, 2, 4)

    def compute(x: Tensor, kernels: Tensor) -> list[Tensor]:
        rows = dynamic_conv(x, base, kernels, torch.float16)
        return [part.unflatten(0, (len(x), 8)) for part in _tensors(rows)]

    return _case("dynamic_conv as rows", ("dynamic_conv",), compute, x, dynamic)


def _embedding(rng: Rng) -> Case:
    table = _stored(rng, "Q6_K", 300, 512)
    ids = rng.tensor(rng.integers(0, 300, ROWS))
    return _case("dequantize_rows", ("dequantize_rows",), lambda ids: dequantize_rows(table, ids), ids)


def _rope(rng: Rng, rotary: int) -> Case:
    """Also: an angle does not depend on the length of the table it is read from."""
    x, positions = randn(rng, ROWS, 3, 64), rng.tensor(rng.permutation(1100)[:ROWS])
    tables = [RopeTable(length, rotary, 1e6, None, rng.device) for length in (1100, 1537)]

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        angles = tables[rng.integers(2)].at(positions[chosen])
        return _split(apply_rope(laid_out(x[chosen], rng), angles))

    return Case(f"rope of {rotary} in 64", ("apply_rope",), ROWS, compute, rng.device)


def _norm_and_rope(rng: Rng, rotary: int) -> Case:
    layers, weights = randn(rng, ROWS, 3, 2, 64), 1.0 + 0.1 * randn(rng, 3, 64)
    positions, table = rng.tensor(rng.permutation(1100)[:ROWS]), RopeTable(1100, rotary, 1e6, None, rng.device)

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        each = [laid_out(x, rng) for x in layers[chosen].unbind(1)]
        return _split(*norm_and_rope(each, weights, 1e-6, table, positions[chosen]))

    return Case(f"norm and rope of {rotary} in 64", ("norm_and_rope",), ROWS, compute, rng.device)


def _kv(rng: Rng, kind: CacheType) -> Case:
    """Rows are written to slots anywhere and read back from their pages."""
    x = randn(rng, ROWS, 2, 64)

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        cache = allocate_pages(kind, 12, 2, 64, rng.device)
        slots = rng.tensor(rng.permutation(12 * PAGE_SIZE)[: len(chosen)])
        write_rows(cache, slots, laid_out(x[chosen], rng))
        return _split(_read_rows(cache, slots))

    return Case(f"K/V in {kind}", ("write_rows", "read_pages"), ROWS, compute, rng.device)


def _read_rows(cache: PagedTensor, slots: Tensor) -> Tensor:
    rows = torch.arange(len(slots), device=slots.device)
    return read_pages(cache, slots // PAGE_SIZE)[rows, slots % PAGE_SIZE]


def _attention_inputs(rng: Rng, kind: CacheType, rotary: int) -> Case:
    """q as returned, k and v as read back from their pages. k and v are columns of one product."""
    q, both = randn(rng, ROWS, 4, 64), randn(rng, ROWS, 4, 64)
    q_weight, k_weight = 1.0 + 0.1 * randn(rng, 64), 1.0 + 0.1 * randn(rng, 64)
    positions = rng.tensor(rng.permutation(1100)[:ROWS])
    table = RopeTable(1100, rotary, 1e6, None, rng.device)

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        k_cache, v_cache = (allocate_pages(kind, 12, 2, 64, rng.device) for _ in range(2))
        slots = rng.tensor(rng.permutation(12 * PAGE_SIZE)[: len(chosen)])
        k, v = laid_out(both[chosen], rng).split(2, 1)
        angles = table.at(positions[chosen])
        out = attention_inputs(laid_out(q[chosen], rng), k, v, q_weight, k_weight, 1e-6, angles, k_cache, v_cache, slots)
        return _split(out, _read_rows(k_cache, slots), _read_rows(v_cache, slots))

    return Case(f"attention_inputs over {kind}, rotary {rotary}", ("attention_inputs",), ROWS, compute, rng.device)


def _dynamic_conv(rng: Rng, rows: int, taps: int) -> Case:
    """Items are blocks."""
    x, base, dynamic = randn(rng, 20, rows, 64), randn(rng, taps, 64), randn(rng, 20, rows, taps, 4)
    name = f"dynamic_conv of {taps} taps on {rows} rows"
    return _case(name, ("dynamic_conv",), lambda x, kernels: dynamic_conv(x, base, kernels), x, dynamic)


def _added_convolution(rng: Rng, rows: int, taps: int) -> Case:
    """Items are blocks."""
    x, delta, dynamic = randn(rng, 20, rows, 64), randn(rng, 20, rows, 64), randn(rng, 20, rows, taps, 4)
    base, weight = randn(rng, taps, 64), 1.0 + 0.1 * randn(rng, 64)

    def compute(x: Tensor, delta: Tensor, kernels: Tensor) -> list[Tensor]:
        convolved = Convolved(delta.flatten(0, 1), base, kernels)
        out = norm.add_rms_norm_twice(x.flatten(0, 1), convolved, weight, 1e-6, torch.float16)
        return [part.unflatten(0, (len(x), rows)) for part in _tensors(out)]

    name = f"add_rms_norm_twice of a convolution of {taps} taps on {rows} rows"
    return _case(name, ("add_rms_norm_twice",), compute, x, delta, dynamic)


def _candidate_scores(rng: Rng) -> Case:
    vocab, rank, k = 300, 128, 16
    predecessor, successor = randn(rng, vocab, rank), randn(rng, vocab, rank)
    candidates = rng.tensor(rng.integers(0, vocab, (ROWS, k)))
    previous = rng.tensor(rng.integers(0, vocab, ROWS))
    return _case(
        "candidate_scores",
        ("candidate_scores",),
        lambda logits, ids, hidden, last: candidate_scores(logits, ids, hidden, last, predecessor, successor),
        *(randn(rng, ROWS, k), candidates, randn(rng, ROWS, rank), previous),
    )


def _selector_walk(rng: Rng) -> Case:
    vocab, rank, k, slots = 300, 128, 16, 3
    codebooks = randn(rng, vocab, rank), randn(rng, vocab, rank)
    candidates = rng.tensor(np.stack([rng.permutation(vocab)[:k] for _ in range(ROWS * slots)])).view(ROWS, slots, k)
    lanes = randn(rng, ROWS, slots, k), candidates, randn(rng, ROWS, slots, rank), torch.arange(ROWS, device=rng.device)
    rows = _sampling_rows(rng)

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        draws = rows.select([lane for lane in chosen for _ in range(slots)])
        logits, ids, hidden, anchors = (laid_out(x[chosen], rng) for x in lanes)
        key = (draws.seed, draws.choice, draws.position)
        return _split(selector_walk(logits, ids, hidden, anchors, *codebooks, draws.temperature, *key))

    return Case("selector_walk", ("selector_walk",), ROWS, compute, rng.device)


def _top_k(rng: Rng) -> Case:
    logits = (4.0 * randn(rng, ROWS, 3001)).round() / 4.0  # with ties

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        values, ids = top_k(laid_out(logits[chosen], rng), 16)
        largest = peaks(laid_out(logits[chosen], rng))
        return _split(values, ids, argmax(laid_out(logits[chosen], rng)), largest)

    return Case("top_k and argmax", ("top_k", "argmax", "peaks"), ROWS, compute, rng.device)


def _sampling_rows(rng: Rng) -> SamplingRows:
    """Every kind of row: greedy, unfiltered, and each filter."""
    return SamplingRows.from_lists(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.3], ROWS).tolist(),
        top_k=rng.choice([0, 1, 20, 400], ROWS).tolist(),
        top_p=rng.choice([1.0, 0.95, 0.5], ROWS).tolist(),
        min_p=rng.choice([0.0, 0.05], ROWS).tolist(),
        seed=rng.integers(0, 2**63, ROWS).tolist(),
        choice=rng.integers(0, 3, ROWS).tolist(),
        position=rng.integers(0, 10_000, ROWS).tolist(),
        device=rng.device,
    )


def _gumbel(rng: Rng) -> Case:
    """The noise of an id is the same in a list of some ids, in any order, and in a vocabulary of any size."""
    rows, vocab = _sampling_rows(rng), 259

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        draws = rows.select(chosen)
        key = (draws.seed, draws.choice, draws.position)
        if rng.integers(2):
            return _split(gumbel_of_vocabulary(*key, vocab + int(rng.integers(9)))[:, :vocab])
        ids = rng.tensor(rng.permutation(vocab))
        return _split(gumbel(*key, ids)[:, ids.argsort()])

    return Case("gumbel", ("gumbel", "gumbel_of_vocabulary"), ROWS, compute, rng.device)


def _draw(rng: Rng) -> Case:
    logits, rows = 2.0 * randn(rng, ROWS, 3001), _sampling_rows(rng)

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        x, draws = laid_out(logits[chosen], rng), rows.select(chosen)
        cut = last_kept(x, draws.temperature, draws.top_k, draws.top_p, draws.limits)
        return _split(cut, draw(x, draws.temperature, draws.min_p, draws.seed, draws.choice, draws.position, cut))

    return Case("draw and last_kept", ("draw", "last_kept"), ROWS, compute, rng.device)


def _pick(rng: Rng) -> Case:
    logits, rows = 2.0 * randn(rng, ROWS, 3001), _sampling_rows(rng)

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        return _split(pick(laid_out(logits[chosen], rng), rows.select(chosen)))

    return Case("pick", ("pick",), ROWS, compute, rng.device)


def _score(rng: Rng) -> Case:
    """Logprobs, also of rows beside which more of the likeliest are asked for."""
    logits, tokens = 2.0 * randn(rng, ROWS, 3001), rng.tensor(rng.integers(0, 3001, ROWS))

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        top = int(rng.integers(3, 20))
        scores = score(laid_out(logits[chosen], rng), tokens[chosen], top)
        return _split(scores[:, :4], scores[:, 1 + top : 4 + top])

    return Case("logprobs", ("score",), ROWS, compute, rng.device)


def _pick_candidates(rng: Rng) -> Case:
    """Candidates come in any order."""
    scores, rows = randn(rng, ROWS, 16), _sampling_rows(rng)
    ids = rng.tensor(np.stack([rng.permutation(3001)[:16] for _ in range(ROWS)]))

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        order = rng.tensor(rng.permutation(16))
        candidates = ids[chosen][:, order]
        index = pick_candidates(scores[chosen][:, order], candidates, rows.select(chosen))
        return _split(candidates.gather(1, index.unsqueeze(1)))

    return Case("pick_candidates", ("pick_candidates", "draw_candidates"), ROWS, compute, rng.device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
