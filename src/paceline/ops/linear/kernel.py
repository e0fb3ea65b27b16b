"""``linear`` in Triton: two products, chosen by the kind of the rows and never by their number.

Both multiply float16 by float16 and add in float32. A weight is rounded to float16 where it is decoded, in registers, from
the exact numbers of its file; a row of x is rounded to float16 after a multiplication by a power of two of its own, where
its largest magnitude asks for one. Measured against float64, a row of the result is off by about 3e-4 of its norm. (Dense
float32 weights are multiplied in float32.)

*Decode* reads the weight once for up to 64 rows. The (tile, block) pairs of a weight lie in one line, which is cut into
``PROGRAMS`` equal parts; a program walks through its part and leaves one partial sum per tile that it touches, and a second
kernel adds the partial sums of a tile in order. The cut depends on the weight alone. What a program has decoded it
multiplies by one group of 16 rows after the other: one product of one shape for every row, wherever the row is. (Hopper
GPUs have a faster decode product in ``hopper.py``.)

*Prefill* decodes the weight into a scratch matrix and multiplies panels of 256 rows, padded, by the vendor's library, which
treats all rows of a product of one shape alike. Panels of another height serve too where they give the same bits, which is
tried once for each shape of weight: mostly they do, as the library then adds over K in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.launch import await_turn, has_little_shared_memory, pdl
from paceline.ops.linear import hopper
from paceline.ops.linear.rows import COLUMN_STEP, ROW_STEP, Rows, empty_rows, padded
from paceline.ops.linear.tiles import TILE_ROWS, TiledWeight, tile
from paceline.ops.quant import QuantTensor, fields
from paceline.types import RowKind

PROGRAMS = 264
"""Parts that a decode product is cut into: two for each multiprocessor of an H200. Part of the arithmetic."""
PANEL = ROW_STEP
"""Rows of the prefill product that says what the bits are."""
_PANELS = tuple(range(128, 769, 32))
"""Heights that a prefill product may have."""
_HIGH_PANEL = 512
"""Of one behind which there are others: as fast per row as any (``benchmarks/h200/panels.json``)."""
_GROUPS = (1, 2, 4)
"""Groups of 16 rows that a program may carry."""
_WARPS = TILE_ROWS // 16

_TILE = tl.constexpr(TILE_ROWS)
_GROUP = tl.constexpr(16)


def _codebook_asm() -> str:
    """A word of eight indices to four pairs of float16. One byte permutation looks up the magnitudes of the negative values,
    another the positive values with the index inverted: an index with its top bit set asks for the sign of a table's byte,
    which is zero. Value + 128 is below 256 and thus the last byte of float16 1024 + 128 + value."""
    negative = bytes(-v for v in fields.IQ4_VALUES[:8])
    positive = bytes(reversed(fields.IQ4_VALUES[8:]))
    n0, n1, p0, p1 = (f"0x{int.from_bytes(half, 'little'):08x}" for t in (negative, positive) for half in (t[:4], t[4:]))
    asm = "{\n.reg .b32 w, i, n, p;\nmov.b32 w, $4;\nnot.b32 i, w;\n"
    for pair in (0, 2):
        asm += f"prmt.b32 n, {n0}, {n1}, w;\nprmt.b32 p, {p0}, {p1}, i;\nadd.u32 p, p, 0x80808080;\nsub.u32 p, p, n;\n"
        asm += f"prmt.b32 ${pair}, p, 0x64646464, 0x4140;\nprmt.b32 ${pair + 1}, p, 0x64646464, 0x4342;\n"
        asm += "shr.u32 w, w, 16;\nshr.u32 i, i, 16;\n" if pair == 0 else "}"
    return asm


def _table(values: tuple[int, ...]) -> int:
    """Eight values + 128 as the bytes of an int64."""
    return int.from_bytes(bytes(v + 128 for v in values), "little", signed=True)


_CODEBOOK_ASM = tl.constexpr(_codebook_asm())
_CODEBOOK_LOW = tl.constexpr(_table(fields.IQ4_VALUES[:8]))
_CODEBOOK_HIGH = tl.constexpr(_table(fields.IQ4_VALUES[8:]))
_MULTIPLY_ASM = tl.constexpr(
    "{\n.reg .b32 v, s, m;\nmov.b32 s, {$3, $3};\nmov.b32 m, {$4, $4};\nfma.rn.f16x2 v, $2, s, m;\nmov.b32 {$0, $1}, v;\n}"
)
_SUBTRACT_ASM = tl.constexpr(
    "{\n.reg .b32 v, s, m;\nmov.b32 s, {$3, $3};\nmov.b32 m, {$4, $4};\nmov.b32 v, {$5, $5};\n"
    "sub.rn.f16x2 v, $2, v;\nfma.rn.f16x2 v, v, s, m;\nmov.b32 {$0, $1}, v;\n}"
)


@triton.jit
def _half(bits):
    """The float16 whose bits are the low half of an integer."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _small(u):
    """An integer 0...1023 as float16: 0x6400 is 1024 and its last place is one."""
    return _half(u.to(tl.int32) | 0x6400) - 1024.0


