"""The decode product on Hopper GPUs (compute capability 9.0): ``hopper.cu``, compiled at run time, and its launches.

A row's bits do not depend on the other rows. How the weight is cut into parts depends on its shape and on the number of
multiprocessors alone, and so does the order over K in which a part adds; the sums of a tile's parts are added in the order
of the parts. The number of rows chooses only the width N of the instruction, ``wgmma.m64nNk16``, whose N columns are
independent products: with 8, 16, 24, 32, 48 and 64 columns an H200 returns equal bits for a column. More than 64 rows are
several launches.

Weights are decoded to the same float16 values as in ``kernel.py`` and a row of the result is off by as much, but the sums
are taken in another order, so the bits are others: ``ops.linear.decode_arithmetic`` tells.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.ops import nvrtc
from paceline.ops.linear.rows import Rows, empty_rows
from paceline.ops.linear.tiles import TILE_ROWS, TiledWeight, unit_bytes
from paceline.ops.quant import fields

VERSION = 4
"""Of the arithmetic: raise it when the bits of a product or of what it makes of its results change."""
FORMS = ("IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
_WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64)
"""Columns of the instruction, of which the last is also the number of rows in a launch."""
_PAIR_ROWS = 2 * TILE_ROWS
_CONSUMERS = 16
_THREADS = 32 * _CONSUMERS + 128
_SHARED_BEGIN, _SHARED_END = 1 << 10, 228 << 10
_SMALL_BYTES, _SCALE_BYTES, _EXCHANGE_BYTES = 512, 512, 4096
"""In shared memory: of barriers and row factors; with SwiGLU, of row scales, and of what warps leave for others."""
_EMPTY = 0xFFFACADE
"""Bits of a NaN that arithmetic does not make."""
_SOURCE = Path(__file__).with_suffix(".cu")


def decode(x: Rows, weight: TiledWeight) -> Tensor:
    """x [M, K] times weight [N, K] transposed -> float32 [M, N], for a weight in one of ``FORMS``."""
    out = torch.empty(x.rows, weight.shape[0], device=x.device)
    _in_launches(x, weight, out)
    return out


def decode_swiglu(x: Rows, weight: TiledWeight, longest: float) -> Rows:
    """silu(gate) up of x [M, K], for a weight [2 F, K] in one of ``FORMS`` whose first half is gate's and whose second one
    is up's, F being a multiple of ``COLUMN_STEP``. ``longest`` bounds the product of the norms of a row of either."""
    result = empty_rows(x.rows, weight.shape[0] // 2, torch.float16, x.device)
    _in_launches(x, weight, result.values, result.factors, longest)
    return result


def takes(weight: TiledWeight) -> bool:
    """Whether products with this weight run here."""
    return weight.form in FORMS and nvrtc.available(weight.data.device)


def compile_ahead(weights: Sequence[TiledWeight], gated: Sequence[TiledWeight]) -> None:
    """The machine code of every width of what multiplies by these weights, and by those that are ``gated`` with SwiGLU, side
    by side. Without this they are compiled one by one, when each is needed."""
    kernels = {(weight.form, width, False, False) for weight in weights for width in _WIDTHS}
    kernels |= {(weight.form, width, True, False) for weight in gated for width in _WIDTHS}
    kernels |= {(weight.form, width, False, True) for weight in weights for width in _WIDTHS if _in_halves(weight, width)}
    texts = [source(*kernel) for kernel in kernels]
    with ThreadPoolExecutor() as pool:
        list(pool.map(nvrtc.machine_code, texts))


def _in_launches(x: Rows, weight: TiledWeight, out: Tensor, factors: Tensor | None = None, longest: float = 0.0) -> None:
    """Results go to ``out`` [M, ...], which with SwiGLU has the ``factors`` [M] beside it."""
    device = x.values.device.index
    parts, whole, sharers = _cut(weight.tiles, weight.blocks, nvrtc.processors(device))
    with torch.cuda.device(device):
        for first in range(0, x.rows, _WIDTHS[-1]):
            rows = min(_WIDTHS[-1], x.rows - first)
            tokens = next(width for width in _WIDTHS if rows <= width)
            pointers = [weight.data, x.factors[first:], out[first:], _pieces(device)]
            halves = factors is None and _in_halves(weight, tokens)
            cut = (2 * weight.tiles, weight.blocks // 2, 1, 0) if halves else (weight.tiles, weight.blocks, whole, sharers)
            numbers = [first, rows, out.shape[1], out.stride(0), *cut, 0]
            arguments: list[nvrtc.Argument] = [_tensor_map(x.values, tokens)]
            arguments += [ctypes.c_void_p(tensor.data_ptr()) for tensor in pointers]
            arguments += [ctypes.c_int(number) for number in numbers]
            if factors is not None:
                assert x.norms is not None, "SwiGLU takes rows that have norms"
                arguments += [ctypes.c_void_p(x.norms[first:].data_ptr()), ctypes.c_float(longest)]
                arguments += [ctypes.c_void_p(factors[first:].data_ptr())]
            else:
                arguments += [ctypes.c_void_p(), ctypes.c_float(), ctypes.c_void_p()]
            kernel = _kernel(device, weight.form, tokens, factors is not None, halves)
            nvrtc.launch(kernel, (weight.tiles if halves else parts, 1, 1), _THREADS, arguments, _SHARED_END - _SHARED_BEGIN)


_HALVED = 16
"""Up to so many tokens, two halves of x have room beside each other."""


def _in_halves(weight: TiledWeight, tokens: int) -> bool:
    """Whether a CTA has a tile alone and its warps a half of K each. They add up what the two parts of a pair that is cut in
    the middle would, and wait for nobody."""
    parts, whole, _ = _cut(weight.tiles, weight.blocks, nvrtc.processors(weight.data.device.index))
    return tokens <= _HALVED and not whole and parts == 2 * -(-weight.tiles // 2) and not weight.blocks % 2


def _cut(tiles: int, blocks: int, processors: int) -> tuple[int, int, int]:
    """CTAs, the pairs of tiles that each has alone, and how many CTAs share the steps of the pairs that are left over. Where
    that takes no more steps of any, each CTA has a part of one pair only: fewer sums are exchanged."""
    pairs = -(-tiles // 2)
    parts = min(processors, pairs * blocks)
    of_pair = parts // pairs
    if of_pair and -(-blocks // of_pair) <= -(-pairs * blocks // parts):
        parts = pairs * of_pair
    return parts, pairs // parts, min(parts, pairs % parts * blocks)


@functools.cache
def _pieces(device: int) -> Tensor:
    """What the parts of a product leave for each other. There is one for a device, so two products must not run side by
    side: they share a stream, or one stream waits for the other."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first product on a GPU cannot be captured in a graph, run it once before")
    shape = (nvrtc.processors(device), 2, _WIDTHS[-1], _PAIR_ROWS)
    pieces = torch.full(shape, _EMPTY - (1 << 32), dtype=torch.int32, device=f"cuda:{device}")
    torch.cuda.current_stream(device).synchronize()  # whatever stream the next product is on
    return pieces


# Shared memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layout:
    """Addresses in the shared memory of a CTA; ``table`` is 0 where there is none, ``exchange`` is for SwiGLU and halves."""

    stages: int
    x: int
    weights: int
    last_weights: int
    barriers: int
    table: int
    exchange: int


def _layout(form: str, tokens: int, swiglu: bool = False, halves: bool = False) -> _Layout:
    """As many buffers as there is room for. IQ4_XS has a table of 64 KiB, at a multiple of that."""
    x_bytes, weight_bytes = (1 + halves) * tokens * 512, 2 * unit_bytes(form)
    small, exchange = _SMALL_BYTES + swiglu * _SCALE_BYTES, (swiglu or halves) * _EXCHANGE_BYTES
    if form == "IQ4_XS":
        table, behind = 2 << 16, 3 << 16
        stages = min(6, 1 + (table - _SHARED_BEGIN - exchange - x_bytes) // (x_bytes + weight_bytes))
        weights = _SHARED_BEGIN + stages * x_bytes
        end = weights + (stages - 1) * weight_bytes
        return _Layout(stages, _SHARED_BEGIN, weights, behind, behind + weight_bytes, table, end)
    stages = min(6, (_SHARED_END - _SHARED_BEGIN - small - exchange) // (x_bytes + weight_bytes))
    weights = _SHARED_BEGIN + stages * x_bytes
    end = weights + stages * weight_bytes
    return _Layout(stages, _SHARED_BEGIN, weights, end - weight_bytes, end, 0, end + small)


# Compilation -----------------------------------------------------------------------------------------------------------


def source(form: str, tokens: int, swiglu: bool = False, halves: bool = False) -> str:
    """``hopper.cu`` for one form of weight and one number of tokens, with SwiGLU or without, for whole K or in halves."""
    layout = _layout(form, tokens, swiglu, halves)
    constants = {
        "FORM": form,
        "EMPTY": f"0x{_EMPTY:08x}u",
        "TOKENS": tokens,
        "STAGES": layout.stages,
        "X_AT": layout.x,
        "WEIGHTS_AT": layout.weights,
        "LAST_WEIGHTS_AT": layout.last_weights,
        "BARRIERS_AT": layout.barriers,
        "TABLE": layout.table,
        "EXCHANGE_AT": layout.exchange,
        "SWIGLU": int(swiglu),
        "HALVES": int(halves),
        **_codebook(),
    }
    return _multiply(tokens) + "\n" + nvrtc.with_constants(constants, _SOURCE)


def _codebook() -> dict[str, str]:
    """IQ4_XS: the magnitudes of the negative values, and the positive values from the last to the first, four to a word."""
    negative = bytes(-value for value in fields.IQ4_VALUES[:8])
    positive = bytes(reversed(fields.IQ4_VALUES[8:]))
    tables = {"NEGATIVE": negative, "POSITIVE": positive}
    return {
        f"{name}_{half}": f"0x{int.from_bytes(table[4 * half : 4 * half + 4], 'little'):08x}u"
        for name, table in tables.items()
        for half in (0, 1)
    }


def _multiply(tokens: int) -> str:
    """sums += a x, one instruction of 64 rows, ``tokens`` columns and 16 steps of K for each warpgroup."""
    count = tokens // 2
    outputs = ", ".join(f"%{i}" for i in range(count))
    inputs = ", ".join(f"%{count + i}" for i in range(4))
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    a = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return (
        f"__device__ __forceinline__ void multiply(float (&sums)[{count}], const unsigned int* a, unsigned long long x) {{\n"
        f'    asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.f16.f16 "\n'
        f'                 "{{{outputs}}}, {{{inputs}}}, %{count + 4}, 1, 1, 1, 0;"\n'
        f'                 : {sums} : {a}, "l"(x));\n}}'
    )


@functools.cache
def _kernel(device: int, form: str, tokens: int, swiglu: bool, halves: bool) -> ctypes.c_void_p:
    """product(), loaded on the current device."""
    if (reserved := nvrtc.reserved_shared_memory(device)) != _SHARED_BEGIN:
        raise RuntimeError(f"shared memory begins at {reserved}, hopper.cu was laid out for {_SHARED_BEGIN}")
    return nvrtc.load(source(form, tokens, swiglu, halves), "product", _SHARED_END - _SHARED_BEGIN)


def _tensor_map(values: Tensor, tokens: int) -> ctypes.Array[ctypes.c_char]:
    """A description of x [R, C] as [C / 64, R, 64] for the copy engine, which brings ``tokens`` rows of 256 columns at once,
    swizzled for wgmma."""
    rows, columns = values.shape
    memory = ctypes.create_string_buffer(128 + 64)
    shift = -ctypes.addressof(memory) % 64
    tensor_map = (ctypes.c_char * 128).from_buffer(memory, shift)
    status = nvrtc.driver().cuTensorMapEncodeTiled(
        ctypes.byref(tensor_map),
        6,  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16
        3,
        ctypes.c_void_p(values.data_ptr()),
        (ctypes.c_uint64 * 3)(64, rows, columns // 64),
        (ctypes.c_uint64 * 2)(columns * 2, 128),
        (ctypes.c_uint32 * 3)(64, tokens, 4),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        0,  # no interleaving
        3,  # CU_TENSOR_MAP_SWIZZLE_128B
        3,  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
        0,  # zeros outside
    )
    nvrtc.check(status, "describing the rows of a product")
    return tensor_map
