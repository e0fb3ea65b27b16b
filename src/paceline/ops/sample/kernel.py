"""Triton kernels of ``ref.py``. Nothing waits for the device; what is launched depends on shapes and ``limits`` only.

``draw`` makes three launches over blocks of columns: maxima, the best of each block with noise, the best of a row.
``last_kept`` finds the cut among a row's ``_HEAD`` best ids if it lies there. If not (a larger top-k, or a nucleus that does
not end there), it searches among all order keys, ``_BRANCHES`` to one per pass: what lies above a key is counted or weighed
in fixed blocks. Rows that are done leave such a pass at once. A row's own values decide which way it goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.launch import await_turn, pdl
from paceline.ops.sample.ref import KEEP_ALL
from paceline.ops.topk.kernel import block_maxima, key_id, numbers, order_key, top_k, unit_stride

_BLOCK = 2048
"""Columns per program of a draw."""

_HEAD = 64
_SEARCH_BLOCK = 8192
_BRANCH_BITS = 5
_BRANCHES = tl.constexpr(1 << _BRANCH_BITS)

_OF_ROWS = ["temperature", "min_p", "seed", "choice", "position", "top_k_limit", "top_p"]
"""Where these lie depends on the number of rows, for which nothing should be compiled anew."""

_KEEP_ALL = tl.constexpr(KEEP_ALL)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)

_REACH = tl.constexpr(-26.0)
"""Noise lies between -2.82 and 22.88 and the best id's weight is exactly 1, so that an id whose scaled logit is less than
this cannot be drawn."""


# ---- launches


def draw(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
    cut: Tensor | None = None,
) -> Tensor:
    rows, vocab = logits.shape
    logits = unit_stride(logits)
    maxima = block_maxima(logits, _BLOCK)
    blocks = maxima.shape[1]
    padded = triton.next_power_of_2(blocks)
    scores = torch.empty_like(maxima)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    picks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _draw_blocks[(blocks, rows)](
        logits,
        maxima,
        cut,
        temperature,
        min_p,
        seed,
        choice,
        position,
        scores,
        ids,
        vocab,
        logits.stride(0),
        blocks,
        BLOCK=_BLOCK,
        BLOCKS=padded,
        num_warps=4,
        **pdl(logits.device),
    )
    _best_block[(rows,)](scores, ids, picks, blocks, BLOCKS=padded, num_warps=4, **pdl(logits.device))
    return picks


def draw_candidates(
    scores: Tensor, ids: Tensor, temperature: Tensor, seed: Tensor, choice: Tensor, position: Tensor
) -> Tensor:
    rows, k = scores.shape
    out = torch.empty(rows, dtype=torch.int64, device=scores.device)
    rows_of = (t.contiguous() for t in (scores, ids, temperature, seed, choice, position))
    _draw_candidates[(rows,)](*rows_of, out, k, K=triton.next_power_of_2(k), num_warps=1, **pdl(scores.device))
    return out


def gumbel(seed: Tensor, choice: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    columns = token_ids.shape[-1]
    token_ids = token_ids.expand(len(seed), columns)
    noise = torch.empty(len(seed), columns, dtype=torch.float32, device=seed.device)
    _gumbel[(triton.cdiv(columns, _BLOCK), len(seed))](
        seed, choice, position, token_ids, noise, columns, *token_ids.stride(), BLOCK=_BLOCK, num_warps=4
    )
    return noise


def gumbel_of_vocabulary(seed: Tensor, choice: Tensor, position: Tensor, size: int) -> Tensor:
    noise = torch.empty(len(seed), size, dtype=torch.float32, device=seed.device)
    _gumbel_of_vocabulary[(triton.cdiv(size, _BLOCK), len(seed))](
        seed, choice, position, noise, size, BLOCK=_BLOCK, num_warps=4
    )
    return noise


def last_kept(logits: Tensor, temperature: Tensor, top_k_limit: Tensor, top_p: Tensor, limits: Sequence[int]) -> Tensor:
    rows, vocab = logits.shape
    logits = unit_stride(logits)
    head = min(_HEAD, vocab)
    values, ids = top_k(logits, head)
    cut = torch.empty(rows, dtype=torch.int64, device=logits.device)
    bound = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _cut_by_rank[(rows,)](values, ids, temperature, top_k_limit, cut, bound, head, num_warps=1, **pdl(logits.device))
    search = (logits, values, temperature, cut, bound)
    if any(limit > head for limit in limits):
        _search(*search, weigh=False)
    blocks = triton.cdiv(vocab, _BLOCK)
    masses = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    _block_masses[(blocks, rows)](
        logits,
        values,
        temperature,
        cut,
        masses,
        vocab,
        logits.stride(0),
        blocks,
        head,
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl(logits.device),
    )
    _cut_by_mass[(rows,)](
        values,
        ids,
        masses,
        temperature,
        top_k_limit,
        top_p,
        cut,
        bound,
        blocks,
        head,
        HEAD=triton.next_power_of_2(head),
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=1,
        **pdl(logits.device),
    )
    if any(limit == 0 or limit > head for limit in limits):
        _search(*search, weigh=True)
    return cut


def _search(logits: Tensor, values: Tensor, temperature: Tensor, cut: Tensor, bound: Tensor, *, weigh: bool) -> None:
    """Raise ``cut`` in the rows with a ``bound`` to the lowest key above which less than the bound lies."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _SEARCH_BLOCK)
    id_bits = (vocab - 1).bit_length()
    passes = -(-(32 + id_bits) // _BRANCH_BITS)
    floors = torch.empty(passes, rows, dtype=torch.int64, device=logits.device)
    above = torch.empty(passes, rows, dtype=torch.float32, device=logits.device)
    parts = torch.empty(passes, rows, blocks, _BRANCHES.value, dtype=torch.float32, device=logits.device)
    for number in range(passes + 1):
        last = number == passes
        _search_pass[(1 if last else blocks, rows)](
            logits,
            values,
            temperature,
            cut,
            bound,
            floors,
            above,
            parts,
            vocab,
            logits.stride(0),
            blocks,
            rows,
            values.shape[1],
            number,
            (passes - number) * _BRANCH_BITS,
            id_bits,
            BITS=_BRANCH_BITS,
            WEIGH=weigh,
            FIRST=number == 0,
            LAST=last,
            BLOCK=_SEARCH_BLOCK,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=16,
            **pdl(logits.device),
        )


# ---- noise and weights


@triton.jit
def gumbel_from_bits(bits):
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    u = 1.0 - v
    # log1p(-v) from a logarithm: the rounding of u cancels in the quotient (Kahan)
    log1p = tl.where(u == 1.0, -v, tl.log(u) * (-v / (u - 1.0)))
    return -tl.log(-log1p)


@triton.jit
def noise_of_ids(seed, choice, position, ids):
    """Noise of int32 ids in a tensor of any shape."""
    zero = ids * 0
    c0, c1, c2, c3 = tl.philox(seed, ids // 4, zero + position.to(tl.int32), zero + choice.to(tl.int32), zero)
    word = ids % 4
    return gumbel_from_bits(tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3))))


