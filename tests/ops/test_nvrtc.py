"""Where machine code is kept, and what of that is believed; without a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.ops import nvrtc


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A made-up one; yields what it has compiled."""
    compiled: list[str] = []

    def compile_source(text: str) -> bytes:
        compiled.append(text)
        return b"code of " + text.encode()

    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda *_: 0))
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    nvrtc.machine_code.cache_clear()
    yield compiled
    nvrtc.machine_code.cache_clear()


def again(text: str) -> bytes:
    """As another process would ask."""
    nvrtc.machine_code.cache_clear()
    return nvrtc.machine_code(text)


def test_code_is_compiled_once_on_a_machine(compiler: list[str]) -> None:
    assert again("a") == again("a") == b"code of a"
    assert again("b") == b"code of b"
    assert compiler == ["a", "b"]


def test_an_empty_file_is_no_code(compiler: list[str], tmp_path: Path) -> None:
    again("a")
    (kept,) = (tmp_path / ".cache" / "paceline").iterdir()
    kept.write_bytes(b"")
    assert again("a") == again("a") == b"code of a"
    assert compiler == ["a", "a"]


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert again("a") == b"code of a"


def test_nothing_is_loaded_from_where_the_process_was_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    (tmp_path / "libnvrtc-builtins.so.13.0").write_bytes(b"somebody else's")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nvrtc, "_in_wheels", lambda name: [])
    loaded: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    nvrtc._nvrtc.__wrapped__()
    assert len(loaded) == 1 and loaded[0].startswith("libnvrtc.so.")
