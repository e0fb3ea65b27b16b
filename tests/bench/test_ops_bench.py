"""The table of ops, on a CPU with the demo pair's sizes: every case runs, is right, and its figures make sense."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from paceline.bench import ops
from paceline.bench.ops import line, measure
from paceline.bench.ops_cases import OPS, SHAPES, Case, Work, difference, random_blocks
from paceline.bench.timing import Ceiling, ceiling, rotation, seconds
from paceline.errors import ConfigError
from paceline.ops.linear import Rows
from paceline.ops.quant import dequantize

CPU = torch.device("cpu")
BEST = Ceiling(1e12, 1e15, "table")


def test_every_case_of_the_demo_pair_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ops.json"
    assert ops.run("demo", "cpu", "", out) == 0, capsys.readouterr().out
    record = json.loads(out.read_text())
    names = [result["name"] for result in record["ops"]]
    assert len(set(names)) == len(names) > 40
    for result in record["ops"]:
        assert result["us"] > 0 and result["limit_us"] > 0 and result["copies"] == 1, result
        assert result["share"] == pytest.approx(result["limit_us"] / result["us"])
    assert record["ceiling"]["source"] == "measured" and record["versions"]["torch"]
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(names) + 2 and shown[-1].startswith(f"{len(names)} cases, 0 failed")


def test_only_chooses_by_name_or_group(tmp_path: Path) -> None:
    demo = SHAPES["demo"]
    assert {case.name.split()[0] for case in ops.cases(demo, CPU, "gdn verify")} == {"gdn"}
    assert len(list(ops.cases(demo, CPU, "linear"))) == 4 * 2 + 3
    assert all(case in [c.name for c in ops.cases(demo, CPU)] for case in (c.name for c in ops.cases(demo, CPU, "conv")))
    with pytest.raises(ConfigError, match="no op has 'nothing' in its name"):
        ops.run("demo", "cpu", "nothing", tmp_path / "ops.json")
    with pytest.raises(ConfigError, match="--shape must be one of qwen3.8-27b, demo, got '70b'"):
        ops.run("70b", "cpu", "", tmp_path / "ops.json")


def test_names_of_the_large_shape_are_distinct_and_nothing_is_allocated() -> None:
    names = [case.name for group in OPS.values() for case in group(SHAPES["qwen3.8-27b"], CPU)]
    assert len(set(names)) == len(names) > 150
    for part in (
        "linear decode gate_up IQ4_XS 34816x5120 M=64",
        "attention decode q8_0 L=6 W=8 context 131072",
        "argmax rows=48",
    ):
        assert part in names


def test_a_red_parity_gets_no_figure_and_a_failure_does_not_end_the_table() -> None:
    def work(error: float) -> Work:
        return Work(lambda copy: None, lambda: error, 1e-5, 1, 8)

    def broken() -> Work:
        raise RuntimeError("no kernel\nfor this device")

    good, wrong, lost, failed = (
        measure(Case("op", prepare), CPU, BEST)
        for prepare in (lambda: work(1e-6), lambda: work(1e-3), lambda: work(math.nan), broken)
    )
    assert good["us"] > 0 and "problem" not in good
    assert "us" not in wrong and wrong["problem"] == "off by 1.0e-03, at most 1e-05 is right"
    assert "us" not in lost and "nan" in lost["problem"]
    assert failed["problem"] == "RuntimeError: no kernel"
    assert "FAIL" in line(failed) and "FAIL" not in line(good)


def test_rates_are_given_beside_what_binds() -> None:
    reads = ops._rates(Work(print, float, 0.0, 1, 10**9, 10**9), 2e-3, BEST)
    assert (reads["bound"], reads["limit_us"], reads["share"]) == ("bytes", pytest.approx(1000), pytest.approx(0.5))
    computes = ops._rates(Work(print, float, 0.0, 1, 10**6, 10**12), 2e-3, BEST)
    assert (computes["bound"], computes["limit_us"]) == ("operations", pytest.approx(1000))
    assert "0.50 TB/s" in line({"name": "x", "error": 0.0, **reads})
    assert "500.00 TFLOP/s" in line({"name": "x", "error": 0.0, **computes})


def test_difference_sees_values_ids_and_nan() -> None:
    x = torch.randn(4, 8)
    assert difference(x, x.clone()) == 0.0
    rows = Rows(torch.zeros(256, 256, dtype=torch.float16), torch.full((256,), 4.0), 4, 8)
    rows.values[:4, :8] = 0.25 * x
    rows.values[4:] = torch.nan
    assert difference((x, rows), (x, x)) < 1e-3
    assert difference((x, x * 1.01), [x, x]) == pytest.approx(0.01, rel=1e-4)
    assert difference(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert math.isnan(difference(torch.tensor([math.nan, 1.0]), torch.ones(2)))
    assert math.isnan(difference((torch.tensor([math.nan]), torch.ones(1)), (torch.ones(1), torch.ones(1))))
    with pytest.raises(ValueError, match="zip"):
        difference([x, x], [x])


@pytest.mark.parametrize("form", ["Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_random_blocks_are_numbers(form: str) -> None:
    values = dequantize(random_blocks(form, 32, 512, CPU))
    assert values.isfinite().all() and values.std() > 0


def test_timing_on_a_cpu() -> None:
    seen: list[int] = []
    assert seconds(seen.append, 3, CPU) > 0
    assert seen == [0, 1, 2, 0, 1, 2]
    assert rotation(1, CPU) == 1
    assert ceiling(CPU).bytes_per_second > 1e8
