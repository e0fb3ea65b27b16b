"""The arithmetic: everything that may change a token's bits besides the model, and its hash, the fingerprint."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform

import torch

from paceline.config import EngineOptions
from paceline.errors import ConfigError
from paceline.ops.attention import attention_arithmetic
from paceline.ops.gdn import verify_arithmetic
from paceline.ops.linear import decode_arithmetic

KERNEL_TABLE = 5
"""Version of the ops' tile sizes, splits and orders of summation. Raise it whenever one of them changes."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """'auto' is the first NVIDIA GPU if torch sees one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device must be 'auto', 'cpu' or 'cuda', got {name!r}", param="device")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no GPU", param="device")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device | None = None) -> torch.dtype:
    """'auto' is bfloat16 where the device (by default the CPU) multiplies it natively, else float32."""
    if name != "auto":
        return _DTYPES[name]
    if device is not None and device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else torch.float32


def configure(device: torch.device) -> None:
    """Switch off what torch may do behind our back on a GPU: partial sums in 16 bits."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def describe(options: EngineOptions) -> str:
    """One line with exactly what the fingerprint covers. What is not in it may not matter."""
    device = resolve_device(options.device)
    parts = {
        "device": _cuda(device) if device.type == "cuda" else _cpu(),
        "dtype": str(resolve_dtype(options.dtype, device)).removeprefix("torch."),
        "k": options.cache_type_k,
        "v": options.cache_type_v,
        "torch": torch.__version__,
        "kernels": str(KERNEL_TABLE),
    }
    if device.type == "cuda":
        parts["decode product"] = decode_arithmetic(device)
        parts["delta rule"] = verify_arithmetic(device)
        parts["attention"] = attention_arithmetic(device)
    return "; ".join(f"{name}={value}" for name, value in parts.items())


def _cuda(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    triton = importlib.metadata.version("triton")
    return f"cuda {torch.version.cuda} {torch.cuda.get_device_name(device)} sm_{major}{minor} triton {triton}"


def _cpu() -> str:
    supported = {"avx512_bf16": torch.cpu._is_avx512_bf16_supported(), "amx": torch.cpu._is_amx_tile_supported()}
    native = "+".join(name for name, there in supported.items() if there)
    return f"cpu {platform.machine()} {_vendor()} {torch.backends.cpu.get_cpu_capability()} {native}".strip()


def fingerprint(arithmetic: str) -> str:
    return "pl-" + hashlib.sha256(arithmetic.encode()).hexdigest()[:12]


def _vendor() -> str:
    """The libraries choose their kernels by vendor as well as by instruction set."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("vendor_id"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
