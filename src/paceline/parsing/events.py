"""The pieces of a reply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of what the user is told."""

    text: str


@dataclass(frozen=True, slots=True)
class ThoughtText:
    """More of the thought that comes before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins, the ``index``-th of the reply from 0; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Event = ContentText | ThoughtText | CallBegin | ArgumentsText


def joined(events: Iterable[Event]) -> list[Event]:
    """The same with pieces that belong together in one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        match last, event:
            case (ContentText(before), ContentText(text)):
                out[-1] = ContentText(before + text)
            case (ThoughtText(before), ThoughtText(text)):
                out[-1] = ThoughtText(before + text)
            case (ArgumentsText(index, before), ArgumentsText(_, text)):
                out[-1] = ArgumentsText(index, before + text)
            case _:
                out.append(event)
    return out