@triton.jit
def _look_up(word, shift: tl.constexpr):
    """The codebook value + 128 of the index at ``shift``."""
    index = (word >> shift) & 15
    table = tl.where(index < 8, _CODEBOOK_LOW, _CODEBOOK_HIGH)
    return (table >> ((index & 7) * 8).to(tl.int64)).to(tl.int32) & 255


@triton.jit
def _codebook(word, PTX: tl.constexpr):
    """Eight indices to four pairs of float16 bits, 1152 + value."""
    if PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            _CODEBOOK_ASM, "=r,=r,=r,=r,r", [word], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        a = _look_up(word, 0) | (_look_up(word, 4) << 16) | 0x64006400
        b = _look_up(word, 8) | (_look_up(word, 12) << 16) | 0x64006400
        c = _look_up(word, 16) | (_look_up(word, 20) << 16) | 0x64006400
        d = _look_up(word, 24) | (_look_up(word, 28) << 16) | 0x64006400
    return a, b, c, d


@triton.jit
def _multiplied(pair, OFFSET: tl.constexpr, factor, PTX: tl.constexpr):
    """(v - OFFSET) * factor for the two float16 v in ``pair``, along a new last dimension. ``factor`` is an integer so small
    that OFFSET * factor is exact: one instruction with one rounding."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            _MULTIPLY_ASM, "=h,=h,r,h,h", [pair, factor, factor * -OFFSET], (tl.float16, tl.float16), is_pure=True, pack=1
        )
    else:
        low, high = (_half(pair) - OFFSET) * factor, (_half(pair >> 16) - OFFSET) * factor
    return tl.join(low, high)


@triton.jit
def _scaled(pair, OFFSET: tl.constexpr, scale, shift, PTX: tl.constexpr):
    """(v - OFFSET) * scale + shift for the two float16 v in ``pair``, along a new last dimension."""
    if PTX:
        offset = tl.full((1, 1, 1), OFFSET, tl.float16)
        low, high = tl.inline_asm_elementwise(
            _SUBTRACT_ASM, "=h,=h,r,h,h,h", [pair, scale, shift, offset], (tl.float16, tl.float16), is_pure=True, pack=1
        )
    else:
        low, high = (_half(pair) - OFFSET) * scale + shift, (_half(pair >> 16) - OFFSET) * scale + shift
    return tl.join(low, high)


@triton.jit
def _at(pointer, unit, UNIT: tl.constexpr):
    """Where an array of a unit of ``UNIT`` bytes begins."""
    return pointer + tl.full((), UNIT // (pointer.dtype.element_ty.primitive_bitwidth // 8), tl.int64) * unit


@triton.jit
def _by_row(x, INNER: tl.constexpr):
    """[w, g, INNER, r], flat, to [row, INNER]."""
    return tl.reshape(tl.permute(tl.reshape(x, (8, 8, INNER, 2)), (0, 3, 1, 2)), (_TILE, INNER))


@triton.jit
def _by_lane(x, INNER: tl.constexpr):
    """[h, r, w, g, t, INNER], flat, to [row, h, INNER, t]."""
    x = tl.permute(tl.reshape(x, (2, 2, 8, 8, 4, INNER)), (2, 1, 3, 0, 5, 4))
    return tl.reshape(x, (_TILE, 2, INNER, 4))


@triton.jit
def _words(pointer, unit, UNIT: tl.constexpr):
    """The codes of a (tile, block), [row, 8, t]."""
    return tl.reshape(_by_lane(tl.load(_at(pointer, unit, UNIT) + tl.arange(0, 4096)), 4), (_TILE, 8, 4))


@triton.jit
def _fifth_bits(pointer, unit, UNIT: tl.constexpr):
    """Q5_K: [row, 8, t], a word's extra bits at their places."""
    x = _by_lane(tl.load(_at(pointer, unit, UNIT) + tl.arange(0, 1024)), 1)
    x = tl.join(tl.join(x, x >> 8), tl.join(x >> 4, x >> 12))  # row, h, 1, t, s / 2, s % 2
    return tl.reshape(tl.permute(x, (0, 1, 2, 4, 5, 3)), (_TILE, 8, 4))


