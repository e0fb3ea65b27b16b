"""Paceline: an LLM inference engine with batched DFlash2 speculative decoding.

>>> from paceline import LLM, SamplingParams
>>> with LLM() as llm:
...     print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=16))[0].text)
"""

from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.types import SamplingParams, Structure

if TYPE_CHECKING:
    from paceline.engine.llm import LLM, Delta, Result

__all__ = ["LLM", "Delta", "PacelineError", "Result", "SamplingParams", "Structure"]


def __getattr__(name: str) -> Any:
    """What needs torch is imported on first use: importing it takes seconds, a command-line error should not."""
    if name in ("LLM", "Delta", "Result"):
        from paceline.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
