"""Engine options: values of a wrong type. What is told of the environment."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import EngineOptions, environment_switches
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


def test_switches_of_the_environment_are_told_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PACELINE_API_KEY", "LLAMA_API_TOKEN", "HOME_OF_OMP_"):
        monkeypatch.setenv(name, "7")
    told = environment_switches()
    assert told["OMP_NUM_THREADS"] == told["CUDA_VISIBLE_DEVICES"] == "7"
    assert not {"PACELINE_API_KEY", "LLAMA_API_TOKEN", "HOME_OF_OMP_"} & set(told)
