"""The decode product on Hopper GPUs (compute capability 9.0): ``hopper.cu``, compiled at run time, and its launches.

A row's bits do not depend on the other rows. How the weight is cut into parts depends on its shape and on the number of
multiprocessors alone, and so does the order over K in which a part adds; the sums of a tile's parts are added in the order
of the parts. The number of rows chooses only the width N of the instruction, ``wgmma.m64nNk16``, whose N columns are
independent products: with 8, 16, 24, 32, 48 and 64 columns an H200 returns equal bits for a column. More than 64 rows are
several launches.

Weights are decoded to the same float16 values as in ``kernel.py`` and a row of the result is off by as much, but the sums
are taken in another order, so the bits are others: ``ops.linear.decode_arithmetic`` tells.

No toolkit is needed: NVRTC comes with torch. What it makes is kept in ``~/.cache/paceline``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.ops.linear.rows import Rows
from paceline.ops.linear.tiles import TILE_ROWS, TiledWeight, unit_bytes
from paceline.ops.quant import fields

VERSION = 3
"""Of the arithmetic: raise it when the bits of a product change."""
FORMS = ("IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
_WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64)
"""Columns of the instruction, of which the last is also the number of rows in a launch."""
_PAIR_ROWS = 2 * TILE_ROWS
_CONSUMERS = 16
_THREADS = 32 * _CONSUMERS + 128
_SHARED_BEGIN, _SHARED_END = 1 << 10, 228 << 10
_SMALL_BYTES = 512
"""Of barriers and row factors in shared memory."""
_EMPTY = 0xFFFACADE
"""Bits of a NaN that arithmetic does not make."""
_SOURCE = Path(__file__).with_suffix(".cu")


@functools.cache
def available(device: torch.device) -> bool:
    """Whether ``decode`` can run on ``device``."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) == (9, 0)
        and _nvrtc() is not None
    )


def decode(x: Rows, weight: TiledWeight) -> Tensor:
    """x [M, K] times weight [N, K] transposed -> float32 [M, N], for a weight in one of ``FORMS``."""
    out = torch.empty(x.rows, weight.shape[0], device=x.device)
    with torch.cuda.device(x.device):
        for first in range(0, x.rows, _WIDTHS[-1]):
            _decode_rows(x, weight, out, first, min(_WIDTHS[-1], x.rows - first))
    return out


def _decode_rows(x: Rows, weight: TiledWeight, out: Tensor, first: int, rows: int) -> None:
    device = x.values.device.index
    tokens = next(width for width in _WIDTHS if rows <= width)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    parts, whole, sharers = _cut(weight.tiles, weight.blocks, processors)
    kernel = _kernel(device, weight.form, tokens)
    pointers = [weight.data, x.factors[first:], out[first:], _pieces(device)]
    numbers = [first, rows, out.shape[1], out.stride(0), weight.tiles, weight.blocks, whole, sharers, 0]
    arguments: list[_Argument] = [_tensor_map(x.values, tokens)]
    arguments += [ctypes.c_void_p(tensor.data_ptr()) for tensor in pointers]
    arguments += [ctypes.c_int(number) for number in numbers]
    _launch(kernel, parts, arguments)


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
    parts = torch.cuda.get_device_properties(device).multi_processor_count
    shape = (parts, 2, _WIDTHS[-1], _PAIR_ROWS)
    pieces = torch.full(shape, _EMPTY - (1 << 32), dtype=torch.int32, device=f"cuda:{device}")
    torch.cuda.current_stream(device).synchronize()  # whatever stream the next product is on
    return pieces


# Shared memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layout:
    """Addresses in the shared memory of a CTA; ``table`` is 0 where there is none."""

    stages: int
    x: int
    weights: int
    last_weights: int
    barriers: int
    table: int


