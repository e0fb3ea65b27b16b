"""The answer to a chat: how it is to be read, and what it has to begin with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from paceline.errors import InvalidRequest
from paceline.parsing import CallFormat, Event, ReplyParser, Tools, calls_of, format_of, joined, opening_of
from paceline.parsing.reply import THINK
from paceline.parsing.thoughts import Encode, ends_with, forcing_of
from paceline.server.protocol import ChatRequest
from paceline.text import TextDelta, TextStream
from paceline.types import Forcing, Structure


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """``thinking``: the prompt ends inside a thought; None: there is none, whatever the answer says. ``form`` is how the
    model writes tool calls, None if they are not to be read; ``forcing`` and ``structure`` go to the engine. ``either``: the
    answer is calls, or it is something else."""

    thinking: bool | None
    tools: Tools | None
    form: CallFormat | None
    forcing: Forcing | None
    structure: Structure | None
    either: bool

    @classmethod
    def of(cls, request: ChatRequest, prompt: str, template: str, encode: Encode) -> AnswerPlan:
        """``prompt`` is the rendered text, ``template`` the chat template's source. ``InvalidRequest`` names a field that
        the template or the vocabulary cannot serve."""
        _check_template(request, template)
        thinking: bool | None = ends_with(prompt, THINK)
        form = format_of(template)
        opening = opening_of(request.tools, form) if request.tools and form else ""
        structure, budget = request.sampling.structure, request.thinking_budget
        either = bool(structure and request.tools)
        if request.tools and form:
            structure = calls_of(request.tools, form, structure)
        forcing = forcing_of(prompt, template, encode, opening=opening, structure=structure, budget=budget)
        if structure and not thinking and forcing is not None and forcing.begin is None:
            thinking = None
        return cls(thinking, request.tools, form if request.tools else None, forcing, structure, either)

    def parser(self) -> ReplyParser:
        return ReplyParser(thinking=self.thinking, tools=self.tools, form=self.form, either=self.either)


def _check_template(request: ChatRequest, template: str) -> None:
    tools, effort, structure = request.tools, request.reasoning_effort, request.sampling.structure
    if tools and "tools" not in template:
        raise _unsupported("tools", "the model's chat template shows no tools")
    if tools and structure and structure.kind != "json":
        raise _unsupported(structure.param, "beside tools the answer may be JSON of a schema")
    if tools and format_of(template) is None:
        strict = next((n for n, tool in enumerate(tools.definitions) if tool["function"].get("strict")), None)
        asked = {"tool_choice": tools.must, f"tools[{strict}].function.strict": strict is not None}
        asked |= {structure.param: True} if structure else {}
        param = next((param for param, given in asked.items() if given), None)
        if param is not None:
            raise _unsupported(param, "the format of tool calls in the model's chat template is not known")
    used = ("reasoning_effort", "enable_thinking") if effort == "none" else ("reasoning_effort",)
    if effort is not None and not any(name in template for name in used):
        raise _unsupported("reasoning_effort", f"the model's chat template has no {' or '.join(used)}")


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