@triton.jit
def noise_of_block(seed, choice, position, block, BLOCK: tl.constexpr):
    """Noise of the ids of one block, four to a call: [BLOCK]."""
    groups = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    zero = groups * 0
    c0, c1, c2, c3 = tl.philox(seed, groups, zero + position.to(tl.int32), zero + choice.to(tl.int32), zero)
    # join puts its second operand behind the first one in a new last dimension
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    return gumbel_from_bits(tl.reshape(words, [BLOCK]))


@triton.jit
def scaled(x, largest, temperature):
    """``ref.scaled`` of numbers, given their row's largest."""
    top = tl.minimum(tl.maximum(largest, -_LARGEST), _LARGEST)
    return tl.div_rn(tl.where(x > _LARGEST, _LARGEST, x) - top, temperature)


@triton.jit
def best_candidate(scores, ids, inside, temperature, seed, choice, position):
    """Order key (score, id) of the candidate that ``ref.draw_candidates`` takes; int32 ids, scalars for the row."""
    x = tl.where(inside, numbers(scores), float("-inf"))
    sampled = temperature > 0
    weighed = scaled(x, tl.max(x, axis=0), tl.where(sampled, temperature, 1.0))
    weighed = tl.where(sampled, weighed + noise_of_ids(seed, choice, position, ids), weighed)
    return tl.max(tl.where(inside, order_key(weighed, ids), _KEEP_ALL), axis=0)


