"""Nobody waits for the compiler once the engine has warmed up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIX, EIGHT, LONG = ",".join(["107"] * 6), ",".join(["107"] * 8), ",".join(["200"] * 8)
ROUNDS = ["107", "1", "64,20,107", SIX, EIGHT, LONG, "900", "513", "960,65", "700,17,33,5,301", "301,301,301,301"]
"""Lengths of prompts. Of some there are more together than captured forwards have room for."""


def test_warming_up_compiles_what_is_needed() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).with_name("specializations.py")
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # which other tests set
    done = subprocess.run([sys.executable, str(script), *ROUNDS], capture_output=True, text=True, check=False, env=compiling)
    assert done.returncode == 0, done.stderr[:2000]
    assert json.loads(done.stdout.splitlines()[-1]) == {"draws": [], **{lengths: [] for lengths in ROUNDS}}
