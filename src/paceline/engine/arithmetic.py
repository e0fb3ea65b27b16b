"""The arithmetic: everything that may change a token's bits besides the model, and its hash, the fingerprint."""

from __future__ import annotations

import hashlib
import platform

import torch

from paceline.config import EngineOptions
from paceline.errors import ConfigError

KERNEL_TABLE = 1
"""Version of the ops' tile sizes, splits and orders of summation. Raise it whenever one of them changes."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    if name not in ("auto", "cpu"):
        raise ConfigError(
            f"device must be 'auto' or 'cpu', got {name!r}: there are no kernels for other devices yet", param="device"
        )
    return torch.device("cpu")


def resolve_dtype(name: str) -> torch.dtype:
    """'auto' is bfloat16 where the processor multiplies it natively, else float32."""
    if name != "auto":
        return _DTYPES[name]
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else torch.float32


def describe(options: EngineOptions) -> str:
    """One line with exactly what the fingerprint covers. What is not in it may not matter."""
    parts = {
        "device": _cpu(),
        "dtype": str(resolve_dtype(options.dtype)).removeprefix("torch."),
        "k": options.cache_type_k,
        "v": options.cache_type_v,
        "torch": torch.__version__,
        "kernels": str(KERNEL_TABLE),
    }
    return "; ".join(f"{name}={value}" for name, value in parts.items())


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
