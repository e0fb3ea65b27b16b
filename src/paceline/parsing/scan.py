"""Looking for tags and for the ends of JSON values in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SPACE = re.compile(r"\s*")
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]<]'), re.compile(r'["\\\x00-\x1f]')


def begins(text: str, at: int, tag: str) -> bool | None:
    """Whether ``tag`` stands at ``at``; None if the text ends before that can be told."""
    if text.startswith(tag, at):
        return True
    return None if tag.startswith(text[at:]) else False


def beginning_at_end(text: str, tags: Sequence[str]) -> int:
    """Where the longest end of the text begins that one of the tags may begin with; the text's length if none does."""
    most = min(len(text), max(map(len, tags)) - 1)
    for length in range(most, 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return len(text) - length
    return len(text)


def after_space(text: str, at: int) -> int:
    """Where the white space at ``at`` ends."""
    space = _SPACE.match(text, at)
    assert space is not None, "nothing at all is white space too"
    return space.end()


class JsonEnd:
    """Finds the end of one JSON object or array that comes in pieces, or a closing tag outside its strings before that. The
    JSON is not checked otherwise."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.ended = False
        """Whether the end, or the tag, has been found."""
        self.controls: list[int] = []
        """Where in the text last fed control characters stand in strings: JSON wants them escaped, which models forget."""

    def feed(self, text: str) -> int:
        """How many characters belong to the value. Less than all of them: ``ended``, or the rest may become the tag and must
        be given again."""
        at, self.controls = 0, []
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return len(text)
            if found[0] == "<":
                tagged = begins(text, found.start(), self._tag)
                if tagged is not False:
                    self.ended = bool(tagged)
                    return found.start()
            if found[0] < " ":
                self.controls.append(found.start())
            self._meet(found[0])
            at = found.end()
            if self._depth == 0 and not self._in_string:
                self.ended = True
                return at
        return at

    def _meet(self, character: str) -> None:
        if character == '"':
            self._in_string = not self._in_string
        elif character == "\\":
            self._escaped = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
