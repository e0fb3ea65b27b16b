"""The answer to a chat: how it is to be read, and what it has to begin with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from paceline.errors import InvalidRequest
from paceline.parsing import CallFormat, Event, ReplyParser, Tools, format_of, joined, opening_of
from paceline.parsing.reply import END_THINK, THINK
from paceline.server.protocol import ChatRequest
from paceline.text import TextDelta, TextStream
from paceline.types import Forcing

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """``thinking``: the prompt ends inside a thought. ``form`` is how the model writes tool calls, None if they are not to
    be read; ``forcing`` goes to the engine."""

    thinking: bool
    tools: Tools | None
    form: CallFormat | None
    forcing: Forcing | None

    @classmethod
    def of(cls, request: ChatRequest, prompt: str, template: str, encode: Encode) -> AnswerPlan:
        """``prompt`` is the rendered text, ``template`` the chat template's source. ``InvalidRequest`` names a field that
        the template or the vocabulary cannot serve."""
        _check_template(request, template)
        thinking = _ends_with(prompt, THINK)
        form = format_of(template)
        opening = opening_of(request.tools, form) if request.tools and form else ""
        forcing = _forcing(request, opening, prompt, template, encode)
        return cls(thinking, request.tools, form if request.tools else None, forcing)

    def parser(self) -> ReplyParser:
        return ReplyParser(thinking=self.thinking, tools=self.tools, form=self.form)


def _check_template(request: ChatRequest, template: str) -> None:
    tools, effort = request.tools, request.reasoning_effort
    if tools and request.sampling.structure:
        raise _unsupported(request.sampling.structure.param, "it goes with tools only where tool_choice is none")
    if tools and "tools" not in template:
        raise _unsupported("tools", "the model's chat template shows no tools")
    if tools and (tools.required or tools.named) and format_of(template) is None:
        raise _unsupported("tool_choice", "the format of tool calls in the model's chat template is not known")
    used = ("reasoning_effort", "enable_thinking") if effort == "none" else ("reasoning_effort",)
    if effort is not None and not any(name in template for name in used):
        raise _unsupported("reasoning_effort", f"the model's chat template has no {' or '.join(used)}")


def _forcing(request: ChatRequest, opening: str, prompt: str, template: str, encode: Encode) -> Forcing | None:
    """Behind a thought there is an empty line, as chat templates write it. An answer of a given structure may be behind a
    thought that the model begins only where its template knows thoughts and the prompt has not ended one."""
    budget, structure = request.thinking_budget, request.sampling.structure
    if not opening and structure is None and budget is None:
        return None
    thinking, begin, end = _ends_with(prompt, THINK), encode(THINK), encode(END_THINK)
    if len(end) != 1 and (thinking or budget is not None):
        param = "thinking_budget" if budget is not None else structure.param if structure else "tool_choice"
        raise _unsupported(param, f"{END_THINK} is not a token of the model")
    may_begin = structure is None or (THINK in template and not _ends_with(prompt, END_THINK))
    opening = "\n\n" + opening if thinking and (opening or structure) else opening
    return Forcing(
        opening=tuple(encode(opening)) if opening else (),
        thinking=thinking,
        begin=begin[0] if len(begin) == len(end) == 1 and may_begin else None,
        closing=tuple(encode("\n" + END_THINK)) if len(end) == 1 else (),
        budget=budget,
    )


def _ends_with(prompt: str, tag: str) -> bool:
    return prompt.rstrip().endswith(tag)


def _unsupported(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is not supported: {why}", param=param, code="unsupported_parameter")


class AnswerStream(TextStream):
    """The text of a chat's answer, and the events of which it consists; they are a function of the tokens alone."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        parser: ReplyParser,
        *,
        skip: Collection[int] = (),
        stop: Iterable[str] = (),
        align: bool = False,
    ) -> None:
        super().__init__(token_bytes, skip=skip, stop=stop, align=align)
        self._parser = parser
        self._events: list[Event] = []
        self.thought_tokens = 0

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return self._parser.calls

    def push(self, tokens: Iterable[int]) -> TextDelta:
        """Add a burst. Once the answer is complete nothing counts, as behind a stop string."""
        text: list[str] = []
        counted: list[int] = []
        stopped = self._parser.complete
        for token in tokens:
            if stopped:
                break
            self.thought_tokens += self._parser.thinking
            piece = super().push((token,))
            self._events += self._parser.push(piece.text)
            text.append(piece.text)
            counted += piece.tokens
            stopped = piece.stopped or self._parser.complete
        return TextDelta("".join(text), tuple(counted), stopped)

    def finish(self) -> str:
        rest = super().finish()
        self._events += self._parser.push(rest)
        return rest

    def events(self, *, ended: bool) -> tuple[Event, ...]:
        """Those since the last call; at the end all that are left."""
        if ended:
            self._events += self._parser.finish()
        events, self._events = self._events, []
        return tuple(joined(events))
