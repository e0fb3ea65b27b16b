"""CUDA C++ compiled at run time, and the launch of what comes of it.

No toolkit is needed: NVRTC comes with torch. What it makes is kept in ``~/.cache/paceline``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from paceline.ops.dispatch import uses_special_kernels

Argument = ctypes.c_void_p | ctypes.c_int | ctypes.c_int64 | ctypes.c_float | ctypes.Array[ctypes.c_char]


def available(device: torch.device) -> bool:
    """Whether kernels that are written for Hopper GPUs (compute capability 9.0) are to run on ``device``, and can."""
    return uses_special_kernels() and _can_run(device)


@functools.cache
def _can_run(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) == (9, 0)
        and _nvrtc() is not None
    )


def processors(device: int) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# Compilation -----------------------------------------------------------------------------------------------------------


def with_constants(constants: Mapping[str, object], path: Path) -> str:
    """The source of a file behind definitions of what it leaves open."""
    return "".join(f"#define {name} {value}\n" for name, value in constants.items()) + path.read_text(encoding="utf-8")


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """The library that torch brings along, None where there is none."""
    name = f"libnvrtc.so.{(torch.version.cuda or '0').split('.')[0]}"
    for path in _in_wheels(name):
        try:
            for part in path.parent.glob("libnvrtc-builtins.so.*"):  # which NVRTC looks for by its bare name
                ctypes.CDLL(str(part))
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    try:
        return ctypes.CDLL(name)  # the system's, which finds its own parts
    except OSError:
        return None


def _in_wheels(name: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    return [path for root in roots or () for path in sorted(Path(root).glob(f"*/lib/{name}"))]


def compile_source(text: str) -> bytes:
    """Machine code of CUDA C++ for sm_90a."""
    nvrtc = _nvrtc()
    assert nvrtc is not None, "available() has not been asked"
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"paceline.cu", 0, None, None)
    status = status or nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if status:
        raise RuntimeError(
            f"NVRTC could not compile a kernel (error {status}):\n{_read(nvrtc, program, 'ProgramLog').decode()}"
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


@functools.cache
def machine_code(text: str) -> bytes:
    """The machine code, from the disk if it has been made before."""
    nvrtc, version = _nvrtc(), (ctypes.c_int(), ctypes.c_int())
    assert nvrtc is not None, "available() has not been asked"
    nvrtc.nvrtcVersion(*map(ctypes.byref, version))
    key = hashlib.sha256(f"{version[0].value}.{version[1].value}\n{text}".encode()).hexdigest()
    try:
        path = Path.home() / ".cache" / "paceline" / f"{key}.cubin"
        if code := path.read_bytes():  # a machine that went down may leave a file with nothing in it
            return code
    except RuntimeError:  # a user without a home, as in containers
        return compile_source(text)
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
_SHARED_MEMORY_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_RESERVED_SHARED_MEMORY = 111  # CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK
_OVERLAP = _Attribute(6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: start before the last kernel's end


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    if status:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"{what}: {(name.value or b'CUDA error').decode()} ({status})")


def load(text: str, name: str, shared_bytes: int = 0) -> ctypes.c_void_p:
    """The kernel ``name`` of a source on the current device; launches may ask for ``shared_bytes`` of shared memory."""
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver().cuModuleLoadData(ctypes.byref(module), machine_code(text)), f"loading {name}")
    check(driver().cuModuleGetFunction(ctypes.byref(kernel), module, name.encode()), f"finding {name}")
    if shared_bytes:
        for attribute, value in ((_MAX_DYNAMIC_SHARED_SIZE, shared_bytes), (_SHARED_MEMORY_CARVEOUT, 100)):
            check(driver().cuFuncSetAttribute(kernel, attribute, value), "asking for shared memory")
    return kernel


def reserved_shared_memory(device: int) -> int:
    """Bytes at the beginning of a CTA's shared memory that are the driver's."""
    reserved = ctypes.c_int()
    check(driver().cuDeviceGetAttribute(ctypes.byref(reserved), _RESERVED_SHARED_MEMORY, device), "asking for shared memory")
    return reserved.value


def launch(
    kernel: ctypes.c_void_p,
    grid: tuple[int, int, int],
    threads: int,
    arguments: Sequence[Argument | ctypes.Structure],
    shared_bytes: int = 0,
    *,
    overlaps: bool = True,
) -> None:
    """On the current stream, before the end of what is on it: the kernel itself waits for that (``ops/launch.py``). Unless
    it ``overlaps``, behind that."""
    stream = torch.cuda.current_stream().cuda_stream
    config = _Config(grid, (threads, 1, 1), shared_bytes, stream)
    config.attributes, config.count = ctypes.pointer(_OVERLAP), int(overlaps)
    values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
    check(driver().cuLaunchKernelEx(ctypes.byref(config), kernel, values, None), "launching a kernel")
