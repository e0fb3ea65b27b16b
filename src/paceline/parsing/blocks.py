"""A reply put together: blocks of one kind, one after another, and the message that they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from paceline.parsing.events import ArgumentsText, CallBegin, ContentText, Event, ThoughtText

Kind = Literal["thought", "content", "call"]


class Block:
    """The ``index``-th block of a reply from 0. A call has the ``name`` of its tool, and its text is its arguments as JSON
    text, which may be cut off."""

    def __init__(self, index: int, kind: Kind, name: str = "") -> None:
        self.index, self.kind, self.name = index, kind, name
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """What has come so far."""
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        self._pieces.append(text)


Step = tuple[Literal["begin", "more", "end"], Block, str]
"""A block begins, has more text, or ends. When a burst's steps are looked at, all of its text is in the blocks already."""


class Blocks:
    """Puts a reply's events together, and says what happens to its blocks while they come."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def push(self, events: Iterable[Event]) -> list[Step]:
        """What these events do."""
        steps: list[Step] = []
        for event in events:
            match event:
                case CallBegin(_, name):
                    steps += self._begin("call", name)
                case ContentText(text):
                    steps += self._more("content", text)
                case ThoughtText(text):
                    steps += self._more("thought", text)
                case ArgumentsText(_, text):
                    steps += self._more("call", text)
        return steps

    def finish(self) -> list[Step]:
        """The end of the last block."""
        ended, self._open = self._open, None
        return [("end", ended, "")] if ended else []

    def _more(self, kind: Kind, text: str) -> list[Step]:
        steps = [] if self._open and self._open.kind == kind else self._begin(kind)
        assert self._open is not None
        self._open.add(text)
        return [*steps, ("more", self._open, text)]

    def _begin(self, kind: Kind, name: str = "") -> list[Step]:
        steps = self.finish()
        self._open = Block(len(self.all), kind, name)
        self.all.append(self._open)
        return [*steps, ("begin", self._open, "")]


@dataclass(slots=True)
class Message:
    """A reply without the order of its parts. ``calls`` are (name, arguments as JSON text)."""

    content: str = ""
    thought: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Message:
        blocks = Blocks()
        blocks.push(events)
        content, thought = ("".join(b.text for b in blocks.all if b.kind == kind) for kind in ("content", "thought"))
        return cls(content, thought, [(block.name, block.text) for block in blocks.all if block.kind == "call"])
