"""From options to a runner and a scheduler: open, check, load, size, assemble."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.config import DEMO_DRAFTER, DEMO_TARGET, DrafterConfig, EngineOptions, TargetConfig
from paceline.engine.arithmetic import configure, describe, fingerprint, resolve_device, resolve_dtype
from paceline.engine.capacity import check_weights, context_limit, plan_state, room_to_expand, scratch_bytes, state_line
from paceline.engine.drafting import DFlashDrafter, Drafter
from paceline.engine.graphs import Graphs
from paceline.engine.memory import keep_freed_memory, stop_searching
from paceline.engine.pacing import Joining, Pacer
from paceline.engine.policy import make_policy
from paceline.engine.runner import Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.structures import Structures
from paceline.engine.synthetic import SyntheticAcceptance
from paceline.engine.warmup import warm_up
from paceline.engine.window import effective_drafter, window_line
from paceline.errors import ConfigError
from paceline.models.dflash import DFlash
from paceline.models.qwen35 import Qwen35, key_head_of
from paceline.state.pool import StatePool
from paceline.state.shapes import StateShape
from paceline.structure import Compiler
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
    target_path, drafter_path = resolve_paths(options)
    target_file = open_target(target_path)
    tokenizer = target_file.tokenizer()
    compiler = Compiler(tokenizer, target_file.config.vocab_size, tokenizer.eos_ids)
    compiler.prepare()  # while the weights are read
    drafter_file = open_drafter(drafter_path) if drafter_path and drafter is None else None
    drafter_config = _check_drafter(options, target_file, drafter_file)

    target, model, shape = _models(options, device, target_file, drafter_file, drafter_config)
    if model is not None:
        drafter = DFlashDrafter(model, target)
    block_size = drafter.block_size if drafter else 1
    pool = StatePool(shape, key_head_of(target_file.config), device, verify_rows=block_size)
    policy = make_policy(options.draft_policy)
    graphs = None
    if device.type == "cuda" and options.expand_weights:  # before graphs are captured, which use what there is then
        _expand(target, model, room_to_expand(shape, options, device))
    if device.type == "cuda" and options.cuda_graphs:
        graphs = _capture(target, drafter, pool)
        draft, verify = graphs.costs()
        policy.seed(draft, verify)
        _log_costs(draft, verify)
    beside = graphs is not None and options.prompts_beside and options.itl_budget_ms is None
    scheduler = Scheduler(
        pool,
        max_ctx=shape.max_ctx,
        block_size=block_size,
        draft_max=options.draft_max,
        pacer=Pacer(options.prefill_tokens, options.itl_budget_ms, beside=beside),
        clock=time.monotonic,
        policy=policy,
        joining=Joining() if beside else None,
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
        eos_ids=tuple(sorted(tokenizer.eos_ids)),
        block_size=block_size if drafter else None,
        speculation=drafter is not None,
    )
    _log_start(info, shape, scratch_bytes(shape, options, device), time.perf_counter() - started)
    runner = Runner(
        target,
        drafter,
        pool,
        graphs=graphs,
        structures=Structures(compiler),
        synthetic=_synthetic(options, drafter),
        run_ahead=options.run_ahead,
        prompts_beside=options.prompts_beside,
        nvtx=options.nvtx,
    )
    if device.type == "cuda":
        warm_up(runner)
    stop_searching()
    return EngineParts(runner, scheduler, info)


def _synthetic(options: EngineOptions, drafter: Drafter | None) -> SyntheticAcceptance | None:
    if options.spec_synth_len is None:
        return None
    if drafter is None:
        raise ConfigError("spec_synth_len needs a drafter and speculation", param="spec_synth_len")
    log.warning(
        "ACCEPTANCE IS MADE UP (spec_synth_len %g): the text of this engine means nothing; for benchmarks only",
        options.spec_synth_len,
    )
    return SyntheticAcceptance(options.spec_synth_len, drafter.block_size)


def _models(
    options: EngineOptions,
    device: torch.device,
    target_file: Checkpoint[TargetConfig],
    drafter_file: Checkpoint[DrafterConfig] | None,
    drafter_config: DrafterConfig | None,
) -> tuple[Qwen35, DFlash | None, StateShape]:
    """The models, loaded, and the state's size: on a CPU from what weights will take, on a GPU from what they left free."""
    dtype = resolve_dtype(options.dtype, device)
    target = Qwen35(target_file.config, dtype)
    drafter = DFlash(drafter_config, dtype) if drafter_config else None
    weight_bytes = _bytes(target, target_file, device) + _bytes(drafter, drafter_file, device)
    plan = functools.partial(plan_state, options, target_file.config, drafter_config, device)
    max_ctx, shape = context_limit(options, target_file.config), None
    if device.type == "cpu":
        shape = plan(weight_bytes)
        max_ctx = shape.max_ctx
    else:
        check_weights(weight_bytes, device)
    positions = max_ctx + (drafter_config.block_size if drafter_config else 0)
    _load(target, target_file, device, positions)
    if drafter is not None and drafter_file is not None:
        _load(drafter, drafter_file, device, positions)
    return target, drafter, shape or plan()