@triton.jit
def _high_bits(pointer, unit, UNIT: tl.constexpr):
    """Q6_K: [row, 8, t], a word's extra bits at their places."""
    x = _by_lane(tl.load(_at(pointer, unit, UNIT) + tl.arange(0, 2048)), 2)
    x = tl.join(x, x >> 8)  # row, h, s / 2, t, s % 2
    return tl.reshape(tl.permute(x, (0, 1, 2, 4, 3)), (_TILE, 8, 4))


@triton.jit
def _pair(word, INDEX: tl.constexpr):
    """Pair ``INDEX`` of a word of 4-bit codes as two float16 1024 + code."""
    return ((word >> (4 * INDEX)) & 0x000F000F) | 0x64006400


@triton.jit
def _pair_of_5(word, high, INDEX: tl.constexpr):
    """The same with a fifth bit."""
    return _pair(word, INDEX) | (((high << 4) >> INDEX) & 0x00100010)


@triton.jit
def _pair_of_6(word, high, INDEX: tl.constexpr):
    """With two more bits, as two float16 64 + code, whose last place is 1/16."""
    low = word << 4 if INDEX == 0 else word >> (4 * INDEX - 4)
    return (low & 0x00F000F0) | (((high << 8) >> (2 * INDEX)) & 0x03000300) | 0x54005400


@triton.jit
def _per_32(pointer, unit, UNIT: tl.constexpr):
    """[row, 8, 1]"""
    return _by_row(tl.load(_at(pointer, unit, UNIT) + tl.arange(0, 1024)), 8)[:, :, None]


@triton.jit
def _per_block(pointer, unit, UNIT: tl.constexpr):
    """[row, 1]"""
    return _by_row(tl.load(_at(pointer, unit, UNIT) + tl.arange(0, _TILE)), 1)


@triton.jit
def _in_order(v00, v01, v10, v11):
    """v(i, j) [row, 8, t, p] to [row, column]"""
    v = tl.join(tl.join(v00, v01), tl.join(v10, v11))  # row, 8, t, p, j, i
    return tl.reshape(tl.permute(v, (0, 1, 5, 4, 2, 3)), (_TILE, 256))


