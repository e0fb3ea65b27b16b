"""Overrides of the drafter's window and block."""

from dataclasses import replace

import pytest

from paceline.config import DEMO_DRAFTER, DrafterConfig
from paceline.engine.window import effective_drafter, window_line
from paceline.errors import ConfigError
from paceline.weights.load import open_drafter


@pytest.fixture(scope="module")
def demo() -> DrafterConfig:
    return open_drafter(DEMO_DRAFTER).config


@pytest.mark.parametrize(
    ("sliding", "line"),
    [
        ((True, True, True), "SWA layers: 3/3 (window=64)"),
        ((True, False, True), "SWA layers: 2/3 (window=64)"),
        ((False, False, False), "SWA layers: 0/3 (full attention)"),
    ],
)
def test_the_window_changes_and_the_pattern_stays(demo: DrafterConfig, sliding: tuple[bool, ...], line: str) -> None:
    config = replace(demo, sliding=sliding, sliding_window=2048 if any(sliding) else None)
    once = effective_drafter(config, 64, None)
    assert once.sliding == sliding
    assert once.sliding_window == (64 if any(sliding) else None)
    assert window_line(once) == line
    assert effective_drafter(once, 64, None) == once


def test_a_pattern_is_inferred_only_where_the_file_has_none(demo: DrafterConfig) -> None:
    bare = replace(demo, sliding=(False,) * 3, sliding_window=None, pattern_source="inferred")
    once = effective_drafter(bare, 64, None)
    assert once.sliding == (True, True, False)
    assert window_line(once) == "SWA layers: 2/3 (window=64, pattern inferred)"
    assert effective_drafter(once, 64, None) == once
    assert effective_drafter(bare, None, None) == bare


def test_without_overrides_nothing_changes(demo: DrafterConfig) -> None:
    assert effective_drafter(demo, None, None) == demo
    assert window_line(demo) == "SWA layers: 3/3 (window=2048)"


def test_a_block_may_be_shorter_but_not_longer_than_trained(demo: DrafterConfig) -> None:
    assert effective_drafter(demo, None, 4).block_size == 4
    assert effective_drafter(demo, None, 8) == demo
    with pytest.raises(ConfigError, match="9 exceeds the drafter's trained block of 8"):
        effective_drafter(demo, None, 9)
