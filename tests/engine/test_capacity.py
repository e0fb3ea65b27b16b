"""The state's size from options, models and free memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.config import DEMO_DRAFTER, DEMO_TARGET, DrafterConfig, EngineOptions, TargetConfig
from paceline.engine import capacity
from paceline.engine.capacity import plan_state
from paceline.errors import ConfigError
from paceline.state.shapes import StateShape, kv_bytes_per_token, lane_bytes
from paceline.weights.load import open_drafter, open_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target() -> TargetConfig:
    return open_target(DEMO_TARGET).config


@pytest.fixture(scope="module")
def drafter() -> DrafterConfig:
    return open_drafter(DEMO_DRAFTER).config


def with_memory(monkeypatch: pytest.MonkeyPatch, mebibytes: float) -> None:
    monkeypatch.setattr(capacity, "_free_memory", lambda *device: int(mebibytes * 2**20))


def size(shape: StateShape) -> int:
    return shape.lanes * lane_bytes(shape) + shape.pool_tokens * kv_bytes_per_token(shape)


def test_the_models_context_if_there_is_room(
    monkeypatch: pytest.MonkeyPatch, target: TargetConfig, drafter: DrafterConfig
) -> None:
    with_memory(monkeypatch, 8192)
    shape = plan_state(EngineOptions(max_concurrency=3), target, drafter, CPU)
    assert shape.max_ctx == target.context_length
    assert shape.pool_tokens == 3 * target.context_length, "every lane can have all of it at once"


def test_less_context_if_not(monkeypatch: pytest.MonkeyPatch, target: TargetConfig, drafter: DrafterConfig) -> None:
    with_memory(monkeypatch, 8192)
    whole = size(plan_state(EngineOptions(), target, drafter, CPU))
    with_memory(monkeypatch, whole / 2**20)
    shape = plan_state(EngineOptions(), target, drafter, CPU)
    assert 256 <= shape.max_ctx < target.context_length
    assert size(shape) <= whole // 2, "half of what is free"


@pytest.mark.parametrize("options", [{}, {"max_ctx": 4096}, {"kv_pool_tokens": 40_000}])
def test_what_does_not_fit_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, target: TargetConfig, drafter: DrafterConfig, options: dict[str, Any]
) -> None:
    with_memory(monkeypatch, 16)
    with pytest.raises(ConfigError, match=r"6 lanes and \d+ tokens of K/V need \d+ MiB.* 8 MiB are available"):
        plan_state(EngineOptions(**options), target, drafter, CPU)


def test_weights_to_come_take_their_part(
    monkeypatch: pytest.MonkeyPatch, target: TargetConfig, drafter: DrafterConfig
) -> None:
    with_memory(monkeypatch, 400)
    assert plan_state(EngineOptions(max_ctx=1024), target, drafter, CPU).max_ctx == 1024
    with pytest.raises(ConfigError, match="0 MiB are available"):
        plan_state(EngineOptions(max_ctx=1024), target, drafter, CPU, weight_bytes=200 * 2**20)


@pytest.mark.parametrize("sliding", [True, False])
@pytest.mark.parametrize("pool", [100, 512, 1000])
def test_a_small_pool_limits_the_context(
    monkeypatch: pytest.MonkeyPatch, target: TargetConfig, drafter: DrafterConfig, pool: int, sliding: bool
) -> None:
    """Whatever the context admits must fit the pool, or a request would be refused when it is too late."""
    with_memory(monkeypatch, 8192)
    drafter = replace(drafter, sliding=(True, sliding, True))
    shape = plan_state(EngineOptions(kv_pool_tokens=pool), target, drafter, CPU)
    assert shape.reserve(shape.max_ctx) == shape.pages < shape.reserve(shape.max_ctx + 1)
    with pytest.raises(ConfigError, match=f"kv_pool_tokens {pool} holds at most {shape.max_ctx} tokens.*max_ctx is 2000"):
        plan_state(EngineOptions(kv_pool_tokens=pool, max_ctx=2000), target, drafter, CPU)
    fitting = EngineOptions(kv_pool_tokens=pool, max_ctx=shape.max_ctx)
    assert plan_state(fitting, target, drafter, CPU).max_ctx == shape.max_ctx


def test_a_pool_without_room_for_two_tokens_is_refused(
    monkeypatch: pytest.MonkeyPatch, target: TargetConfig, drafter: DrafterConfig
) -> None:
    with_memory(monkeypatch, 8192)
    drafter = replace(drafter, sliding=(False, False, False), block_size=16)
    with pytest.raises(ConfigError, match="kv_pool_tokens 16 holds at most 0 tokens"):
        plan_state(EngineOptions(kv_pool_tokens=16), target, drafter, CPU)
