"""How much context fits: the pool's shape from the options, the models and the memory that is free.

On a CPU this is decided before the weights are loaded, from what they will take. On a GPU the weights come first, so that
what is free is a measurement; beside it only what a round takes is an estimate.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from dataclasses import replace

import torch

from paceline.config import PAGE_SIZE, CacheType, DrafterConfig, EngineOptions, TargetConfig
from paceline.engine.scratch import round_scratch
from paceline.errors import ConfigError
from paceline.state.shapes import StateShape, kv_bytes_per_token, lane_bytes, spare_bytes

log = logging.getLogger("paceline.engine")

_SHARE = {"cpu": 0.5, "cuda": 0.95}
"""Share of the free memory that is used: on a CPU everybody else's programs live there too, on a GPU captured launches and
the allocator's gaps take some."""
_MIN_CTX = 256


def context_limit(options: EngineOptions, target: TargetConfig) -> int:
    """Tokens of the longest sequence that is wanted. ``ConfigError`` when the model was not made for so many."""
    wanted = options.max_ctx or target.context_length
    if wanted > target.context_length:
        raise ConfigError(f"max_ctx {wanted} exceeds the model's context of {target.context_length}", param="max_ctx")
    return wanted


def check_weights(weight_bytes: int, device: torch.device) -> None:
    """Refuse weights that a GPU has no room for, before they are read: ``ConfigError`` with both numbers."""
    free = free_memory(device)
    if weight_bytes > free:
        raise ConfigError(f"the weights need {weight_bytes / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free on the GPU")


def plan_state(
    options: EngineOptions,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    device: torch.device,
    weight_bytes: int = 0,
) -> StateShape:
    """The largest context up to the model's that ``max_concurrency`` lanes can have at once, or what the options say.

    ``drafter`` is the effective one, whose block and window the options may have changed. ``weight_bytes`` is what weights
    that are not loaded yet will take. Raises ``ConfigError`` with both numbers when an explicit choice does not fit; where
    the choice is ours, a smaller context is logged with both.
    """
    budget = max(0, int(_SHARE[device.type] * free_memory(device)) - weight_bytes)
    wanted = context_limit(options, target)

    def shape_of(max_ctx: int) -> StateShape:
        return state_shape(options, target, drafter, max_ctx, device)

    def need(shape: StateShape) -> int:
        return state_bytes(shape) + scratch_bytes(shape, options, device)

    shape = shape_of(wanted)
    if need(shape) <= budget:
        return shape
    explained = _explained(shape, state_bytes(shape), scratch_bytes(shape, options, device), budget)
    if options.max_ctx is None and options.kv_pool_tokens is None:
        contexts = range(_MIN_CTX, wanted, PAGE_SIZE)
        fitting = bisect_right(contexts, budget, key=lambda max_ctx: need(shape_of(max_ctx)))
        if fitting:
            log.info("context of %d tokens instead of %d: %s", contexts[fitting - 1], wanted, explained)
            return shape_of(contexts[fitting - 1])
    raise ConfigError(f"{explained}; lower max_concurrency, max_ctx or kv_pool_tokens", param="max_ctx")


def state_bytes(shape: StateShape) -> int:
    """Bytes of the state of all lanes: one page and one lane more than there are, which padding is of."""
    pages = (shape.pages + 1) * PAGE_SIZE * kv_bytes_per_token(shape)
    return shape.lanes * lane_bytes(shape) + spare_bytes(shape) + pages


def state_line(shape: StateShape) -> str:
    """The state as users are shown it."""
    return (
        f"{shape.lanes} lanes x {shape.max_ctx} tokens of context: {state_bytes(shape) / 2**20:.1f} MiB of state, "
        f"of it K/V for {shape.pool_tokens} tokens in {shape.pages} pages, "
        f"{shape.pages * PAGE_SIZE * kv_bytes_per_token(shape) / 2**20:.1f} MiB, "
        f"and {lane_bytes(shape) / 2**20:.1f} MiB per lane"
    )


def scratch_bytes(shape: StateShape, options: EngineOptions, device: torch.device) -> int:
    """Bytes kept free for rounds: none on a CPU, where half of the memory stays free."""
    if device.type != "cuda":
        return 0
    return round_scratch(shape, options.prefill_tokens, graphs=options.cuda_graphs).total


def room_to_expand(shape: StateShape, options: EngineOptions, device: torch.device) -> int:
    """Bytes that a GPU has left for more than weights, state, rounds and the graphs that are still to be captured."""
    return int(_SHARE[device.type] * free_memory(device)) - scratch_bytes(shape, options, device)


def _explained(shape: StateShape, state: int, scratch: int, budget: int) -> str:
    rounds = f" and {scratch / 2**20:.0f} MiB for rounds" if scratch else ""
    return (
        f"{shape.lanes} lanes and {shape.pool_tokens} tokens of K/V need {state / 2**20:.0f} MiB of state{rounds}, "
        f"{budget / 2**20:.0f} MiB are available"
    )


def state_shape(
    options: EngineOptions,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    max_ctx: int,
    device: torch.device,
) -> StateShape:
    """The state for sequences of ``max_ctx`` tokens, or of fewer where ``kv_pool_tokens`` holds no longer ones."""
    draft_type: CacheType = "f16" if device.type == "cuda" else "f32"
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
    log.warning(
        "kv_pool_tokens %d holds at most %d tokens of one sequence: that is the context, not %d",
        options.kv_pool_tokens,
        shape.longest,
        max_ctx,
    )
    return replace(shape, max_ctx=shape.longest)


def free_memory(device: torch.device) -> int:
    """Bytes of the device's memory that are free or reclaimable."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # gives back what loading needed and no longer holds
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
