"""Overrides of a drafter's geometry: the sliding window and the block."""

from __future__ import annotations

from dataclasses import replace

from paceline.config import DrafterConfig
from paceline.errors import ConfigError
from paceline.weights.geometry import infer_sliding


def effective_drafter(config: DrafterConfig, draft_swa: int | None, draft_block_size: int | None) -> DrafterConfig:
    """``draft_swa`` replaces the window and keeps the per-layer pattern of the file, be it mixed or all full; a pattern is
    inferred only where the file has none. ``draft_block_size`` shortens the block. Applying it twice equals once.
    """
    if draft_block_size is not None:
        if draft_block_size > config.block_size:
            raise ConfigError(
                f"draft_block_size {draft_block_size} exceeds the drafter's trained block of {config.block_size}",
                param="draft_block_size",
            )
        config = replace(config, block_size=draft_block_size)
    if draft_swa is not None:
        sliding = config.sliding if config.pattern_source == "metadata" else infer_sliding(config.num_layers)
        config = replace(config, sliding=sliding, sliding_window=draft_swa if any(sliding) else None)
    return config


def window_line(config: DrafterConfig) -> str:
    """The start-up line users look for, such as ``SWA layers: 3/3 (window=2048)``."""
    sliding = f"SWA layers: {sum(config.sliding)}/{config.num_layers}"
    suffix = "" if config.pattern_source == "metadata" else ", pattern inferred"
    return f"{sliding} (window={config.sliding_window}{suffix})" if any(config.sliding) else f"{sliding} (full attention)"
