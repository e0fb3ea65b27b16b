"""A reply as blocks."""

from __future__ import annotations

from paceline.parsing import ArgumentsText, Blocks, CallBegin, ContentText, Event, ThoughtText

EVENTS: list[Event] = [
    ThoughtText("Hm"),
    ThoughtText("m."),
    ContentText("Look"),
    CallBegin(0, "f"),
    CallBegin(1, "g"),
    ArgumentsText(1, "{"),
    ArgumentsText(1, "}"),
    ContentText("Done"),
]


def test_events_become_blocks_one_after_another() -> None:
    blocks = Blocks()
    steps = [(what, block.index, text) for event in EVENTS for what, block, text in blocks.push([event])]
    assert [(block.kind, block.name, block.text) for block in blocks.all] == [
        ("thought", "", "Hmm."),
        ("content", "", "Look"),
        ("call", "f", ""),
        ("call", "g", "{}"),
        ("content", "", "Done"),
    ]
    assert steps == [
        ("begin", 0, ""),
        ("more", 0, "Hm"),
        ("more", 0, "m."),
        ("end", 0, ""),
        ("begin", 1, ""),
        ("more", 1, "Look"),
        ("end", 1, ""),
        ("begin", 2, ""),
        ("end", 2, ""),
        ("begin", 3, ""),
        ("more", 3, "{"),
        ("more", 3, "}"),
        ("end", 3, ""),
        ("begin", 4, ""),
        ("more", 4, "Done"),
    ]
    assert [(what, block.index) for what, block, _ in blocks.finish()] == [("end", 4)]
    assert not blocks.finish()
