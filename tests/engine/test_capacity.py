"""The state's size from options, models and free memory."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.bench import synth_model
from paceline.config import DEMO_DRAFTER, DEMO_TARGET, DrafterConfig, EngineOptions, TargetConfig
from paceline.engine import build, capacity
from paceline.engine.capacity import check_weights, context_limit, plan_state, room_to_expand, state_bytes
from paceline.engine.scratch import round_scratch
from paceline.engine.window import effective_drafter
from paceline.errors import ConfigError
from paceline.models.qwen35 import Qwen35
from paceline.state.shapes import StateShape, kv_bytes_per_token, lane_bytes
from paceline.weights.load import open_drafter, open_target

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


@pytest.fixture(scope="module")
def target() -> TargetConfig:
    return open_target(DEMO_TARGET).config


@pytest.fixture(scope="module")
def drafter() -> DrafterConfig:
    return open_drafter(DEMO_DRAFTER).config


def with_memory(monkeypatch: pytest.MonkeyPatch, mebibytes: float) -> None:
    monkeypatch.setattr(capacity, "free_memory", lambda *device: int(mebibytes * 2**20))


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


# -- on a GPU --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> tuple[TargetConfig, DrafterConfig]:
    """The 27B shape, from a pair of its geometry without weights."""
    shape = synth_model.SHAPES["qwen3.8-27b"]
    target = TargetConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        layer_types=tuple("attention" if attention else "gdn" for attention in shape.attention_layers),
        num_heads=24,
        num_kv_heads=4,
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        rms_eps=1e-6,
        context_length=shape.context_length,
        conv_kernel=4,
        gdn_key_heads=16,
        gdn_value_heads=48,
        gdn_key_dim=128,
        gdn_value_dim=128,
        head_layout="tiled",
        tie_embeddings=False,
    )
    drafter = DrafterConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e7,
        rms_eps=1e-6,
        context_length=shape.context_length,
        block_size=8,
        target_layer_ids=shape.taps,
        mask_token_id=16383,
        sliding_window=2048,
        sliding=(True,) * 5,
        causal=(False,) * 5,
    )
    return target, drafter


Large = tuple[TargetConfig, DrafterConfig]


def with_gpu(monkeypatch: pytest.MonkeyPatch, gibibytes: float) -> None:
    with_memory(monkeypatch, 1024 * gibibytes)


def test_a_large_card_holds_the_whole_context(monkeypatch: pytest.MonkeyPatch, large: Large) -> None:
    with_gpu(monkeypatch, 120)
    shape = plan_state(EngineOptions(), *large, GPU)
    assert shape.max_ctx == 262_144 and shape.pool_tokens == 6 * 262_144
    # 16 layers of 4 heads of 256, K and V as q8_0: 34,816 bytes a token; per lane 144 MiB of state and what goes with it
    # (16 rows of features, say, are 1.6 MiB)
    assert kv_bytes_per_token(shape) == 34_816
    assert 150 * 2**20 < lane_bytes(shape) < 222 * 2**20
    assert shape.draft_cache_type == "f16"


@pytest.mark.parametrize("gibibytes", [10, 20, 40])
def test_what_is_planned_leaves_room_for_rounds(monkeypatch: pytest.MonkeyPatch, large: Large, gibibytes: int) -> None:
    with_gpu(monkeypatch, gibibytes)
    options = EngineOptions(max_concurrency=4)
    shape = plan_state(options, *large, GPU)
    assert 256 <= shape.max_ctx < 262_144
    taken = state_bytes(shape) + round_scratch(shape, options.prefill_tokens).total
    assert taken <= 0.95 * gibibytes * GIB
    more = replace(shape, max_ctx=shape.max_ctx + 16, pool_tokens=shape.pool_tokens + 4 * 16)
    assert state_bytes(more) + round_scratch(more, options.prefill_tokens).total > 0.95 * gibibytes * GIB, (
        "it is the largest"
    )


def test_a_smaller_context_is_logged_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, large: Large, caplog: pytest.LogCaptureFixture
) -> None:
    with_gpu(monkeypatch, 20)
    with caplog.at_level(logging.INFO, "paceline.engine"):
        shape = plan_state(EngineOptions(), *large, GPU)
    (line,) = [record.getMessage() for record in caplog.records]
    expected = (
        rf"context of {shape.max_ctx} tokens instead of 262144: 6 lanes and 1572864 tokens of K/V need \d+ MiB of state"
    )
    assert re.match(expected + r" and \d+ MiB for rounds, 19456 MiB are available$", line)


@pytest.mark.parametrize(
    "options", [{"max_ctx": 262_144}, {"kv_pool_tokens": 1_500_000}, {"max_concurrency": 100}, {"prefill_tokens": 60_000}]
)
def test_what_a_gpu_cannot_hold_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, large: Large, options: dict[str, Any]
) -> None:
    with_gpu(monkeypatch, 20)
    message = r"\d+ lanes and \d+ tokens of K/V need \d+ MiB of state and \d+ MiB for rounds, 19456 MiB are available; lower"
    with pytest.raises(ConfigError, match=message):
        plan_state(EngineOptions(**options), *large, GPU)


def test_scratch_grows_with_what_it_depends_on(large: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, 120)
    shape = plan_state(EngineOptions(), *large, GPU)
    scratch = round_scratch(shape, 512)
    assert scratch.logits > 4 * 48 * 248_320
    assert scratch.dequantised == 2 * 34_816 * 5120, "gate and up, one product"
    plain = round_scratch(replace(shape, drafter=None), 512)
    assert plain.logits < scratch.logits and plain.attention * 8 == scratch.attention
    assert round_scratch(shape, 1024).rows > 1.9 * scratch.rows
    assert round_scratch(replace(shape, lanes=12), 512).states == 2 * scratch.states
    assert round_scratch(replace(shape, max_ctx=1024), 512).attention < scratch.attention / 40
    assert round_scratch(shape, 512, graphs=False) == replace(scratch, captured=0)
    # of 48 layers, states of 48 heads of 128 x 128 and histories; prefill graphs share those of 6 prompts and of padding
    span = 4 * 48 * (48 * 128 * 128 + 3 * 10_240)
    assert scratch.states == 6 * span
    assert 7 * span + scratch.dequantised + 1024 * scratch.rows // (4 * 512 + 48) < scratch.captured < 2.1 * 2**30
    few, many = (round_scratch(replace(shape, lanes=lanes), 512).captured for lanes in (8, 16))
    assert few - scratch.captured == 2 * span and many == few, "graphs are for up to 8 prompts"


def test_what_is_expanded_leaves_room_for_graphs_and_rounds(monkeypatch: pytest.MonkeyPatch, large: Large) -> None:
    with_gpu(monkeypatch, 60)
    options = EngineOptions(max_ctx=8192)
    shape = plan_state(options, *large, GPU)
    assert room_to_expand(shape, options, GPU) == int(0.95 * 60 * GIB) - round_scratch(shape, options.prefill_tokens).total
    without = replace(options, cuda_graphs=False)
    assert room_to_expand(shape, without, GPU) - room_to_expand(shape, options, GPU) > 2**30
    with_gpu(monkeypatch, 1)
    assert room_to_expand(shape, options, GPU) < 0, "nothing is expanded"


def test_a_pool_reserves_the_resolved_block_and_window(monkeypatch: pytest.MonkeyPatch, large: Large) -> None:
    """What --draft-block-size and --draft-swa made of the drafter counts, not what its file says."""
    with_gpu(monkeypatch, 120)
    target, drafter = large
    mixed = replace(drafter, sliding=(True, True, True, True, False))
    pool = EngineOptions(kv_pool_tokens=4096, max_concurrency=1)
    of_file = plan_state(pool, target, mixed, GPU)
    resolved = plan_state(pool, target, effective_drafter(mixed, 256, 4), GPU)
    assert (of_file.draft_rows, resolved.draft_rows) == (8, 4)
    assert (of_file.max_ctx, resolved.max_ctx) == (4096 - 8, 4096 - 4), "the block behind the last token needs places"
    assert resolved.ring_pages < of_file.ring_pages and lane_bytes(resolved) < lane_bytes(of_file)
    assert resolved.reserve(4092) == resolved.pages < resolved.reserve(4093)


def test_hopeless_weights_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, 12)
    check_weights(12 * GIB, GPU)
    with pytest.raises(ConfigError, match="the weights need 14336 MiB, 12288 MiB are free on the GPU"):
        check_weights(14 * GIB, GPU)


def test_a_context_beyond_the_models_is_refused(target: TargetConfig) -> None:
    assert context_limit(EngineOptions(), target) == target.context_length
    with pytest.raises(ConfigError, match="max_ctx 8193 exceeds the model's context of 8192"):
        context_limit(EngineOptions(max_ctx=8193), target)


class _Loaded(Exception):
    pass


@pytest.mark.parametrize(("device", "order"), [("cpu", ["plan", "load"]), ("cuda", ["check", "load", "load", "plan"])])
def test_a_gpu_is_measured_after_loading(monkeypatch: pytest.MonkeyPatch, device: str, order: list[str]) -> None:
    """On a CPU the size is known before anything is read; on a GPU only the hopeless is refused before."""
    calls: list[str] = []

    def plan(options: Any, target: Any, drafter: Any, device: Any, weight_bytes: int = 0) -> StateShape:
        calls.append("plan")
        assert (weight_bytes > 0) == (device.type == "cpu")
        if device.type == "cuda":
            raise _Loaded
        return plan_state(options, target, drafter, device, weight_bytes)

    def load(model: Any, checkpoint: Any, device: Any, positions: int) -> None:
        calls.append("load")
        assert positions == 8192 + 8
        if device.type == "cpu":
            raise _Loaded

    monkeypatch.setattr(build, "plan_state", plan)
    monkeypatch.setattr(build, "_load", load)
    monkeypatch.setattr(build, "check_weights", lambda weight_bytes, device: calls.append("check"))
    monkeypatch.setattr(build, "resolve_dtype", lambda name, device: torch.bfloat16)
    pair = open_target(DEMO_TARGET), open_drafter(DEMO_DRAFTER)
    with pytest.raises(_Loaded):
        build._models(EngineOptions(), torch.device(device), *pair, pair[1].config)
    assert calls == order


def test_weights_on_a_gpu_are_at_least_what_is_stored() -> None:
    checkpoint = open_target(DEMO_TARGET)
    model = Qwen35(checkpoint.config, torch.bfloat16)
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    dense = sum(parameter.nbytes for parameter in model.parameters())
    assert build._bytes(model, checkpoint, GPU) == stored < dense == build._bytes(model, checkpoint, CPU)
