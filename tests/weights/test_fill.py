"""What loading costs beside the weights themselves: memory, and what it says meanwhile."""

from __future__ import annotations

import dataclasses
import gc
import logging
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from paceline.bench import synth_model
from paceline.models.qwen35 import Qwen35
from paceline.weights import load
from paceline.weights.load import fill, open_target

MIB = 2**20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two large matrices: embedding and head are 64 MiB each as float32, 13 MiB in the file."""
    shape = dataclasses.replace(synth_model.SHAPES["tiny"], vocab_size=65_536)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synth_model.SHAPES, "wide", shape)
        return synth_model.write_pair("wide", tmp_path_factory.mktemp("wide"))[0]


def status(field: str) -> int:
    """Bytes of this process by ``/proc``."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return 1024 * int(found[1])


def loaded(target: Path) -> tuple[int, int, int]:
    """Bytes of the weights as float32, of the file, and by how much loading raised the peak of the resident memory."""
    checkpoint = open_target(target)
    with torch.device("meta"):
        model = Qwen35(checkpoint.config, torch.float32)
    dense = sum(parameter.nbytes for parameter in model.parameters())
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    fill(model, checkpoint)
    return dense, stored, status("VmHWM") - before


def test_loading_holds_no_second_copy(target: Path) -> None:
    """In a process of its own: what others have freed would be used again and not seen."""
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            dense, stored, peak = process.submit(loaded, target).result()
    except OSError as error:
        pytest.skip(f"the peak of the resident memory cannot be reset: {error}")
    assert dense > 128 * MIB, "too small to tell"
    assert dense / 2 < peak < dense + stored + 32 * MIB


def test_nothing_refers_to_the_file_afterwards(target: Path) -> None:
    checkpoint = open_target(target)
    with torch.device("meta"):
        model = Qwen35(checkpoint.config, torch.float32)
    fill(model, checkpoint)
    assert str(target) in Path("/proc/self/maps").read_text()
    del checkpoint
    gc.collect()
    assert str(target) not in Path("/proc/self/maps").read_text()
    assert model.norm.weight.isfinite().all()


def test_a_long_load_says_how_far_it_is(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = open_target(target)
    with torch.device("meta"):
        model = Qwen35(checkpoint.config, torch.float32)
    monkeypatch.setattr(load, "_REPORT_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "paceline.weights"):
        fill(model, checkpoint)
    lines = [record.getMessage() for record in caplog.records if record.name == "paceline.weights"]
    assert len(lines) == len(checkpoint.tensors)
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values()) / 1e9
    assert re.fullmatch(rf"{target.name}: {total:.1f} of {total:.1f} GB loaded, \d+\.\d\d GB/s", lines[-1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_holds_weights_once_and_packed(target: Path) -> None:
    checkpoint = open_target(target)
    with torch.device("meta"):
        model = Qwen35(checkpoint.config, torch.bfloat16)
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    before = torch.cuda.memory_allocated()
    fill(model, checkpoint, "cuda")
    assert torch.cuda.memory_allocated() - before < 1.25 * stored, "tiles are padded, and little else comes on top"
