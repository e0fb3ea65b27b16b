"""Where a round's time goes: all of it but the profiler, which needs a GPU."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from paceline import ops
from paceline.bench import rounds
from paceline.bench.artefact import prompts
from paceline.bench.rounds import (
    DeviceEvent,
    Probe,
    Watch,
    added,
    busy,
    by_family,
    by_kernel,
    drive,
    family_of,
    must_read,
    summary,
    table,
)
from paceline.config import DEMO_DRAFTER, DEMO_TARGET, EngineOptions
from paceline.engine.engine import Engine
from paceline.errors import ConfigError, EngineDead
from paceline.weights.load import open_drafter, open_target

EVENTS = [
    DeviceEvent("_partial_sums", 0, 100),
    DeviceEvent("_partial_sums", 150, 250),
    DeviceEvent("_verify", 200, 260),
    DeviceEvent("Memcpy DtoH (Device -> Pinned)", 300, 301),
]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("_partial_sums", "products"),
        ("product", "products"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop>", "products"),
        ("_attend", "attention"),
        ("_prepare_rows", "products"),
        ("_prepare", "attention"),
        ("_verify", "gated delta rule"),
        ("_norm", "norms, gates"),
        ("_select", "top-k"),
        ("_walk", "drafter's own"),
        ("_draw_blocks", "sampling"),
        ("Memset (Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", "torch"),
        ("something_new", "other"),
    ],
)
def test_families(name: str, family: str) -> None:
    assert family_of(name) == family


def launched_kernels() -> set[str]:
    """Names of all kernels that ops launch."""
    names = set()
    for path in Path(ops.__file__).parent.glob("*/kernel.py"):
        source = path.read_text(encoding="utf-8")
        names |= set(re.findall(r"^ +(_\w+)\[.+\]\(", source, re.MULTILINE))
        names |= {name for pair in re.findall(r"kernel = (_\w+) if .+ else (_\w+)$", source, re.MULTILINE) for name in pair}
    for path in Path(ops.__file__).parent.glob("*/*.cu"):
        names |= set(re.findall(r"__global__[^;{]*?\b(\w+)\s*\(\s*const", path.read_text(encoding="utf-8")))
    return names


def test_every_kernel_of_ours_has_a_family() -> None:
    names = launched_kernels()
    assert {"_partial_sums", "_attend", "_verify", "_inputs", "_add_norm", "_rows_of_heads", "product"} <= names
    assert {name for name in names if family_of(name) == "other"} == set()


def test_device_time_counts_overlaps_once() -> None:
    assert busy(EVENTS) == 100 + 110 + 1
    assert busy([DeviceEvent("a", 0, 10), DeviceEvent("b", 2, 3)]) == 10
    assert busy([]) == 0


def test_an_event_adds_what_is_left_when_nothing_before_it_runs() -> None:
    waits = DeviceEvent("waits", 40, 130)  # begins early and ends behind the one before it
    waits_too = DeviceEvent("waits too", 90, 150)
    first = DeviceEvent("first", 0, 100)
    apart = DeviceEvent("apart", 300, 340)
    beside, short = DeviceEvent("beside", 400, 500), DeviceEvent("short", 420, 430)  # on two streams
    bridge = DeviceEvent("bridge", 320, 600)
    shares = [(first, 100), (waits, 30), (waits_too, 20), (apart, 40), (short, 10), (beside, 90), (bridge, 160)]
    assert list(added([bridge, beside, short, apart, waits_too, waits, first])) == shares


def test_at_any_time_the_first_to_end_has_it() -> None:
    dice = random.Random(5)
    for _ in range(50):
        starts = [dice.randrange(60) for _ in range(12)]
        ends = dice.sample(range(61, 100), 6) + dice.sample(range(20, 60), 6)
        events = [DeviceEvent(str(i), min(s, e - 1), e) for i, (s, e) in enumerate(zip(starts, ends, strict=True))]
        at = [[event for event in events if event.start <= time < event.end] for time in range(100)]
        owners = [min(running, key=lambda event: event.end) for running in at if running]
        assert dict(added(events)) == {event: owners.count(event) for event in events}
        assert busy(events) == len(owners)


def test_families_and_kernels_are_per_round() -> None:
    rows = by_family(EVENTS, 2, {"products": 10**8, "attention": 5}, 4e12)
    assert [row["family"] for row in rows] == ["products", "gated delta rule", "copies"]
    products = rows[0]
    assert products["ms"] == pytest.approx(0.1) and products["launches"] == 1
    assert products["share"] == pytest.approx(200 / 211)
    assert rows[1]["ms"] == pytest.approx(0.005) and rows[1]["durations_ms"] == pytest.approx(0.03)
    assert 2e3 * sum(row["ms"] for row in rows) == pytest.approx(busy(EVENTS))
    assert products["tb_per_s"] == pytest.approx(1.0) and products["limit_ms"] == pytest.approx(0.025)
    assert "bytes" not in rows[1]
    kernels = by_kernel(EVENTS, 2)
    assert kernels[0] == {"name": "_partial_sums", "family": "products", "us": 100, "durations_us": 100, "launches": 1}
    assert kernels[1] == {"name": "_verify", "family": "gated delta rule", "us": 5, "durations_us": 30, "launches": 0.5}


def test_an_engine_is_watched_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_WARM_ROUNDS", 2)
    monkeypatch.setattr(rounds, "_PROFILED_ROUNDS", 2)
    calls: list[str] = []
    watch = Watch(2, 3, Probe(lambda: None, lambda: calls.append("start"), lambda: calls.append("stop")))
    options = EngineOptions(max_concurrency=2, max_ctx=160, dtype="float32", threads=1)
    engine = Engine(options, observe=watch)
    try:
        drive(engine, prompts(open_target(DEMO_TARGET).tokenizer(), 2, 20), watch)
    finally:
        engine.close()
    assert calls == ["start", "stop", "start", "stop"]
    assert watch.needed == 7 and watch.seconds > 0 and watch.profiled_seconds > 0
    assert 2 * 3 <= watch.tokens <= watch.rows <= 2 * 3 * 8
    figures = summary(watch, 3, 2, EVENTS, {"products": 4 * 10**6}, 4e12)
    assert figures["device_busy_ms"] == pytest.approx(0.211 / 2) and figures["limit_ms"] == pytest.approx(0.001)
    assert figures["host_gap_ms"] == pytest.approx(figures["round_ms"] - figures["device_busy_ms"])
    assert figures["acceptance_length"] == watch.tokens / 6 and 20 < figures["context"] < 160
    assert [row["stage"] for row in figures["stages"]] == ["draft", "verify", "commit"]
    assert all(row["ms"] > 0 for row in figures["stages"])
    assert sum(row["ms"] for row in figures["stages"]) < figures["round_ms"]
    shown = table(figures).splitlines()
    assert len(shown) == 4 + 3 and shown[4].startswith("products") and shown[4].endswith("0.001")
    assert re.fullmatch(r"draft \d+\.\d\d ms, verify \d+\.\d\d ms, commit \d+\.\d\d ms", shown[2])


def test_requests_that_end_too_early_are_an_error() -> None:
    watch = Watch(1, 10_000, Probe(lambda: None, lambda: None, lambda: None))
    engine = Engine(
        EngineOptions(max_concurrency=1, max_ctx=24, dtype="float32", threads=1, speculation=False), observe=watch
    )
    try:
        with pytest.raises(EngineDead, match=r"ended before 10016 rounds of all lanes: finish reason 'length'"):
            drive(engine, [list(range(100, 120))], watch)
    finally:
        engine.close()


def test_what_must_be_read() -> None:
    target, drafter = open_target(DEMO_TARGET), open_drafter(DEMO_DRAFTER)
    plain = must_read(target, None, EngineOptions(), 2, 100)
    both = must_read(target, drafter, EngineOptions(), 2, 100)
    head = target.tensors["embed_tokens.weight"].nbytes  # tied
    assert head < plain["products"] < DEMO_TARGET.stat().st_size
    assert head < both["products"] - plain["products"] < head + DEMO_DRAFTER.stat().st_size
    assert plain["gated delta rule"] == 3 * 2 * 6 * 6 * 128 * 128 * 4
    assert plain["attention"] == 200 * 2 * 2 * 2 * (256 + 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        rounds.run(EngineOptions(), 4, 16, tmp_path / "rounds.json")


def test_options_are_fields_and_values() -> None:
    assert rounds.options_of(["max_ctx=512", "cache_type_k=f16", "threads=null", "speculation=false"]) == {
        "max_ctx": 512,
        "cache_type_k": "f16",
        "threads": None,
        "speculation": False,
    }
    for wrong in ("max_ctx", "no_such=1"):
        with pytest.raises(ConfigError, match="FIELD=VALUE"):
            rounds.options_of([wrong])
    with pytest.raises(ConfigError, match="rounds must be at least 1, got 0"):
        rounds.run(EngineOptions(), 0, 16, Path("rounds.json"))
