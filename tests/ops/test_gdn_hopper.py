"""How generated rows on Hopper GPUs share out the states, and what they are for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from paceline.ops import nvrtc
from paceline.ops.gdn import hopper, output_bound, verify_arithmetic
from paceline.ops.linear import merge, pack

PROCESSORS, HEADS = 132, 48
REGISTERS, THREAD_STEP = 1 << 14, 8
"""Of a quarter of a multiprocessor; a thread has a multiple of 8."""
SHARED = 227 << 10


@pytest.mark.parametrize("form", hopper.FORMS, ids=str)
def test_every_column_and_every_row_is_somebodys(form: hopper.Form) -> None:
    assert form.warps * 4 * form.columns == hopper.HEAD_DIM
    assert 32 * form.warps % hopper.HEAD_DIM == 0 and 8 % (32 * form.warps // hopper.HEAD_DIM) == 0


@pytest.mark.parametrize("lanes", range(1, 9))
def test_all_warps_of_up_to_eight_lanes_run_at_once(lanes: int) -> None:
    form = hopper.form_for(lanes + 1)  # one span is padding
    assert lanes * HEADS <= PROCESSORS * form.ctas
    a_quarter = form.ctas * form.warps // 4
    registers = REGISTERS // (32 * a_quarter) // THREAD_STEP * THREAD_STEP
    assert registers >= 16 * form.columns + 32, "a thread holds 16 rows of its columns, and its rows of k"


def test_the_source_names_its_constants() -> None:
    text = hopper.source(hopper.Form(4, 8, 2, True))
    assert (
        text.startswith("#define COLUMNS 4\n#define WARPS 8\n#define CTAS 2\n#define RELOAD 1\n")
        and "griddepcontrol.wait" in text
    )


def test_the_arguments_are_those_of_the_source() -> None:
    text = Path(hopper.__file__).with_name("mixer.cu").read_text(encoding="utf-8")
    (body,) = re.findall(r"struct Arguments \{(.*?)\};", text, re.DOTALL)
    fields = re.sub(r"//.*", "", body).replace("const ", "")
    declared = [re.sub(r"^(float|uint2|int64|int)\b", "", part.strip()).strip() for part in re.split(r"[;,]", fields)]
    names = [name.lstrip("* ") for name in declared if name]
    assert names == [field[0] for field in hopper._Arguments._fields_]
    pointers = [name.lstrip("* ") for name in declared if name.startswith("*")]
    assert pointers == list(hopper._POINTERS)


def test_a_cpu_has_the_reference() -> None:
    cpu = torch.device("cpu")
    assert verify_arithmetic(cpu).startswith("reference-")
    state, z = torch.empty(1, 48, 128, 128), torch.empty(3, 48, 128)
    assert not hopper.fits(z, state, torch.empty(10240, 4), torch.float16)
    weights = merge([pack(torch.randn(32, 64), torch.float32, cpu) for _ in range(2)])
    assert output_bound(weights, 1, torch.ones(32)) is None


def test_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda device: True)
    taps, z = torch.empty(10240, 4, device="meta"), torch.empty(3, 48, 128, device="meta")
    state = torch.empty(2, 48, 128, 128, device="meta")
    assert hopper.fits(z, state, taps, torch.float16)
    assert not hopper.fits(z, state, taps, torch.float32) and not hopper.fits(z, state, taps, None)
    assert not hopper.fits(z, state, taps[:, :3], torch.float16)
    assert not hopper.fits(z, state[:, :6], taps, torch.float16)
    assert not hopper.fits(z, state[..., :64], taps, torch.float16)


@pytest.mark.skipif(nvrtc._nvrtc() is None, reason="needs NVRTC")
@pytest.mark.parametrize("form", hopper.FORMS, ids=str)
def test_it_compiles(form: hopper.Form) -> None:
    code = nvrtc.compile_source(hopper.source(form))
    assert b"mixer" in code and form.ctas * (46 << 10) <= SHARED