@triton.jit
def _iq4_xs(codes, scales, unit, UNIT: tl.constexpr, PTX: tl.constexpr):
    """Without the factor d."""
    scale = _small(_per_32(scales, unit, UNIT)) - 32.0
    p0, p1, p2, p3 = _codebook(_words(codes, unit, UNIT), PTX)
    return _in_order(
        _multiplied(p0, 1152, scale, PTX),
        _multiplied(p1, 1152, scale, PTX),
        _multiplied(p2, 1152, scale, PTX),
        _multiplied(p3, 1152, scale, PTX),
    )


@triton.jit
def _q6_k(codes, high, scales, unit, UNIT: tl.constexpr, PTX: tl.constexpr):
    """Without the factor d."""
    pair = _per_32(scales, unit, UNIT)
    scale_0, scale_1 = _small(pair & 255) - 128.0, _small((pair >> 8) & 255) - 128.0
    word, more = _words(codes, unit, UNIT), _high_bits(high, unit, UNIT)
    return _in_order(
        _multiplied(_pair_of_6(word, more, 0), 96, scale_0, PTX),
        _multiplied(_pair_of_6(word, more, 1), 96, scale_0, PTX),
        _multiplied(_pair_of_6(word, more, 2), 96, scale_1, PTX),
        _multiplied(_pair_of_6(word, more, 3), 96, scale_1, PTX),
    )


@triton.jit
def _q8_0(codes, high, scales, unit, UNIT: tl.constexpr, PTX: tl.constexpr):
    scale = _per_32(scales, unit, UNIT)
    none = tl.zeros((1, 1, 1), tl.float16)
    first, second = _words(codes, unit, UNIT), _words(high, unit, UNIT)
    return _in_order(
        _scaled((first & 0x00FF00FF) | 0x64006400, 1152, scale, none, PTX),
        _scaled(((first >> 8) & 0x00FF00FF) | 0x64006400, 1152, scale, none, PTX),
        _scaled((second & 0x00FF00FF) | 0x64006400, 1152, scale, none, PTX),
        _scaled(((second >> 8) & 0x00FF00FF) | 0x64006400, 1152, scale, none, PTX),
    )


@triton.jit
def _scale_and_shift(scales, d, unit, UNIT: tl.constexpr):
    block, pair = _per_block(d, unit, UNIT)[:, :, None], _per_32(scales, unit, UNIT)
    return _half(block) * _small(pair & 255), -(_half(block >> 16) * _small((pair >> 8) & 255))


@triton.jit
def _q4_k(codes, scales, d, unit, UNIT: tl.constexpr, PTX: tl.constexpr):
    scale, shift = _scale_and_shift(scales, d, unit, UNIT)
    word = _words(codes, unit, UNIT)
    return _in_order(
        _scaled(_pair(word, 0), 1024, scale, shift, PTX),
        _scaled(_pair(word, 1), 1024, scale, shift, PTX),
        _scaled(_pair(word, 2), 1024, scale, shift, PTX),
        _scaled(_pair(word, 3), 1024, scale, shift, PTX),
    )


@triton.jit
def _q5_k(codes, high, scales, d, unit, UNIT: tl.constexpr, PTX: tl.constexpr):
    scale, shift = _scale_and_shift(scales, d, unit, UNIT)
    word, more = _words(codes, unit, UNIT), _fifth_bits(high, unit, UNIT)
    return _in_order(
        _scaled(_pair_of_5(word, more, 0), 1024, scale, shift, PTX),
        _scaled(_pair_of_5(word, more, 1), 1024, scale, shift, PTX),
        _scaled(_pair_of_5(word, more, 2), 1024, scale, shift, PTX),
        _scaled(_pair_of_5(word, more, 3), 1024, scale, shift, PTX),
    )


