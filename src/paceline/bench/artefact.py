"""What a benchmark result carries besides its numbers: the command, machine, versions and hashes that made it."""

from __future__ import annotations

import hashlib
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

WORKLOAD = Path(__file__).with_name("workload.jsonl")


def load_workload() -> list[dict[str, Any]]:
    """The 60 requests, each with its ``suite`` and ``messages``."""
    return [json.loads(line) for line in WORKLOAD.read_text().splitlines()]


def provenance(info: EngineInfo) -> dict[str, Any]:
    """Everything needed to know what a result is about."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", "src")),
        "fingerprint": info.fingerprint,
        "arithmetic": info.arithmetic,
        "hardware": {"processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "workload_sha256": hashlib.sha256(WORKLOAD.read_bytes()).hexdigest(),
        "target": {"file": Path(info.target_path).name, "sha256": sha256(info.target_path)},
        "drafter": {"file": Path(info.drafter_path).name, "sha256": sha256(info.drafter_path)}
        if info.drafter_path
        else None,
    }


def write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
