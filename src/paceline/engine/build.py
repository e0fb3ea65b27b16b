"""From options to a runner and a scheduler: open, check, load, size, assemble."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.config import DEMO_DRAFTER, DEMO_TARGET, DrafterConfig, EngineOptions, TargetConfig
from paceline.engine.arithmetic import configure, describe, fingerprint, resolve_device, resolve_dtype
from paceline.engine.capacity import plan_state
from paceline.engine.drafting import DFlashDrafter, Drafter
from paceline.engine.memory import keep_freed_memory
from paceline.engine.runner import Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.window import effective_drafter, window_line
from paceline.models.dflash import DFlash
from paceline.models.qwen35 import Qwen35, key_head_of
from paceline.state.pool import StatePool
from paceline.state.shapes import StateShape, kv_bytes_per_token, lane_bytes
from paceline.types import EngineInfo
from paceline.weights.load import Checkpoint, check_pair, fill, open_drafter, open_target

log = logging.getLogger("paceline.engine")


@dataclass(frozen=True, slots=True)
class EngineParts:
    runner: Runner
    scheduler: Scheduler
    info: EngineInfo


def resolve_paths(options: EngineOptions) -> tuple[Path, Path | None]:
    """Target and drafter files. The word ``demo`` names the built-in pair; the demo drafter goes with the demo target only,
    so that naming another target alone means no drafter."""
    target = DEMO_TARGET if options.target == "demo" else Path(options.target)
    if options.drafter is None or not options.speculation:
        return target, None
    if options.drafter == "demo":
        return target, DEMO_DRAFTER if options.target == "demo" else None
    return target, Path(options.drafter)


def build(options: EngineOptions, drafter: Drafter | None = None) -> EngineParts:
    """Load the pair and assemble an engine. ``drafter`` replaces the drafter of the options (it stages no context)."""
    started = time.perf_counter()
    keep_freed_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    configure(device)
    dtype = resolve_dtype(options.dtype, device)
    target_path, drafter_path = resolve_paths(options)
    target_file = open_target(target_path)
    drafter_file = open_drafter(drafter_path) if drafter_path and drafter is None else None
    drafter_config = _check_drafter(options, target_file, drafter_file)

    target = Qwen35(target_file.config, dtype)
    model = DFlash(drafter_config, dtype) if drafter_config else None
    weight_bytes = _bytes(target, target_file, device) + _bytes(model, drafter_file, device)
    shape = plan_state(options, target_file.config, drafter_config, device, weight_bytes)
    fill(target, target_file, device)
    target.finish(shape.max_ctx + shape.draft_rows)
    if model is not None and drafter_file is not None:
        fill(model, drafter_file, device)
        model.finish(shape.max_ctx + shape.draft_rows)
        drafter = DFlashDrafter(model, target)
    pool = StatePool(shape, key_head_of(target_file.config), device)
    block_size = drafter.block_size if drafter else 1
    scheduler = Scheduler(
        pool, max_ctx=shape.max_ctx, block_size=block_size, prefill_tokens=options.prefill_tokens, clock=time.monotonic
    )
    arithmetic = describe(options)
    info = EngineInfo(
        model_name=options.model_name or target_path.stem,
        target_path=str(target_path),
        drafter_path=str(drafter_path) if drafter_path else None,
        fingerprint=fingerprint(arithmetic),
        arithmetic=arithmetic,
        max_ctx=shape.max_ctx,
        max_concurrency=shape.lanes,
        kv_pool_tokens=shape.pool_tokens,
        vocab_size=target_file.config.vocab_size,
        eos_ids=tuple(sorted(target_file.tokenizer().eos_ids)),
        block_size=block_size if drafter else None,
        speculation=drafter is not None,
    )
    _log_start(info, shape, time.perf_counter() - started)
    return EngineParts(Runner(target, drafter, pool), scheduler, info)


def _bytes(module: nn.Module | None, checkpoint: Checkpoint[Any] | None, device: torch.device) -> int:
    """Bytes that a model's weights will take: as they are stored on a GPU, dense on a CPU."""
    if module is None or checkpoint is None:
        return 0
    if device.type == "cuda":
        return sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    return sum(parameter.nbytes for parameter in module.parameters())


def _log_start(info: EngineInfo, shape: StateShape, seconds: float) -> None:
    log.info("arithmetic %s: %s", info.fingerprint, info.arithmetic)
    log.info(
        "%d lanes x %d tokens of context; K/V pool %d tokens, %.1f MiB; %.1f MiB of state per lane",
        shape.lanes,
        shape.max_ctx,
        shape.pool_tokens,
        shape.pool_tokens * kv_bytes_per_token(shape) / 2**20,
        lane_bytes(shape) / 2**20,
    )
    log.info("loaded %s in %.1f s", info.model_name, seconds)


def _check_drafter(
    options: EngineOptions, target: Checkpoint[TargetConfig], drafter: Checkpoint[DrafterConfig] | None
) -> DrafterConfig | None:
    """Everything about the pair that can be wrong, before a weight is read; logs the drafter's effective geometry."""
    if drafter is None:
        log.info("speculation off")
        return None
    check_pair(target, drafter)
    config = effective_drafter(drafter.config, options.draft_swa, options.draft_block_size)
    log.info("%s", window_line(config))
    log.info("fixed %s width=%d", config.kind, config.block_size)
    return config
