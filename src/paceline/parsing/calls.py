"""One tool call, read as it comes, in either format.

A reader is given what it has not consumed yet, from the opening tag on, with more behind it each time. It answers how much
of that it consumes now; the text in which no call is found it leaves. What it says does not depend on where the text is cut.
"""

from __future__ import annotations

import json
import re
from typing import Literal, Protocol

from paceline.parsing.scan import JsonEnd, after_space, begins
from paceline.parsing.tools import Tools, typed

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MAX_TAG = 256
"""Characters of the name in a tag."""

State = Literal["open", "done", "failed"]
"""``open``: more text is needed; ``done``: the call is over, what is left follows it; ``failed``: this is no call."""


class CallReader(Protocol):
    name: str | None
    """The tool's name, once it is known. The arguments begin behind it."""

    def read(self, text: str, final: bool) -> tuple[int, str, State]:
        """Characters consumed, more of the arguments (JSON text), and the state. With ``final`` no more text comes."""


class HermesCall:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``. With the name in front, arguments come as they are written;
    an object in another order is read when it is complete."""

    _HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){1,256}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

    def __init__(self) -> None:
        self.name: str | None = None
        self._json = JsonEnd(END_TOOL_CALL)
        self._scanned = len(TOOL_CALL)
        self._in_tail = False

    def read(self, text: str, final: bool) -> tuple[int, str, State]:
        if self._in_tail:
            return self._tail(text, final)
        return self._head(text, final) if self.name is None else self._arguments(text, final)

    def _head(self, text: str, final: bool) -> tuple[int, str, State]:
        head = self._HEAD.match(text, len(TOOL_CALL))
        if head and (name := _string(head[1])):
            self.name = name
            self._json = JsonEnd(END_TOOL_CALL)
            return head.end(), "", "open"
        begin = after_space(text, len(TOOL_CALL))
        if begin < len(text) and text[begin] != "{":
            return 0, "", "failed"
        self._scanned += self._json.feed(text[self._scanned :])
        if self._json.ended:
            return self._whole(text)
        return 0, "", "failed" if final else "open"

    def _whole(self, text: str) -> tuple[int, str, State]:
        try:
            call = json.loads(text[len(TOOL_CALL) : self._scanned], strict=False)
        except (ValueError, RecursionError):
            return 0, "", "failed"
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters"))
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | str | None):
            return 0, "", "failed"
        self.name, self._in_tail = name, True
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        return self._scanned, shown, "open"

    def _arguments(self, text: str, final: bool) -> tuple[int, str, State]:
        count = self._json.feed(text)
        if self._json.ended:
            self._in_tail = True
        elif final:
            return len(text), self._as_json(text), "done"
        return count, self._as_json(text[:count]), "open"

    def _as_json(self, text: str) -> str:
        """The text just fed, with its control characters escaped."""
        at = [0, *(place + 1 for place in self._json.controls)]
        escaped = [text[begin:place] + _escaped(text[place]) for begin, place in zip(at, self._json.controls, strict=False)]
        return "".join(escaped) + text[at[-1] :]

    def _tail(self, text: str, final: bool) -> tuple[int, str, State]:
        """Behind the arguments: the object's end, which models forget now and then, and the closing tag."""
        at = after_space(text, 0)
        if text[at : at + 1] == "}":
            at = after_space(text, at + 1)
        closed = begins(text, at, END_TOOL_CALL)
        if closed:
            return at + len(END_TOOL_CALL), "", "done"
        if closed is None:
            return (len(text), "", "done") if final else (0, "", "open")
        return 0, "", "done"


