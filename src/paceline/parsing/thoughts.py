"""What the engine must know of an answer's thought: where it is, how it ends, what has to follow."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import InvalidRequest
from paceline.parsing.reply import END_THINK, THINK
from paceline.types import Forcing, Structure

Encode = Callable[[str], list[int]]


def ends_with(prompt: str, tag: str) -> bool:
    """Whether nothing but white space is behind the tag at the prompt's end."""
    return prompt.rstrip().endswith(tag)


def forcing_of(
    prompt: str,
    template: str,
    encode: Encode,
    *,
    opening: str = "",
    structure: Structure | None = None,
    budget: int | None = None,
) -> Forcing | None:
    """What is forced in the answer to a prompt made with this chat template: ``opening`` at its beginning, the end of a
    thought over its ``budget``. None where nothing is, and no ``structure`` has to know where the thought ends.

    Behind a thought there is an empty line, as chat templates write it. An answer of a given structure may be behind a
    thought that the model begins only where its template knows thoughts and the prompt has not ended one.
    ``InvalidRequest`` names the field that a vocabulary without a token for the thought's end cannot serve.
    """
    if not opening and structure is None and budget is None:
        return None
    thinking, begin, end = ends_with(prompt, THINK), encode(THINK), encode(END_THINK)
    if len(end) != 1 and (thinking or budget is not None):
        param = "thinking_budget" if budget is not None else structure.param if structure else "tool_choice"
        raise InvalidRequest(
            f"{param} is not supported: {END_THINK} is not a token of the model", param=param, code="unsupported_parameter"
        )
    may_begin = structure is None or (THINK in template and not ends_with(prompt, END_THINK))
    opening = "\n\n" + opening if thinking and (opening or structure) else opening
    return Forcing(
        opening=tuple(encode(opening)) if opening else (),
        thinking=thinking,
        begin=begin[0] if len(begin) == len(end) == 1 and may_begin else None,
        closing=tuple(encode("\n" + END_THINK)) if len(end) == 1 else (),
        budget=budget,
    )
