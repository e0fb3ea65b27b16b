"""Every op beside its ceiling: ``paceline bench ops``. Parity first: what differs from its reference gets no figure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from paceline.bench.artefact import machine, write
from paceline.bench.ops_cases import OPS, SHAPES, Case, Geometry, Work
from paceline.bench.timing import Ceiling, ceiling, seconds
from paceline.engine.arithmetic import configure, resolve_device
from paceline.errors import ConfigError
from paceline.ops import dispatch
from paceline.ops.attention import attention_arithmetic
from paceline.ops.gdn import verify_arithmetic
from paceline.ops.linear import decode_arithmetic


def cases(shape: Geometry, device: torch.device, only: str = "") -> Iterable[Case]:
    """The cases whose name holds ``only``, or all cases of the group of that name."""
    for group, make in OPS.items():
        for case in make(shape, device):
            if only == group or only in case.name:
                yield case


def measure(case: Case, device: torch.device, limit: Ceiling) -> dict[str, Any]:
    """One row of the table. ``problem`` is set where the op failed or differs from its reference."""
    result: dict[str, Any] = {"name": case.name}
    try:
        torch.manual_seed(0)
        work = case.prepare()
        error = work.error()
        result |= {"error": error, "error_limit": work.limit}
        if not error <= work.limit:
            return result | {"problem": f"off by {error:.1e}, at most {work.limit:.0e} is right"}
        return result | _rates(work, seconds(work.run, work.copies, device), limit)
    except Exception as error:  # one op that cannot run must not hide the others
        return result | {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}


def _rates(work: Work, taken: float, limit: Ceiling) -> dict[str, Any]:
    reading, computing = work.bytes / limit.bytes_per_second, work.operations / limit.operations_per_second
    return {
        "us": 1e6 * taken,
        "copies": work.copies,
        "bytes": work.bytes,
        "operations": work.operations,
        "tb_per_s": work.bytes / taken / 1e12,
        "tflop_per_s": work.operations / taken / 1e12,
        "bound": "bytes" if reading >= computing else "operations",
        "limit_us": 1e6 * max(reading, computing),
        "share": max(reading, computing) / taken,
    }


def line(result: Mapping[str, Any]) -> str:
    """A row as text: what binds it at the ceiling is what its rate is given in."""
    head = f"{result['name']:<62}"
    if "problem" in result:
        return f"{head}  FAIL  {result['problem']}"
    rate, unit = (result["tb_per_s"], "TB/s") if result["bound"] == "bytes" else (result["tflop_per_s"], "TFLOP/s")
    return (
        f"{head}{result['us']:>10.1f} us{rate:>9.2f} {unit:<8}{result['limit_us']:>9.1f} us at best"
        f"{100 * result['share']:>6.0f} %   off by {result['error']:.0e}"
    )


@torch.inference_mode()
def run(
    shape: str, device_name: str, only: str, out: Path, portable: bool = False, say: Callable[[str], None] = print
) -> int:
    """Measure and record. ``portable`` leaves out kernels that are for one generation of GPUs. 1 if an op failed or differs
    from its reference."""
    if shape not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}", param="shape")
    device = resolve_device(device_name)
    configure(device)
    started = time.perf_counter()
    limit = ceiling(device)
    record: dict[str, Any] = {
        "benchmark": "ops",
        **machine(),
        "shape": shape,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ceiling": {
            "tb_per_s": limit.bytes_per_second / 1e12,
            "tflop_per_s": limit.operations_per_second / 1e12,
            "source": limit.source,
        },
        "ops": [],
    }
    say("at best {tb_per_s:.3g} TB/s and {tflop_per_s:.3g} TFLOP/s ({source})".format(**record["ceiling"]))
    with dispatch.force("portable") if portable else nullcontext():
        record["decode_product"] = decode_arithmetic(device)
        record["delta_rule"] = verify_arithmetic(device)
        record["attention"] = attention_arithmetic(device)
        for case in cases(SHAPES[shape], device, only):
            begun = time.perf_counter()
            record["ops"].append(measure(case, device, limit))
            record["ops"][-1]["seconds"] = time.perf_counter() - begun
            record["seconds"] = time.perf_counter() - started
            write(out, record)
            say(line(record["ops"][-1]))
    if not record["ops"]:
        raise ConfigError(f"--only: no op has {only!r} in its name", param="only")
    failed = sum("problem" in result for result in record["ops"])
    say(f"{len(record['ops'])} cases, {failed} failed, {record['seconds']:.0f} s: {out}")
    return 1 if failed else 0