class XmlCall:
    """``<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>``; the outer tags may be missing.

    Values are plain text between line breaks; the tool's schema says which are strings, and these come as they are written.
    A value ends at the tag that closes it only if another tag of the call follows, so that it may speak of tags itself.
    """

    def __init__(self, tools: Tools) -> None:
        self.name: str | None = None
        self._tools = tools
        self._place: Literal["function", "value", "tail"] = "function"
        self._value: _Value | None = None
        self._count = 0

    def read(self, text: str, final: bool) -> tuple[int, str, State]:
        if self.name is None:
            return self._head(text, final)
        if self._place == "value":
            return self._in_value(text, final)
        return self._in_function(text, final) if self._place == "function" else self._tail(text, final)

    def _head(self, text: str, final: bool) -> tuple[int, str, State]:
        at = after_space(text, len(TOOL_CALL)) if text.startswith(TOOL_CALL) else 0
        name, end = _tag(text, at, FUNCTION)
        if name:
            self.name = name
            return end, "{", "open"
        return 0, "", "failed" if final or name is not None else "open"

    def _in_function(self, text: str, final: bool) -> tuple[int, str, State]:
        at = after_space(text, 0)
        ended = begins(text, at, END_FUNCTION)
        if ended:
            self._place = "tail"
            return at + len(END_FUNCTION), "}", "open"
        key, end = _tag(text, at, PARAMETER)
        if key:
            assert self.name is not None
            self._place, self._value = "value", _Value(self._tools.types(self.name, key))
            self._count += 1
            return end, f"{', ' if self._count > 1 else ''}{json.dumps(key, ensure_ascii=False)}: ", "open"
        if not final and (ended is None or key is None):
            return 0, "", "open"
        return 0, "" if final else "}", "done"

    def _in_value(self, text: str, final: bool) -> tuple[int, str, State]:
        assert self._value is not None
        count, shown = self._value.read(text, final)
        if self._value.ended:
            self._place = "function"
        return count, shown, "done" if final and not self._value.ended else "open"

    def _tail(self, text: str, final: bool) -> tuple[int, str, State]:
        at = after_space(text, 0)
        closed = begins(text, at, END_TOOL_CALL)
        if closed:
            return at + len(END_TOOL_CALL), "", "done"
        return (0, "", "open") if closed is None and not final else (0, "", "done")


class _Value:
    """One value of an XML call, from behind its opening tag. An unfinished one is left open, as JSON too."""

    _PLACE = re.compile(r"\n?<|\n\Z")

    def __init__(self, types: frozenset[str]) -> None:
        self.ended = False
        self._types = types
        self._streams = types <= {"string"}
        self._begun = False
        self._scanned = 0

    def read(self, text: str, final: bool) -> tuple[int, str]:
        """Characters consumed and what they are as JSON text."""
        if not self._streams:
            return self._read_whole(text, final)
        opening, skipped = "", 0
        if not self._begun:
            if not text:
                return 0, ""
            self._begun, opening, skipped = True, '"', int(text[0] == "\n")
        end, following = self._end(text, skipped, final)
        shown = opening + _escaped(text[skipped:end])
        if following is None:
            return end, shown
        self.ended = True
        return following, shown + '"'

    def _read_whole(self, text: str, final: bool) -> tuple[int, str]:
        skipped = int(text[:1] == "\n")
        end, following = self._end(text, max(skipped, self._scanned), final)
        if following is not None:
            self.ended = True
            return following, typed(text[skipped:end], self._types)
        self._scanned = end
        return (len(text), '"' + _escaped(text[skipped:])) if final else (0, "")

    def _end(self, text: str, begin: int, final: bool) -> tuple[int, int | None]:
        """Where the value ends, and where the text behind it begins; None if it has not ended as far as that."""
        for place in self._PLACE.finditer(text, begin):
            following = self._closing(text, place.end() - 1, final) if place[0][-1] == "<" else None if final else -1
            if following is not None:
                return place.start(), None if following < 0 else following
        return len(text), None

    @staticmethod
    def _closing(text: str, at: int, final: bool) -> int | None:
        """Where the text behind a value begins that ends at a tag at ``at``. None: the tag is part of the value; -1: the
        text ends before that can be told."""
        closed = begins(text, at, END_PARAMETER)
        if closed:
            behind = after_space(text, at + len(END_PARAMETER))
            found = [begins(text, behind, tag) for tag in (PARAMETER, END_FUNCTION)]
            if True in found or (final and None in found):
                return at + len(END_PARAMETER)
            return -1 if None in found else None
        # The last value's own tag may be missing; then the whole call ends here, and so does the reply, or a call follows.
        left = begins(text, at, END_FUNCTION)
        if left:
            behind = after_space(text, at + len(END_FUNCTION))
            outer = begins(text, behind, END_TOOL_CALL)
            if outer:
                outer = begins(text, after_space(text, behind + len(END_TOOL_CALL)), TOOL_CALL)
            if outer or (final and outer is None):
                return at
            return -1 if outer is None else None
        return -1 if not final and None in (closed, left) else None


def _tag(text: str, at: int, tag: str) -> tuple[str | None, int]:
    """The name in a tag such as <function=name> at ``at``, and where the tag ends. An empty name: there is no such tag;
    None: the text ends before that can be told."""
    there = begins(text, at, tag)
    if there is None:
        return None, at
    begin = at + len(tag)
    end = text.find(">", begin, begin + MAX_TAG + 1)
    name = text[begin : end if end >= 0 else begin + MAX_TAG + 1]
    if not there or "\n" in name or (end < 0 and len(name) > MAX_TAG):
        return "", at
    return (name.strip(), end + 1) if end >= 0 else (None, at)


def _string(text: str) -> str:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return ""


def _escaped(text: str) -> str:
    """The inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
