"""What a benchmark result carries besides its numbers: the command, machine, versions and hashes that made it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from paceline.types import EngineInfo
from paceline.weights.files import sha256
from paceline.weights.tokenizer import Tokenizer

WORKLOAD = Path(__file__).with_name("workload.jsonl")
WHOLE_BYTES = 1 << 30
_BLOCKS, _BLOCK_BYTES = 64, 1 << 20


def load_workload() -> list[dict[str, Any]]:
    """The 60 requests, each with its ``suite`` and ``messages``."""
    return [json.loads(line) for line in WORKLOAD.read_text().splitlines()]


def prompts(tokenizer: Tokenizer, count: int, length: int, first: int = 0) -> list[list[int]]:
    """``count`` prompts of ``length`` token ids: its number, counted from ``first``, as no two may begin alike, and a piece
    of the workload."""
    text = "\n".join(message["content"] for entry in load_workload() for message in entry["messages"])
    corpus = [token for token in tokenizer.encode(text) if token not in tokenizer.special_ids]
    endless = corpus * (-(-length // len(corpus)) + 1)
    made = []
    for number in range(first, first + count):
        start = number * length % len(corpus)
        made.append((tokenizer.encode(f"{number}. ") + endless[start : start + length])[:length])
    return made


def provenance(info: EngineInfo) -> dict[str, Any]:
    """Everything needed to know what a result is about."""
    return {
        **machine(),
        "fingerprint": info.fingerprint,
        "arithmetic": info.arithmetic,
        "workload_sha256": hashlib.sha256(WORKLOAD.read_bytes()).hexdigest(),
        "target": model_file(info.target_path),
        "drafter": model_file(info.drafter_path) if info.drafter_path else None,
    }


def machine() -> dict[str, Any]:
    """The command, when it ran, on which commit, machine and versions. Asks no GPU for a context."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "rev-parse", "HEAD") or None,
        "dirty": bool(_output("git", "status", "--porcelain", "--", "..")),
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpus": _output(
                "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
            ).splitlines(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _installed("triton"),
        },
    }


def model_file(path: str | Path) -> dict[str, Any]:
    """Name, size and hash of a model: of every byte up to ``WHOLE_BYTES``, of sampled blocks beyond, which takes a moment
    instead of half a minute and still tells one quantisation or training run from another. A directory's weights count
    as one."""
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    if size <= WHOLE_BYTES and len(files) == 1:
        return {"file": path.name, "bytes": size, "sha256": sha256(files[0])}
    digest = hashlib.sha256()
    for file in files:
        _sample(file, digest)
    return {"file": path.name, "bytes": size, "sampled_sha256": digest.hexdigest()}


def _sample(file: Path, digest: hashlib._Hash) -> None:
    """Add a file's size and ``_BLOCKS`` blocks of it, evenly apart, the first and the last among them."""
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as source:
        for block in range(_BLOCKS):
            source.seek(max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
            digest.update(source.read(_BLOCK_BYTES))


def gpu_memory_mib() -> list[int]:
    """Memory in use on each GPU; empty without nvidia-smi."""
    lines = _output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits").splitlines()
    return [int(line) for line in lines if line.strip().isdigit()]


def write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def _output(*command: str) -> str:
    """What a program prints; nothing where there is no such program."""
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