def _load(model: Qwen35 | DFlash, checkpoint: Checkpoint[Any], device: torch.device, positions: int) -> None:
    """Fill a model and make it ready for positions below ``positions``."""
    started, before = time.perf_counter(), _allocated(device)
    try:
        fill(model, checkpoint, device)
        model.finish(positions)
    except torch.OutOfMemoryError as error:
        room = torch.cuda.get_device_properties(device).total_memory
        raise ConfigError(
            f"{checkpoint.path}: the weights do not fit: {_allocated(device) / 2**20:.0f} MiB were loaded "
            f"when the GPU's {room / 2**20:.0f} MiB were used up"
        ) from error
    if device.type == "cuda":
        stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        log.info(
            "%s: %.2f GiB on the GPU, %.2f GiB in the file, loaded in %.1f s",
            checkpoint.path.name,
            (_allocated(device) - before) / 2**30,
            stored / 2**30,
            time.perf_counter() - started,
        )


def _capture(target: Qwen35, drafter: Drafter | None, pool: StatePool) -> Graphs:
    taken = _allocated(pool.device)
    try:
        return Graphs(target, drafter, pool)
    except torch.OutOfMemoryError as error:
        room = torch.cuda.get_device_properties(pool.device).total_memory
        raise ConfigError(
            f"the GPU's {room / 2**20:.0f} MiB were used up while forwards were captured as CUDA graphs, on top of "
            f"{taken / 2**20:.0f} MiB of weights and state; lower max_concurrency or max_ctx, or switch cuda_graphs off"
        ) from error


def _log_costs(draft: Mapping[int, float], verify: Mapping[tuple[int, int], float]) -> None:
    (few, least), (many, most) = (min(verify.items()), max(verify.items()))
    log.info("a verify forward takes %.2f ms for %d rows, %.2f ms for %d", 1e3 * least, few[1], 1e3 * most, many[1])
    if draft:
        lanes = max(draft)
        log.info("a draft forward takes %.2f ms for 1 lane, %.2f ms for %d", 1e3 * draft[1], 1e3 * draft[lanes], lanes)


def _expand(target: Qwen35, drafter: DFlash | None, room: int) -> None:
    """Use memory that is left for weights in the form in which prompts multiply them."""
    taken = target.expand(room)
    if drafter is not None:
        taken += drafter.expand(room - taken)
    log.info("%.1f GiB of weights are kept in 16 bits too, for reading prompts", taken / 2**30)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _bytes(module: nn.Module | None, checkpoint: Checkpoint[Any] | None, device: torch.device) -> int:
    """Bytes that a model's weights will take: dense on a CPU, at least what is stored on a GPU."""
    if module is None or checkpoint is None:
        return 0
    dense = {name: parameter.nbytes for name, parameter in module.named_parameters()}
    if device.type == "cpu":
        return sum(dense.values())
    return sum(min(dense.get(name, tensor.nbytes), tensor.nbytes) for name, tensor in checkpoint.tensors.items())


def _log_start(info: EngineInfo, shape: StateShape, scratch: int, seconds: float) -> None:
    log.info("arithmetic %s: %s", info.fingerprint, info.arithmetic)
    log.info("%s%s", state_line(shape), f"; {scratch / 2**20:.1f} MiB kept free for rounds" if scratch else "")
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
    if options.draft_max is not None and options.draft_max >= config.block_size:
        raise ConfigError(
            f"draft_max {options.draft_max} exceeds the {config.block_size - 1} drafts of the drafter's block of "
            f"{config.block_size}",
            param="draft_max",
        )
    log.info("%s", window_line(config))
    log.info("fixed %s width=%d", config.kind, config.block_size)
    return config
