"""How verify on Hopper GPUs shares out the states."""

from __future__ import annotations

import pytest
import torch

from paceline.ops import nvrtc
from paceline.ops.gdn import hopper, verify_arithmetic

PROCESSORS, HEADS = 132, 48
REGISTERS, THREAD_STEP = 1 << 14, 8
"""Of a quarter of a multiprocessor; a thread has a multiple of 8."""


@pytest.mark.parametrize("form", hopper.FORMS, ids=str)
def test_every_column_is_somebodys(form: hopper.Form) -> None:
    assert form.parts * form.warps * 4 * form.columns == hopper.HEAD_DIM and 8 % form.warps == 0


@pytest.mark.parametrize("spans", range(1, 9))
def test_all_warps_of_up_to_eight_lanes_run_at_once(spans: int) -> None:
    form = hopper.form_for(spans)
    assert spans * HEADS * form.parts <= PROCESSORS * form.ctas
    a_quarter = form.ctas * form.warps // 4
    registers = REGISTERS // (32 * a_quarter) // THREAD_STEP * THREAD_STEP
    assert registers >= 16 * form.columns + 32, "a thread holds 16 rows of its columns, and its rows of k"


def test_the_source_names_its_constants() -> None:
    text = hopper.source(hopper.Form(4, 8, 2, True))
    assert (
        text.startswith("#define COLUMNS 4\n#define WARPS 8\n#define CTAS 2\n#define RELOAD 1\n")
        and "griddepcontrol.wait" in text
    )


def test_a_cpu_has_the_reference() -> None:
    assert verify_arithmetic(torch.device("cpu")).startswith("reference-")


@pytest.mark.skipif(nvrtc._nvrtc() is None, reason="needs NVRTC")
@pytest.mark.parametrize("form", hopper.FORMS, ids=str)
def test_it_compiles(form: hopper.Form) -> None:
    assert b"verify" in nvrtc.compile_source(hopper.source(form))