# ---- draws


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def _draw_blocks(
    logits,
    maxima,
    cut,
    temperature,
    min_p,
    seed,
    choice,
    position,
    scores,
    ids,
    vocab,
    stride,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    score = numbers(tl.load(logits + row * stride + columns, mask=inside, other=float("-inf")))
    t = tl.load(temperature + row)
    if t > 0:
        at = tl.arange(0, BLOCKS)
        largest = tl.max(tl.load(maxima + row * num_blocks + at, mask=at < num_blocks, other=float("-inf")), axis=0)
        weighed = scaled(score, largest, t)
        kept = inside & (tl.exp(weighed) >= tl.load(min_p + row))
        if cut is not None:
            kept = kept & (order_key(score, columns) >= tl.load(cut + row))
        score = tl.where(kept, weighed, float("-inf"))
        if tl.max(score, axis=0) > _REACH:
            score += noise_of_block(tl.load(seed + row), tl.load(choice + row), tl.load(position + row), block, BLOCK)
    best, at = tl.max(score, axis=0, return_indices=True)
    tl.store(scores + row * num_blocks + block, best)
    tl.store(ids + row * num_blocks + block, block * BLOCK + at)


@triton.jit
def _best_block(scores, ids, picks, num_blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    await_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    score = tl.load(scores + row * num_blocks + at, mask=at < num_blocks, other=float("-inf"))
    _, block = tl.max(score, axis=0, return_indices=True)
    tl.store(picks + row, tl.load(ids + row * num_blocks + block).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def _draw_candidates(scores, ids, temperature, seed, choice, position, out, k, K: tl.constexpr, PDL: tl.constexpr):
    await_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, K)
    candidates = tl.load(ids + row * k + at, mask=at < k, other=0).to(tl.int32)
    key = best_candidate(
        tl.load(scores + row * k + at, mask=at < k, other=float("-inf")),
        candidates,
        at < k,
        tl.load(temperature + row),
        tl.load(seed + row),
        tl.load(choice + row),
        tl.load(position + row),
    )
    tl.store(out + row, tl.min(tl.where((candidates == key_id(key)) & (at < k), at, K), axis=0).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def _gumbel(seed, choice, position, ids, noise, columns, stride, step, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tokens = tl.load(ids + row * stride + at.to(tl.int64) * step, mask=at < columns, other=0).to(tl.int32)
    drawn = noise_of_ids(tl.load(seed + row), tl.load(choice + row), tl.load(position + row), tokens)
    tl.store(noise + row * columns + at, drawn, mask=at < columns)


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def _gumbel_of_vocabulary(seed, choice, position, noise, size, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    drawn = noise_of_block(tl.load(seed + row), tl.load(choice + row), tl.load(position + row), block, BLOCK)
    tl.store(noise + row * size + at, drawn, mask=at < size)


# ---- cuts


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def _cut_by_rank(values, ids, temperature, top_k_limit, cut, bound, head, PDL: tl.constexpr):
    """The key of rank ``top_k_limit`` where the head holds it; else everything is kept and the bound asks for a search."""
    await_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(top_k_limit + row)
    limited = (limit > 0) & (tl.load(temperature + row) > 0)
    known = limited & (limit <= head)
    last = row * head + tl.where(known, limit - 1, 0)
    key = order_key(tl.load(values + last), tl.load(ids + last).to(tl.int32))
    tl.store(cut + row, tl.where(known, key, _KEEP_ALL))
    tl.store(bound + row, tl.where(limited & (limit > head), limit.to(tl.float32), 0.0))


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def _block_masses(
    logits, values, temperature, cut, masses, vocab, stride, num_blocks, head, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Weight of what the cut keeps of each block."""
    await_turn(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    t = tl.load(temperature + row)
    if t > 0:
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocab
        x = numbers(tl.load(logits + row * stride + columns, mask=inside, other=float("-inf")))
        weight = tl.exp(scaled(x, tl.load(values + row * head), t))
        kept = inside & (order_key(x, columns) >= tl.load(cut + row))
        tl.store(masses + row * num_blocks + block, tl.sum(tl.where(kept, weight, 0.0), axis=0))


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def _cut_by_mass(
    values,
    ids,
    masses,
    temperature,
    top_k_limit,
    top_p,
    cut,
    bound,
    num_blocks,
    head,
    HEAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last id whose better ones weigh less than top_p of what top-k keeps, where the head holds it; else a bound."""
    await_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + row)
    share = tl.load(top_p + row)
    search = 0.0
    if (t > 0) & (share < 1):
        at = tl.arange(0, BLOCKS)
        total = tl.sum(tl.load(masses + row * num_blocks + at, mask=at < num_blocks, other=0.0), axis=0)
        rank = tl.arange(0, HEAD)
        x = tl.load(values + row * head + rank, mask=rank < head, other=float("-inf"))
        keys = order_key(x, tl.load(ids + row * head + rank, mask=rank < head, other=0).to(tl.int32))
        kept = (rank < head) & (keys >= tl.load(cut + row))
        weight = tl.where(kept, tl.exp(scaled(x, tl.max(x, axis=0), t)), 0.0)
        full = tl.cumsum(weight, axis=0) >= share * total
        last = tl.min(tl.where(full & kept, rank, HEAD), axis=0)
        if last < HEAD:
            tl.store(cut + row, tl.max(tl.where(rank == last, keys, _KEEP_ALL), axis=0))
        else:
            limit = tl.load(top_k_limit + row)
            search = tl.where((limit == 0) | (limit > head), share * total, 0.0)
    tl.store(bound + row, search)


@triton.jit(do_not_specialize=["rows", "number", "shift"], do_not_specialize_on_alignment=_OF_ROWS)
def _search_pass(
    logits,
    values,
    temperature,
    cut,
    bound,
    floors,
    above,
    parts,
    vocab,
    stride,
    num_blocks,
    rows,
    head,
    number,
    shift,
    id_bits,
    BITS: tl.constexpr,
    WEIGH: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose a branch of the interval of the pass before, and weigh the branches of that one.

    Keys are searched as numbers of 32 + id_bits bits. An interval has 2**shift of them from its floor on, and ``above`` is
    what lies above it. Of its branches the lowest is chosen above which less than the bound lies: the cut is in there.
    """
    await_turn(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    limit = tl.load(bound + row)
    if limit > 0:
        branch = tl.arange(0, _BRANCHES)
        floor = tl.full([], 0, tl.int64)
        outside = 0.0
        if not FIRST:
            before = (number - 1) * rows + row
            at = tl.arange(0, BLOCKS)
            part = tl.load(
                parts + (before * num_blocks + at[:, None]) * _BRANCHES + branch[None, :],
                mask=at[:, None] < num_blocks,
                other=0.0,
            )
            inside = tl.sum(part, axis=0)
            beyond = tl.load(above + before) + tl.sum(
                tl.where(branch[:, None] > branch[None, :], inside[:, None], 0.0), axis=0
            )
            chosen = tl.min(tl.where(beyond < limit, branch, _BRANCHES - 1), axis=0)
            floor = tl.load(floors + before) + (chosen.to(tl.int64) << shift)
            outside = tl.max(tl.where(branch == chosen, beyond, 0.0), axis=0)
        if LAST:
            tl.store(cut + row, tl.maximum(_key_of_code(floor, id_bits), tl.load(cut + row)))
        else:
            now = number * rows + row
            if block == 0:
                tl.store(floors + now, floor)
                tl.store(above + now, outside)
            columns = block * BLOCK + tl.arange(0, BLOCK)
            valid = columns < vocab
            x = numbers(tl.load(logits + row * stride + columns, mask=valid, other=float("-inf")))
            key = order_key(x, columns)
            weight = tl.full([BLOCK], 1.0, tl.float32)
            if WEIGH:
                weight = tl.exp(scaled(x, tl.load(values + row * head), tl.load(temperature + row)))
                valid = valid & (key >= tl.load(cut + row))
            own = (_code_of_key(key, id_bits) - floor) >> (shift - BITS)
            own = tl.where(valid & (own >= 0) & (own < _BRANCHES), own, -1).to(tl.int32)
            for i in range(_BRANCHES):
                measure = tl.sum(tl.where(own == i, weight, 0.0), axis=0)
                tl.store(parts + (now * num_blocks + block) * _BRANCHES + i, measure)


@triton.jit
def _code_of_key(key, id_bits):
    low = (tl.full([], 1, tl.int64) << id_bits) - 1
    return (((key >> 32) + (1 << 31)) << id_bits) | (key & low)


@triton.jit
def _key_of_code(code, id_bits):
    low = (tl.full([], 1, tl.int64) << id_bits) - 1
    return (((code >> id_bits) - (1 << 31)) << 32) | (0x7FFFFFFF - low + (code & low))