@triton.jit
def _dense(codes, unit, blocks, COLUMNS: tl.constexpr):
    row = (tl.arange(0, _TILE) + unit // blocks * _TILE).to(tl.int64)
    column = tl.arange(0, COLUMNS) + unit % blocks * COLUMNS
    return tl.load(codes + row[:, None] * (blocks * COLUMNS) + column[None, :])


@triton.jit
def _weights(
    codes, high, scales, d, unit, blocks, UNIT: tl.constexpr, COLUMNS: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr
):
    """The (tile, block) ``unit`` of a weight, [row, column], float16 (float32 in the form F32). In the forms with one d per
    block (``_has_factor``) without it: the integers that are left lose nothing, or their twelfth bit."""
    if FORM == "IQ4_XS":
        w = _iq4_xs(codes, scales, unit, UNIT, PTX)
    elif FORM == "Q8_0":
        w = _q8_0(codes, high, scales, unit, UNIT, PTX)
    elif FORM == "Q6_K":
        w = _q6_k(codes, high, scales, unit, UNIT, PTX)
    elif FORM == "Q5_K":
        w = _q5_k(codes, high, scales, d, unit, UNIT, PTX)
    elif FORM == "Q4_K":
        w = _q4_k(codes, scales, d, unit, UNIT, PTX)
    else:
        w = _dense(codes, unit, blocks, COLUMNS)
    return w


@triton.constexpr_function
def _has_factor(form: str) -> bool:
    return form in ("IQ4_XS", "Q6_K")


@triton.jit
def _add_product(total, weights, factor, x, row_stride, at, GROUP: tl.constexpr, COLUMNS: tl.constexpr, FORM: tl.constexpr):
    """The weights of a block times the rows of a group, added to ``total`` [128, 16]."""
    token = GROUP * _GROUP + tl.arange(0, _GROUP)
    part = tl.load(x + token[None, :] * row_stride + (at + tl.arange(0, COLUMNS))[:, None])
    if _has_factor(FORM):
        return total + tl.dot(weights, part) * factor
    else:
        return tl.dot(weights, part, total, input_precision="ieee")


@triton.jit
def _store_group(out, total, GROUP: tl.constexpr):
    token = GROUP * _GROUP + tl.arange(0, _GROUP)
    tl.store(out + token[None, :] * _TILE + tl.arange(0, _TILE)[:, None], total)


@triton.jit(do_not_specialize=["units", "blocks"])
def _partial_sums(
    x,
    row_stride,
    codes,
    high,
    scales,
    d,
    out,
    units,
    blocks,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    FORM: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of the line of units for sets of groups of 16 rows of x -> ``out`` [set, program + tile, rows, 128]."""
    await_turn(PDL)
    program, programs, groups = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    rows: tl.constexpr = GROUPS * _GROUP
    first = (program.to(tl.int64) * units // programs).to(tl.int32)
    last = ((program + 1).to(tl.int64) * units // programs).to(tl.int32) - 1
    x += groups.to(tl.int64) * rows * row_stride
    out += groups.to(tl.int64) * (programs + units // blocks) * (rows * _TILE)
    for n_tile in range(first // blocks, last // blocks + 1):
        begin = tl.maximum(first, n_tile * blocks)
        end = tl.minimum(last, n_tile * blocks + blocks - 1)
        total_0 = tl.zeros((_TILE, _GROUP), tl.float32)
        total_1, total_2, total_3 = total_0, total_0, total_0
        if _has_factor(FORM):
            following = _per_block(d, begin, UNIT).to(tl.float32)
        for unit in range(begin, end + 1):
            at = (unit - n_tile * blocks) * COLUMNS
            weights = _weights(codes, high, scales, d, unit, blocks, UNIT, COLUMNS, FORM, PTX)
            if _has_factor(FORM):
                factor = following
                following = _per_block(d, tl.minimum(unit + 1, end), UNIT).to(tl.float32)
            else:
                factor = 1.0
            total_0 = _add_product(total_0, weights, factor, x, row_stride, at, 0, COLUMNS, FORM)
            if GROUPS > 1:
                total_1 = _add_product(total_1, weights, factor, x, row_stride, at, 1, COLUMNS, FORM)
            if GROUPS > 2:
                total_2 = _add_product(total_2, weights, factor, x, row_stride, at, 2, COLUMNS, FORM)
                total_3 = _add_product(total_3, weights, factor, x, row_stride, at, 3, COLUMNS, FORM)
        place = out + (program + n_tile) * (rows * _TILE)
        _store_group(place, total_0, 0)
        if GROUPS > 1:
            _store_group(place, total_1, 1)
        if GROUPS > 2:
            _store_group(place, total_2, 2)
            _store_group(place, total_3, 3)


@triton.jit(do_not_specialize=["rows", "units", "programs", "blocks"])
def _add_partial_sums(
    partial,
    factors,
    out,
    rows,
    outputs,
    units,
    programs,
    scale,
    blocks,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out`` [rows, outputs]: per tile the sum over the programs that touched it, in order, times the row's factor."""
    await_turn(PDL)
    tile, step = tl.program_id(0), tl.program_id(1)
    token, n = step * STEP + tl.arange(0, STEP), tl.arange(0, _TILE)
    group = step * STEP // ROWS
    # The program that has unit u is the last one that starts at u or before it.
    first = ((tile * blocks + 1).to(tl.int64) * programs - 1) // units
    last = ((tile * blocks + blocks).to(tl.int64) * programs - 1) // units
    partial += group.to(tl.int64) * (programs + units // blocks) * (ROWS * _TILE)
    place = (token % ROWS)[:, None] * _TILE + n[None, :]
    total = tl.zeros((STEP, _TILE), tl.float32)
    for program in range(first, last + 1):
        total += tl.load(partial + (program + tile) * (ROWS * _TILE) + place)
    factor = tl.load(factors + token) * scale
    column = tile * _TILE + n
    inside = (token < rows)[:, None] & (column < outputs)[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * outputs + column[None, :], total * factor[:, None], mask=inside)


@triton.jit
def scale_of_row(largest):
    """(what to multiply a row by whose largest magnitude this is, what undoes it), powers of two."""
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 127, -112)
    # Between 2^-4 and 2^15 the row is float16 as it is; otherwise its largest magnitude becomes 2^14 to 2^15.
    shift = tl.where(((exponent >= -4) & (exponent < 15)) | (largest == 0.0), 0, 14 - exponent)
    return ((127 + shift) << 23).to(tl.float32, bitcast=True), ((127 - shift) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _prepare_rows(x, out, factors, columns, row_stride, column_stride, WIDTH, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Row of x to float16, padded with zeros to ``WIDTH``, and the factor that undoes its scaling."""
    await_turn(PDL)
    row, k = tl.program_id(0), tl.arange(0, BLOCK)
    at = row.to(tl.int64) * row_stride + k.to(tl.int64) * column_stride
    values = tl.load(x + at, mask=k < columns, other=0.0).to(tl.float32)
    scale, undone = scale_of_row(tl.max(tl.abs(values), axis=0))
    values *= scale
    tl.store(factors + row, undone)
    tl.store(out + row.to(tl.int64) * WIDTH + k, values.to(out.dtype.element_ty), mask=k < WIDTH)


@triton.jit(do_not_specialize=["blocks"])
def _expand(codes, high, scales, d, out, blocks, UNIT: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr):
    """One unit of a quantised weight into the dense float16 matrix ``out`` [tiles * 128, blocks * 256]."""
    unit = tl.program_id(0)
    weights = _weights(codes, high, scales, d, unit, blocks, UNIT, 256, FORM, PTX)
    if _has_factor(FORM):
        weights = (weights * _per_block(d, unit, UNIT)).to(tl.float16)
    row = (tl.arange(0, _TILE) + unit // blocks * _TILE).to(tl.int64)
    column = tl.arange(0, 256) + unit % blocks * 256
    tl.store(out + row[:, None] * (blocks * 256) + column[None, :], weights)


@triton.jit
def _undo_scaling(out, factors, outputs, scale, BLOCK: tl.constexpr):
    """Multiply a row by its factor; nearly all are one and cost nothing, so that one program for a row is enough."""
    row = tl.program_id(0)
    factor = tl.load(factors + row) * scale
    if factor != 1.0:
        for start in range(0, outputs, BLOCK):
            column = start + tl.arange(0, BLOCK)
            at = out + row.to(tl.int64) * outputs + column
            tl.store(at, tl.load(at, mask=column < outputs) * factor, mask=column < outputs)


def linear(x: Tensor | Rows, weight: TiledWeight | QuantTensor, kind: RowKind) -> Tensor:
    """See ``ref.linear``; x and the weight are rounded to float16 unless the weight is dense float32."""
    if isinstance(weight, QuantTensor):
        weight = tile(weight, torch.float16 if isinstance(x, Rows) else x.dtype, x.device)
    return products(x, [weight], kind)[0]


def products(x: Tensor | Rows, weights: Sequence[TiledWeight], kind: RowKind) -> list[Tensor]:
    """``linear`` with each of the weights; x is prepared once."""
    prepared: dict[torch.dtype, Rows] = {}
    return [_product(x, weight, kind, prepared) for weight in weights]


def prepare(x: Tensor, dtype: torch.dtype) -> Rows:
    """x [M, K] in ``dtype``, float16 or, for float32 weights, float32."""
    rows, columns = x.shape
    made = empty_rows(rows, columns, dtype, x.device)
    width = made.values.shape[1]
    block = triton.next_power_of_2(width)
    warps = min(32, max(1, block // 1024))
    _prepare_rows[(rows,)](
        x, made.values, made.factors, columns, *x.stride(), width, BLOCK=block, num_warps=warps, **pdl(x.device)
    )
    return made


def _product(x: Tensor | Rows, weight: TiledWeight, kind: RowKind, prepared: dict[torch.dtype, Rows]) -> Tensor:
    rows, columns = (x.rows, x.columns) if isinstance(x, Rows) else x.shape
    if columns != weight.shape[1]:
        raise ValueError(f"x has {columns} columns, the weight {weight.shape[1]}")
    if not rows:
        return torch.empty(0, weight.shape[0], device=x.device)
    dtype = torch.float32 if weight.form == "F32" else torch.float16
    if isinstance(x, Tensor):
        if dtype not in prepared:
            prepared[dtype] = prepare(x, dtype)
        x = prepared[dtype]
    elif x.values.dtype != dtype:
        raise TypeError(f"a weight in form {weight.form} needs rows in {dtype}, not {x.values.dtype}")
    if kind == "prefill":
        return _prefill(x, weight)
    if hopper.takes(weight):
        return hopper.decode(x, weight)
    return _decode(x, weight)


def _decode(x: Rows, weight: TiledWeight) -> Tensor:
    outputs = weight.shape[0]
    groups = next((groups for groups in _GROUPS if x.rows <= groups * 16), _GROUPS[-1])
    sets = -(-x.rows // (groups * 16))
    units = weight.tiles * weight.blocks
    programs = min(PROGRAMS, units)
    partial = torch.empty(sets, programs + weight.tiles, groups * 16, TILE_ROWS, device=x.device)
    _partial_sums[(programs, sets)](
        x.values,
        x.values.stride(0),
        *_pointers(weight),
        partial,
        units,
        weight.blocks,
        UNIT=weight.unit_bytes,
        COLUMNS=weight.block_columns,
        GROUPS=groups,
        FORM=weight.form,
        PTX=_has_ptx(partial),
        num_stages=_stages(groups, x.device),
        **_options(partial),
        **pdl(x.device),
    )
    out = torch.empty(x.rows, outputs, device=x.device)
    step = 8
    _add_partial_sums[(weight.tiles, -(-x.rows // step))](
        partial,
        x.factors,
        out,
        x.rows,
        outputs,
        units,
        programs,
        weight.scale,
        weight.blocks,
        ROWS=groups * 16,
        STEP=step,
        **pdl(x.device),
    )
    return out


def _prefill(x: Rows, weight: TiledWeight) -> Tensor:
    outputs = weight.shape[0]
    dense = (expand(weight) if weight.expanded is None else weight.expanded)[:outputs]
    heights = _heights(x.device, outputs, weight.columns) if weight.form != "F32" else (PANEL,)
    out = torch.empty(padded(x.rows, PANEL), outputs, device=x.device)
    for rows in _panels(x.rows, heights):
        _multiply_panel(x.values[rows, : weight.columns], dense, out[rows])
    _undo_scaling[(x.rows,)](out, x.factors, outputs, weight.scale, BLOCK=4096)
    return out[: x.rows]


def _panels(rows: int, heights: Sequence[int]) -> Iterator[slice]:
    """High panels, and in the end the lowest one that suffices. ``heights`` ascend and have ``PANEL``. No panel ends behind
    the next multiple of that."""
    high = _HIGH_PANEL if _HIGH_PANEL in heights else PANEL
    start = 0
    while start < rows:
        left = rows - start
        height = next((height for height in heights if left <= height <= padded(left, PANEL)), high)
        yield slice(start, start + height)
        start += height


def _multiply_panel(panel: Tensor, dense: Tensor, out: Tensor) -> None:
    if panel.dtype == torch.float32:
        torch.mm(panel, dense.T, out=out)
    else:
        torch.mm(panel, dense.T, out_dtype=torch.float32, out=out)


@functools.cache
def _heights(device: torch.device, outputs: int, columns: int) -> tuple[int, ...]:
    """Those of ``_PANELS`` whose products with weights of this shape have the bits of ``PANEL`` rows. One that splits K has
    not, which shows on random numbers."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first prefill product of a shape cannot be captured in a graph, run it once before")
    random = torch.Generator(device).manual_seed(0)
    most = _PANELS[-1]
    x = torch.empty(most, padded(columns, COLUMN_STEP), dtype=torch.float16, device=device).normal_(generator=random)
    dense = torch.empty(outputs, columns, dtype=torch.float16, device=device).normal_(generator=random)

    def product(height: int) -> Tensor:
        out = torch.empty(padded(most, height), outputs, device=device)
        for start in range(0, most // height * height, height):
            _multiply_panel(x[start : start + height, :columns], dense, out[start : start + height])
        return out[: most // height * height]

    expected = product(PANEL)
    results = {height: product(height) for height in _PANELS}
    return tuple(height for height, got in results.items() if torch.equal(got, expected[: got.shape[0]]))


def _pointers(weight: TiledWeight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes, high, scales and d for a kernel; a dense matrix is all codes."""
    return weight.arrays if weight.unit_bytes else (weight.data,) * 4


def expand(weight: TiledWeight) -> Tensor:
    """The dense matrix [tiles * 128, columns] that a prefill product multiplies by."""
    if not weight.unit_bytes:
        return weight.data
    out = torch.empty(weight.tiles * TILE_ROWS, weight.columns, dtype=torch.float16, device=weight.data.device)
    _expand[(weight.tiles * weight.blocks,)](
        *_pointers(weight),
        out,
        weight.blocks,
        UNIT=weight.unit_bytes,
        FORM=weight.form,
        PTX=_has_ptx(out),
        num_warps=_WARPS,
    )
    return out


def _stages(groups: int, device: torch.device) -> int:
    """Of the pipeline; no bit depends on it."""
    if has_little_shared_memory(device):
        return 2 if groups == 1 else 1
    return 3 if groups < 4 else 2


def _options(x: Tensor) -> dict[str, int]:
    """At most 128 registers leave room for two programs on a multiprocessor."""
    return {"num_warps": _WARPS, "maxnreg": 128} if _has_ptx(x) else {"num_warps": _WARPS}


def _has_ptx(x: Tensor) -> bool:
    return x.is_cuda and torch.version.cuda is not None