def _layout(form: str, tokens: int) -> _Layout:
    """As many buffers as there is room for. IQ4_XS has a table of 64 KiB, at a multiple of that."""
    x_bytes, weight_bytes = tokens * 512, 2 * unit_bytes(form)
    if form == "IQ4_XS":
        table, behind = 2 << 16, 3 << 16
        stages = min(6, 1 + (table - _SHARED_BEGIN - x_bytes) // (x_bytes + weight_bytes))
        return _Layout(stages, _SHARED_BEGIN, _SHARED_BEGIN + stages * x_bytes, behind, behind + weight_bytes, table)
    stages = min(6, (_SHARED_END - _SHARED_BEGIN - _SMALL_BYTES) // (x_bytes + weight_bytes))
    weights = _SHARED_BEGIN + stages * x_bytes
    end = weights + stages * weight_bytes
    return _Layout(stages, _SHARED_BEGIN, weights, end - weight_bytes, end, 0)


# Compilation -----------------------------------------------------------------------------------------------------------


def source(form: str, tokens: int) -> str:
    """``hopper.cu`` for one form of weight and one number of tokens."""
    layout = _layout(form, tokens)
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
        **_codebook(),
    }
    lines = [f"#define {name} {value}" for name, value in constants.items()]
    return "\n".join([*lines, _multiply(tokens), _SOURCE.read_text(encoding="utf-8")])


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
def _nvrtc() -> ctypes.CDLL | None:
    """The library that torch brings along, None where there is none."""
    name = f"libnvrtc.so.{(torch.version.cuda or '0').split('.')[0]}"
    for path in (*_in_wheels(name), Path(name)):
        try:
            for part in path.parent.glob("libnvrtc-builtins.so.*"):  # which NVRTC looks for by its bare name
                ctypes.CDLL(str(part))
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


def _in_wheels(name: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    return [path for root in roots or () for path in sorted(Path(root).glob(f"*/lib/{name}"))]


def compile_source(text: str) -> bytes:
    """Machine code for sm_90a."""
    nvrtc = _nvrtc()
    assert nvrtc is not None, "available() has not been asked"
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"hopper.cu", 0, None, None)
    status = status or nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if status:
        raise RuntimeError(
            f"NVRTC could not compile hopper.cu (error {status}):\n{_read(nvrtc, program, 'ProgramLog').decode()}"
        )
    code = _read(nvrtc, program, "CUBIN")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _code(text: str) -> bytes:
    """The machine code, from the disk if it has been made before."""
    nvrtc, version = _nvrtc(), (ctypes.c_int(), ctypes.c_int())
    assert nvrtc is not None, "available() has not been asked"
    nvrtc.nvrtcVersion(*map(ctypes.byref, version))
    key = hashlib.sha256(f"{version[0].value}.{version[1].value}\n{text}".encode()).hexdigest()
    path = Path.home() / ".cache" / "paceline" / f"{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = compile_source(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        pass  # it will be compiled again
    return code


# The driver ------------------------------------------------------------------------------------------------------------


_Argument = ctypes.c_void_p | ctypes.c_int | ctypes.Array[ctypes.c_char]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_RESERVED_SHARED_MEMORY = 111  # CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK
_OVERLAP = _Attribute(6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: start before the last kernel's end


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"{what}: {(name.value or b'CUDA error').decode()} ({status})")


@functools.cache
def _kernel(device: int, form: str, tokens: int) -> ctypes.c_void_p:
    """product(), loaded on the current device."""
    driver, module, kernel = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), _code(source(form, tokens))), f"loading the product for {form}")
    _check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"product"), "finding the product")
    reserved, size = ctypes.c_int(), _SHARED_END - _SHARED_BEGIN
    _check(driver.cuDeviceGetAttribute(ctypes.byref(reserved), _RESERVED_SHARED_MEMORY, device), "asking for shared memory")
    if reserved.value != _SHARED_BEGIN:
        raise RuntimeError(f"shared memory begins at {reserved.value}, hopper.cu was laid out for {_SHARED_BEGIN}")
    _check(driver.cuFuncSetAttribute(kernel, _MAX_DYNAMIC_SHARED_SIZE, size), "asking for shared memory")
    return kernel


def _launch(kernel: ctypes.c_void_p, parts: int, arguments: Sequence[_Argument]) -> None:
    """On the current stream, before the end of what is on it: the kernel itself waits for that."""
    stream = torch.cuda.current_stream().cuda_stream
    config = _Config((parts, 1, 1), (_THREADS, 1, 1), _SHARED_END - _SHARED_BEGIN, stream)
    config.attributes, config.count = ctypes.pointer(_OVERLAP), 1
    values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
    _check(_driver().cuLaunchKernelEx(ctypes.byref(config), kernel, values, None), "launching a product")


def _tensor_map(values: Tensor, tokens: int) -> ctypes.Array[ctypes.c_char]:
    """A description of x [R, C] as [C / 64, R, 64] for the copy engine, which brings ``tokens`` rows of 256 columns at once,
    swizzled for wgmma."""
    rows, columns = values.shape
    memory = ctypes.create_string_buffer(128 + 64)
    shift = -ctypes.addressof(memory) % 64
    tensor_map = (ctypes.c_char * 128).from_buffer(memory, shift)
    status = _driver().cuTensorMapEncodeTiled(
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
    _check(status, "describing the rows of a product")
    return tensor_map
