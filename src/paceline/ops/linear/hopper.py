"""The decode product on Hopper GPUs (compute capability 9.0): ``hopper.cu``, compiled at run time, and its launches.

A row's bits do not depend on the other rows. How the weight is cut into parts depends on its shape and on the number of
multiprocessors alone, and so does the order over K in which a part adds; the partial sums of a tile are added in the order
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
from pathlib import Path

import torch
from torch import Tensor

from paceline.ops.linear.rows import Rows
from paceline.ops.linear.tiles import TILE_ROWS, TiledWeight
from paceline.ops.quant import fields

VERSION = 1
"""Of the arithmetic: raise it when the bits of a product change."""
FORMS = ("IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
_WIDTHS = (8, 16, 24, 32, 48, 64)
"""Columns of the instruction, of which the last is also the number of rows in a launch."""
_PAIR_ROWS = 2 * TILE_ROWS
_THREADS = 17 * 32
_SHARED_BYTES = 227 << 10
_SOURCE = Path(__file__).with_suffix(".cu")


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
    pairs = -(-weight.tiles // 2)
    parts = min(torch.cuda.get_device_properties(device).multi_processor_count, pairs * weight.blocks)
    partial = torch.empty(parts + pairs, rows, _PAIR_ROWS, device=x.device)
    product, add_parts = _kernels(device, weight.form, tokens)
    pointer = ctypes.c_void_p
    factors, target = pointer(x.factors[first:].data_ptr()), pointer(out[first:].data_ptr())
    shape = [ctypes.c_int(value) for value in (rows, out.shape[1], out.stride(0))]
    arguments: list[_Argument] = [_tensor_map(x.values, tokens), pointer(weight.data.data_ptr()), factors, target]
    arguments += [pointer(partial.data_ptr()), ctypes.c_int(first), *shape]
    arguments += [ctypes.c_int(weight.tiles), ctypes.c_int(weight.blocks)]
    _launch(product, (parts, 1), (_THREADS, 1), _shared_bytes(weight, tokens), arguments)
    arguments = [pointer(partial.data_ptr()), factors, target, *shape, ctypes.c_int(weight.blocks), ctypes.c_int(parts)]
    deep = min(4, rows)
    _launch(add_parts, (pairs, -(-rows // deep)), (64, deep), 0, arguments)


# What is in the shared memory of a CTA ---------------------------------------------------------------------------------


def _stage_bytes(unit_bytes: int, tokens: int) -> int:
    return 2 * unit_bytes + tokens * 512


def _stages(unit_bytes: int, tokens: int) -> int:
    return min(6, (_SHARED_BYTES - 2048) // _stage_bytes(unit_bytes, tokens))


def _shared_bytes(weight: TiledWeight, tokens: int) -> int:
    """Buffers, the alignment of their beginning, and two barriers of 8 bytes for each."""
    stages = _stages(weight.unit_bytes, tokens)
    return stages * (_stage_bytes(weight.unit_bytes, tokens) + 16) + 1024


# Compilation -----------------------------------------------------------------------------------------------------------


def source(form: str, tokens: int) -> str:
    """``hopper.cu`` for one form of weight and one number of tokens."""
    stages = _stages(UNIT_BYTES[form], tokens)
    lines = [f"#define FORM {form}", f"#define TOKENS {tokens}", f"#define STAGES {stages}"]
    lines += [f"#define LANE_CONSTANTS {_lane_constants()}", _multiply(tokens), _SOURCE.read_text(encoding="utf-8")]
    return "\n".join(lines)


def _lane_constants() -> str:
    negative = bytes(-v for v in fields.IQ4_VALUES[:8])
    positive = bytes(reversed(fields.IQ4_VALUES[8:]))
    words = [0xFFFFFFFF]
    words += [int.from_bytes(half, "little") for table in (negative, positive) for half in (table[:4], table[4:])]
    words += [0x64646464]
    return "{" + ", ".join("{" + ", ".join([f"0x{word:08x}u"] * 4) + "}" for word in words) + "}"


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


UNIT_BYTES = {"IQ4_XS": 17664, "Q4_K": 18944, "Q5_K": 23040, "Q6_K": 26880, "Q8_0": 34816}


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
def _kernels(device: int, form: str, tokens: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """product() and add_parts(), loaded on the current device."""
    driver, module = _driver(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), _code(source(form, tokens))), f"loading the product for {form}")
    kernels = ctypes.c_void_p(), ctypes.c_void_p()
    for kernel, name in zip(kernels, (b"product", b"add_parts"), strict=True):
        _check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, name), f"finding {name.decode()}")
    _check(driver.cuFuncSetAttribute(kernels[0], _MAX_DYNAMIC_SHARED_SIZE, _SHARED_BYTES), "asking for shared memory")
    return kernels


def _launch(
    kernel: ctypes.c_void_p, grid: tuple[int, int], block: tuple[int, int], shared_bytes: int, arguments: Sequence[_Argument]
) -> None:
    """On the current stream, before the end of what is on it: the kernel itself waits for that."""
    config = _Config((*grid, 1), (*block, 1), shared_bytes, torch.cuda.current_stream().cuda_stream)
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
