"""Overrides of a drafter's geometry: the sliding window and the block."""

from __future__ import annotations

from dataclasses import replace

from paceline.config import DrafterConfig
from paceline.errors import ConfigError


def effective_drafter(config: DrafterConfig, draft_swa: int | None, draft_block_size: int | None) -> DrafterConfig:
    """``draft_swa`` replaces the window and keeps the per-layer pattern; ``draft_block_size`` shortens the block.

    A drafter whose layers are all full keeps them full. Applying it twice equals once.
    """
    if draft_block_size is not None:
        if draft_block_size > config.block_size:
            raise ConfigError(
                f"draft_block_size {draft_block_size} exceeds the drafter's trained block of {config.block_size}",
                param="draft_block_size",
            )
        config = replace(config, block_size=draft_block_size)
    if draft_swa is not None and any(config.sliding):
        config = replace(config, sliding_window=draft_swa)
    return config


def window_line(config: DrafterConfig) -> str:
    """The start-up line users look for, such as ``SWA layers: 3/3 (window=2048)``."""
    sliding = f"SWA layers: {sum(config.sliding)}/{config.num_layers}"
    suffix = "" if config.pattern_source == "metadata" else ", pattern inferred"
    return f"{sliding} (window={config.sliding_window}{suffix})" if any(config.sliding) else f"{sliding} (full attention)"
