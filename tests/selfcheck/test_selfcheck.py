"""The property test of every op, and of the test itself: that it covers all ops and sees what it must see."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

import pytest
import torch

import paceline.ops
from paceline.ops.linear import PackedWeight
from paceline.selfcheck import Case, Outcome, all_cases, run_all, violation
from paceline.selfcheck.case import Outputs, Rng, randn
from paceline.selfcheck.rows import linear_case

CASES = all_cases()
THREADS = (1, 2, 3, 4)
NOT_ROWWISE = {
    "pack",
    "merge",
    "expanded",
    "chunk_facts",
    "pieces_of",
    "compile_ahead",
    "decode_arithmetic",
    "longest_rows",
    "output_bound",
    "row_norms",
    "value_bound",
    "verify_arithmetic",
    "attention_arithmetic",
    "allocate_pages",
    "bytes_per_token",
    "copy_pages",
    "dequantize_rows",
    "accept",
    "advance",
    "advance_counts",
    "input_tokens",
    "keep_features",
    "kept_features",
    "row_slots",
    "slots",
}
"""Functions of weights, sizes and spans, and of whole numbers only; and what copies rows. ``dequantize_rows`` decodes
through ``dequantize``; its own test compares bits."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_do_not_depend_on_their_batch(case: Case) -> None:
    assert violation(case, THREADS) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_without_the_blocked_layout(dtype: torch.dtype) -> None:
    rng = Rng(0)
    weight = PackedWeight(randn(rng, 96, 512).to(dtype), (96, 512), dtype, blocked=False)
    assert violation(linear_case(rng, weight, "decode"), THREADS) is None
    assert violation(linear_case(rng, weight, "prefill"), THREADS) is None


def test_every_op_has_a_case() -> None:
    exported = {
        name
        for package in pkgutil.iter_modules(paceline.ops.__path__)
        if package.ispkg
        for module in [importlib.import_module(f"paceline.ops.{package.name}")]
        for name in module.__all__
        if callable(getattr(module, name)) and not isinstance(getattr(module, name), type)
    }
    assert exported - {op for case in CASES for op in case.ops} == NOT_ROWWISE


def planted(name: str, fault: str) -> Case:
    """Eight rows that are copied, but for one fault."""
    rows = torch.arange(1.0, 9.0)

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        out = rows[chosen]
        if fault == "neighbours" and len(chosen) > 5:
            out = out + out.mean() * 1e-6
        if fault == "place":
            out[2:3] *= 1.0 + 1e-6
        if fault == "threads" and torch.get_num_threads() == 3:
            out = out + 1e-6
        if fault == "circumstances" and rng.integers(2):
            out = -out
        if fault == "nan":
            out = out * torch.nan
        return [(row,) for row in out]

    return Case(name, (), len(rows), compute)


@pytest.mark.parametrize("fault", ["neighbours", "place", "threads", "circumstances", "nan"])
def test_a_fault_is_found(fault: str) -> None:
    assert violation(planted("none", ""), THREADS) is None
    found = violation(planted("one", fault), THREADS)
    assert found is not None
    assert ("NaN" if fault == "nan" else "differs in 1 of 1 values") in found


def test_run_all_reports_each_case_and_restores_the_threads() -> None:
    before = torch.get_num_threads()
    seen: list[Outcome] = []
    failed = run_all(seen.append, (1, 3), [planted("good", ""), planted("bad", "threads"), planted("ugly", "nan")])
    assert [outcome.name for outcome in seen] == ["good", "bad", "ugly"]
    assert [outcome.name for outcome in failed] == ["bad", "ugly"]
    assert seen[0].violation is None and "under 3 thread(s)" in str(seen[1].violation)
    assert torch.get_num_threads() == before
