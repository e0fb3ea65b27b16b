"""A reply taken apart while it comes: the thought, the content, the tool calls.

What comes out, pieces of one kind joined, is a function of the text alone and not of where it is cut. Text that looks like a
call and turns out to be none is content. Line breaks around a thought and white space around calls belong to the format.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.parsing.calls import FUNCTION, TOOL_CALL, CallReader, HermesCall, XmlCall
from paceline.parsing.events import ArgumentsText, CallBegin, ContentText, Event, ThoughtText
from paceline.parsing.scan import after_space, beginning_at_end, begins
from paceline.parsing.tools import CallFormat, Tools

THINK, END_THINK = "<think>", "</think>"


class ReplyParser:
    """``thinking``: the prompt ends inside a thought; else a reply that begins with <think> has one, except with None. With
    ``tools`` and the ``form`` of the model's calls these are looked for behind the thought; with ``either`` what does not
    begin with a call has none."""

    def __init__(
        self,
        *,
        thinking: bool | None = False,
        tools: Tools | None = None,
        form: CallFormat | None = None,
        either: bool = False,
    ) -> None:
        self.calls = 0
        self.complete = False
        """Whether the reply is over, as far as the request wants it: no parallel calls, and one is complete."""
        self._tools = tools if form is not None else None
        self._form = form
        self._either = either
        self._openings = (TOOL_CALL, FUNCTION) if form == "xml" else (TOOL_CALL,)
        self._text = ""
        self._events: list[Event] = []
        self._gap = ""
        self._call: CallReader | None = None
        self._shown = False
        self._step: Callable[[bool], bool] = (
            self._thought if thinking else self._begin if thinking is not None else self._content
        )

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._step == self._thought

    def push(self, text: str) -> list[Event]:
        """What this text completes."""
        return self._run(text, False)

    def finish(self) -> list[Event]:
        """The rest, now that no more text comes."""
        return self._run("", True)

    def _run(self, text: str, final: bool) -> list[Event]:
        self._text += text
        while not self.complete and self._step(final):
            pass
        events, self._events = self._events, []
        return events

    # Steps. Each takes what it can from the text and says whether another is to follow at once.

    def _begin(self, final: bool) -> bool:
        at = after_space(self._text, 0)
        there = begins(self._text, at, THINK)
        if there is None and not final:
            return False
        if there:
            self._take(at + len(THINK))
        self._step = self._thought if there else self._content
        return True

    def _thought(self, final: bool) -> bool:
        if not self._shown:
            self._text = self._text.lstrip("\n")
        end = self._text.find(END_THINK)
        stop = end if end >= 0 else len(self._text) if final else beginning_at_end(self._text, (END_THINK,))
        thought = self._text[:stop].rstrip("\n")
        self._emit_text(ThoughtText, thought)
        if end < 0:
            self._take(len(self._text) if final else len(thought))
            return False
        self._take(end + len(END_THINK))
        self._step, self._shown = self._after_thought, False
        return True

    def _after_thought(self, final: bool) -> bool:
        self._text = self._text.lstrip("\n")
        if not self._text:
            return False
        self._step = self._content
        return True

    def _content(self, final: bool) -> bool:
        if self._either and not self.calls:
            at = after_space(self._text, 0)
            there = [begins(self._text, at, tag) for tag in self._openings]
            if True not in there and None in there and not final:
                return False
            self._either = False
            self._tools = self._tools if True in there else None
        if self._tools is None:
            self._emit_text(ContentText, self._take(len(self._text)))
            return False
        places = [place for tag in self._openings if (place := self._text.find(tag)) >= 0]
        if places:
            content = self._text[: min(places)].rstrip()
            self._gap = self._text[len(content) : min(places)]
            self._emit_text(ContentText, content)
            self._take(min(places))
            self._call = HermesCall() if self._form == "hermes" else XmlCall(self._tools)
            self._step = self._in_call
            return True
        stop = len(self._text) if final else beginning_at_end(self._text, self._openings)
        stop = stop if final and not self.calls else len(self._text[:stop].rstrip())
        self._emit_text(ContentText, self._take(stop))
        return False

    def _in_call(self, final: bool) -> bool:
        call = self._call
        assert call is not None
        known = call.name is not None
        count, arguments, state = call.read(self._text, final)
        self._take(count)
        if not known and call.name is not None:
            self._events.append(CallBegin(self.calls, call.name))
            self.calls += 1
        if arguments:
            self._events.append(ArgumentsText(self.calls - 1, arguments))
        if state == "open":
            return count > 0
        if state == "failed":
            tag = next(tag for tag in self._openings if self._text.startswith(tag))
            self._emit_text(ContentText, self._gap + self._take(len(tag)))
        self._step = self._content
        self.complete = state == "done" and self._tools is not None and not self._tools.parallel
        return True

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _emit_text(self, kind: type[ContentText] | type[ThoughtText], text: str) -> None:
        if text:
            self._events.append(kind(text))
            self._shown = True
