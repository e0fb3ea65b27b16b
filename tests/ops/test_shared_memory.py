"""The portable kernels fit into the shared memory of GPUs that have least of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAST = 99 << 10
"""Bytes that a program may have on GPUs of compute capability 8.6 and 8.9, from NVIDIA's tables."""


def test_kernels_fit_where_there_is_little() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).with_name("shared_memory.py")
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # which other tests set
    done = subprocess.run([sys.executable, str(script), "86"], capture_output=True, text=True, check=False, env=compiling)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert set(sizes) >= {"_attend", "_partial_sums", "_walk"}
    assert 0 < sizes["_partial_sums"] <= LEAST and max(sizes.values()) <= LEAST
