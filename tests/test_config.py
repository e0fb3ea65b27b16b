"""Engine options: values of a wrong type."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import EngineOptions
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", None),
        ("target", ""),
        ("drafter", ""),
        ("drafter", 5),
        ("device", None),
        ("dtype", 5),
        ("draft_policy", "sometimes"),
        ("draft_policy", None),
        ("cache_type_k", None),
        ("model_name", 5),
        ("speculation", "off"),
        ("speculation", None),
        ("max_concurrency", "6"),
        ("max_concurrency", 2.5),
        ("max_concurrency", True),
        ("max_concurrency", None),
        ("max_ctx", 100.5),
        ("threads", "1"),
        ("prefill_tokens", None),
        ("itl_budget_ms", "5"),
        ("itl_budget_ms", float("nan")),
        ("admission_coalesce_ms", "5"),
        ("admission_coalesce_ms", True),
        ("admission_coalesce_ms", float("nan")),
    ],
)
def test_a_value_of_the_wrong_type_names_the_option(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} (must|is empty)") as caught:
        EngineOptions(**{name: value})
    assert caught.value.param == name


def test_what_may_be_left_out_may_be_none() -> None:
    options = EngineOptions(drafter=None, max_ctx=None, threads=None, model_name=None, admission_coalesce_ms=5)
    assert (options.drafter, options.admission_coalesce_ms) == (None, 5)
