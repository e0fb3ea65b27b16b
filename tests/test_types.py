"""Sampling parameters and requests: what is refused, and what a request is cut to."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.types import EngineInfo, Request, SamplingParams

INFO = EngineInfo(
    "m", "m.gguf", None, "pl-0", "", 64, 2, 128, vocab_size=100, eos_ids=(7,), block_size=None, speculation=False
)


@pytest.mark.parametrize(("top_k", "expected"), [(-1, -1), (0, 0), (40, 40), (100, 100), (101, 100), (2**63, 100)])
def test_top_k_is_cut_to_the_vocabulary(top_k: int, expected: int) -> None:
    assert Request.create([1, 2], SamplingParams(top_k=top_k), INFO).top_k == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", None),
        ("stop", 5),
        ("stop", b"ab"),
        ("stop", [5]),
        ("stop_token_ids", None),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", b"5"),
        ("ignore_eos", "no"),
        ("ignore_eos", None),
        ("ignore_eos", 1),
    ],
)
def test_values_of_another_type_are_refused_with_the_fields_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_a_stop_may_be_a_string_or_any_list_of_them() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=range(2)).stop_token_ids == (0, 1)  # type: ignore[arg-type]
