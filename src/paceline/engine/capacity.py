"""How much context fits: the pool's shape from the options, the models and the memory that is free."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from paceline.config import PAGE_SIZE, CacheType, DrafterConfig, EngineOptions, TargetConfig
from paceline.errors import ConfigError
from paceline.state.shapes import StateShape, kv_bytes_per_token, lane_bytes

_SHARE = {"cpu": 0.5, "cuda": 0.85}
"""Share of the free memory that weights and state may take: on a CPU everybody else's programs live there too, on a GPU the
scratch of a round needs room."""
_MIN_CTX = 256


def plan_state(
    options: EngineOptions,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    device: torch.device,
    weight_bytes: int = 0,
) -> StateShape:
    """The largest context up to the model's that ``max_concurrency`` lanes can have at once, or what the options say.

    ``weight_bytes`` is what the weights, which are not loaded yet, will take. Raises ``ConfigError`` with both numbers when
    an explicit choice does not fit.
    """
    budget = max(0, int(_SHARE[device.type] * _free_memory(device)) - weight_bytes)
    wanted = options.max_ctx or target.context_length
    if wanted > target.context_length:
        raise ConfigError(f"max_ctx {wanted} exceeds the model's context of {target.context_length}", param="max_ctx")
    draft_type: CacheType = "f16" if device.type == "cuda" else "f32"
    shape = _shape(options, target, drafter, wanted, draft_type)
    fixed = options.max_concurrency * lane_bytes(shape)
    fits = max(0, budget - fixed) // kv_bytes_per_token(shape)
    if shape.pool_tokens <= fits:
        return shape
    if options.max_ctx is None and options.kv_pool_tokens is None:
        scaled = fits // options.max_concurrency // PAGE_SIZE * PAGE_SIZE
        if scaled >= _MIN_CTX:
            return _shape(options, target, drafter, scaled, draft_type)
    need = fixed + shape.pool_tokens * kv_bytes_per_token(shape)
    raise ConfigError(
        f"{options.max_concurrency} lanes and {shape.pool_tokens} tokens of K/V need {need / 2**20:.0f} MiB of state, "
        f"{budget / 2**20:.0f} MiB are available; lower max_concurrency, max_ctx or kv_pool_tokens",
        param="max_ctx",
    )


def _shape(
    options: EngineOptions,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    max_ctx: int,
    draft_type: CacheType,
) -> StateShape:
    shape = StateShape(
        target=target,
        drafter=drafter,
        lanes=options.max_concurrency,
        max_ctx=max_ctx,
        pool_tokens=options.kv_pool_tokens or 0,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        draft_cache_type=draft_type,
    )
    if options.kv_pool_tokens is None:
        return replace(shape, pool_tokens=options.max_concurrency * shape.reserve(max_ctx) * PAGE_SIZE)
    if max_ctx <= shape.longest:
        return shape
    if options.max_ctx is not None or shape.longest < 2:
        raise ConfigError(
            f"kv_pool_tokens {options.kv_pool_tokens} holds at most {shape.longest} tokens of one sequence, "
            f"max_ctx is {max_ctx}",
            param="kv_pool_tokens",
        )
    return replace(shape, max_ctx=shape.longest)


def _free_memory(device: torch.device) -> int:
    """Bytes of the device's memory that are free or reclaimable."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
