"""The demo pair with a state pool of the test's choosing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from paceline.config import DEMO_DRAFTER, DEMO_TARGET, PAGE_SIZE, CacheType, DrafterConfig
from paceline.engine.drafting import DFlashDrafter
from paceline.engine.runner import Runner
from paceline.models.dflash import DFlash
from paceline.models.qwen35 import Qwen35, key_head_of
from paceline.state.pool import StatePool
from paceline.state.shapes import StateShape
from paceline.types import Request
from paceline.weights.load import fill, open_drafter, open_target

MAX_CTX = 2048
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Pair:
    target: Qwen35
    drafter: DFlashDrafter
    pool: StatePool

    @property
    def runner(self) -> Runner:
        return Runner(self.target, self.drafter, self.pool)


def pair(
    *,
    lanes: int,
    dtype: torch.dtype = torch.float32,
    cache_type: CacheType = "f32",
    window: int | None = None,
    sliding: tuple[bool, ...] | None = None,
    pool_tokens: int | None = None,
    device: torch.device = CPU,
) -> Pair:
    """``window`` and ``sliding`` replace the drafter's own; a lane has room for ``pool_tokens / lanes`` tokens."""
    target = load_target(dtype, device)
    model = load_drafter(dtype, window, sliding, device)
    shape = StateShape(
        target=target.config,
        drafter=model.config,
        lanes=lanes,
        max_ctx=MAX_CTX,
        pool_tokens=pool_tokens or lanes * (MAX_CTX + model.config.block_size),
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        draft_cache_type="f16" if device.type == "cuda" else "f32",
    )
    pool = StatePool(shape, key_head_of(target.config), device)
    return Pair(target, DFlashDrafter(model, target), pool)


@cache
def load_target(dtype: torch.dtype, device: torch.device = CPU) -> Qwen35:
    checkpoint = open_target(DEMO_TARGET)
    model = Qwen35(checkpoint.config, dtype)
    fill(model, checkpoint, device)
    model.finish(MAX_CTX + PAGE_SIZE)
    return model


@cache
def load_drafter(
    dtype: torch.dtype, window: int | None, sliding: tuple[bool, ...] | None, device: torch.device = CPU
) -> DFlash:
    checkpoint = open_drafter(DEMO_DRAFTER)
    config: DrafterConfig = checkpoint.config
    config = replace(config, sliding_window=window or config.sliding_window, sliding=sliding or config.sliding)
    model = DFlash(config, dtype)
    fill(model, checkpoint, device)
    model.finish(MAX_CTX + PAGE_SIZE)
    return model


@cache
def goldens() -> list[dict[str, Any]]:
    """40 prompts with the greedy tokens of a reference in float32, the margin of each step, and the drafter's picks."""
    path = Path(__file__).parent.parent / "data" / "greedy.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def greedy_request(prompt: list[int], max_tokens: int) -> Request:
    return Request("test", tuple(prompt), 0.0, 1.0, 0, 0.0, 0, max_tokens)
