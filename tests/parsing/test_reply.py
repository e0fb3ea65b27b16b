"""Replies taken apart: what is found, and that it is the same however the text is cut."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.parsing import ArgumentsText, CallBegin, CallFormat, Event, Message, ReplyParser, Tools, check_tools
from paceline.parsing.tools import allowed_values

TYPES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "sure": {"type": "boolean"},
    "list": {"type": "array"},
    "map": {"$ref": "#/$defs/map"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "colour": {"enum": ["red", 3]},
}
SCHEMA = {"type": "object", "properties": TYPES, "$defs": {"map": {"type": "object"}}}
TOOLS = Tools(({"type": "function", "function": {"name": "f", "parameters": SCHEMA}},))


def parse(pieces: Sequence[str], form: CallFormat | None = "hermes", **options: Any) -> list[Event]:
    parser = ReplyParser(tools=options.pop("tools", TOOLS), form=form, **options)
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def read(text: str, form: CallFormat | None = "hermes", **options: Any) -> Message:
    """The message, checked to be the same when the text comes character by character."""
    message = Message.of(parse([text], form, **options))
    assert Message.of(parse(list(text), form, **options)) == message
    return message


def hermes(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def xml(name: str, **arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


# -- thoughts --------------------------------------------------------------------------------------------------------------


def test_a_thought_that_the_prompt_opened() -> None:
    message = read("\nWell, 1 < 2.\n\n</think>\n\nYes. </think>", thinking=True)
    assert message == Message("Yes. </think>", "Well, 1 < 2.")
    assert read("no end\n", thinking=True) == Message("", "no end")


def test_a_thought_that_the_reply_opens() -> None:
    assert read("\n<think>a</think>b\n") == Message("b\n", "a")
    assert read("<think></think>b") == Message("b")
    assert read("b <think>a</think>") == Message("b <think>a</think>")
    assert read("  <thing>") == Message("  <thing>")


def test_a_call_in_a_thought_is_none() -> None:
    call = hermes("f", {})
    assert read(f"{call}</think>{call}", thinking=True) == Message("", call, [("f", "{}")])


# -- hermes ----------------------------------------------------------------------------------------------------------------


def test_calls_in_json_with_text_around() -> None:
    text = f"Let me see.\n{hermes('f', {'text': 'x'})}\n{hermes('g', {})}\nDone."
    assert read(text) == Message("Let me see.\nDone.", "", [("f", '{"text": "x"}'), ("g", "{}")])


def test_arguments_come_as_they_are_written() -> None:
    source = '{ "text" : "a\\n\\"</tool_call>\\"", "list": [1, {"b": "}"}] }'
    assert read(f'<tool_call>{{"name":"f","arguments":{source}}}</tool_call>') == Message("", "", [("f", source)])


def test_control_characters_that_models_do_not_escape() -> None:
    (call,) = read(
        '<tool_call>\n{"name": "f", "arguments": {\n\t"a": "one\ntwo\t\\n\\\\\n", "b": [1,\n2]}}\n</tool_call>'
    ).calls
    assert call[1] == '{\n\t"a": "one\\ntwo\\t\\n\\\\\\n", "b": [1,\n2]}'
    assert json.loads(call[1]) == {"a": "one\ntwo\t\n\\\n", "b": [1, 2]}


def test_long_arguments_stream() -> None:
    parser = ReplyParser(tools=TOOLS, form="hermes")
    assert parser.push('<tool_call>\n{"name": "f", "arguments": {"text": "a') == [
        CallBegin(0, "f"),
        ArgumentsText(0, '{"text": "a'),
    ]
    assert parser.push("b <") == [ArgumentsText(0, "b <")]
    assert parser.push("/tool_call>") == [ArgumentsText(0, "/tool_call>")]
    assert parser.push('"} ') == [ArgumentsText(0, '"}')]
    assert parser.push("}\n</tool_call>") == []


@pytest.mark.parametrize(
    "source",
    [
        '{"arguments": {"text": "}"}, "name": "f"}',
        '{"name": "f", "parameters": {"text": "}"}}',
        '{"name": "f", "arguments": "{\\"text\\": \\"}\\"}"}',
        '{"id": 3, "name": "f", "arguments": {"text": "}"}}',
        '{"name": "f", "arguments": {"text": "}"}',
    ],
)
def test_other_ways_to_write_a_call(source: str) -> None:
    assert read(f"<tool_call>{source}</tool_call>") == Message("", "", [("f", '{"text": "}"}')])


def test_a_call_without_arguments() -> None:
    assert read('<tool_call>{"name": "f"}</tool_call>') == Message("", "", [("f", "{}")])
    assert read('<tool_call>{"name": "f", "arguments": null}</tool_call>') == Message("", "", [("f", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_call> tags.",
        "  <tool_call>{broken}</tool_call> ",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "argu',
        "<tool_call>",
        "<tool_ca",
        "\n\n",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert read(text) == Message(text)


def test_a_call_that_is_cut_off_keeps_its_arguments() -> None:
    assert read('<tool_call>{"name": "f", "arguments": {"text": "ab') == Message("", "", [("f", '{"text": "ab')])


def test_without_parallel_calls_the_reply_ends_with_the_first() -> None:
    call = hermes("f", {})
    parser = ReplyParser(tools=Tools(TOOLS.definitions, parallel=False), form="hermes")
    assert [len(parser.push(piece)) for piece in (call[:-1], call[-1:])] == [2, 0]
    assert parser.complete
    assert parser.push(call) == parser.finish() == []


def test_without_tools_or_a_format_calls_are_text() -> None:
    call = hermes("f", {}) + " "
    assert read(call, tools=None) == read(call, None) == Message(call)


# -- xml -------------------------------------------------------------------------------------------------------------------


def test_calls_in_xml_are_typed() -> None:
    values = {
        "text": "5\nlines",
        "count": "5",
        "share": "1e3",
        "sure": "True",
        "list": "[1, 2]",
        "map": '{"a": "b"}',
        "maybe": "null",
        "colour": "3",
        "unknown": "7",
    }
    message = read("Look:\n\n" + xml("f", **values) + "\n")
    assert message.content.startswith("Look:\n\n<tool_call>"), "another format"
    message = read("Look:\n\n" + xml("f", **values) + "\n", "xml")
    assert message.content == "Look:"
    assert [name for name, _ in message.calls] == ["f"]
    assert json.loads(message.calls[0][1]) == {
        "text": "5\nlines",
        "count": 5,
        "share": 1000.0,
        "sure": True,
        "list": [1, 2],
        "map": {"a": "b"},
        "maybe": None,
        "colour": 3,
        "unknown": "7",
    }


def test_values_that_are_not_of_their_type_are_strings() -> None:
    message = read(xml("f", count="many", list="[1,", map="7", sure="maybe", share="NaN"), "xml")
    assert json.loads(message.calls[0][1]) == {"count": "many", "list": "[1,", "map": "7", "sure": "maybe", "share": "NaN"}


def test_values_may_speak_of_tags() -> None:
    for value in (
        "a</parameter>b",
        "</function>",
        "</function>\n</tool_call>",
        "x</parameter>\n</tool_call>",
        "<parameter=text>\ny",
        "\n",
        "",
        '"quoted" \\ ü',
    ):
        message = read(xml("f", text=value, maybe=value) + xml("g"), "xml")
        assert [name for name, _ in message.calls] == ["f", "g"]
        assert json.loads(message.calls[0][1]) == {"text": value, "maybe": value}


def test_tags_that_models_forget() -> None:
    bare = "<function=f>\n<parameter=text>\na\n</parameter>\n</function>"
    assert read(bare, "xml").calls == [("f", '{"text": "a"}')]
    assert read(f"Hm. {bare} So.", "xml") == Message("Hm. So.", "", [("f", '{"text": "a"}')])
    unclosed = "<tool_call>\n<function=f>\n<parameter=text>\na\n</function>\n</tool_call>"
    assert read(unclosed, "xml").calls == [("f", '{"text": "a"}')]
    assert read(f"{unclosed}\n{unclosed}", "xml").calls == [("f", '{"text": "a"}')] * 2
    assert read("<tool_call>\n<function=f>\n</function>", "xml").calls == [("f", "{}")]


def test_strings_stream() -> None:
    parser = ReplyParser(tools=TOOLS, form="xml")
    head = parser.push("<tool_call>\n<function=f>\n<parameter=text>\nab")
    assert Message.of(head).calls == [("f", '{"text": "ab')]
    assert parser.push('"c\n</para') == [ArgumentsText(0, '\\"c')]
    assert parser.push("graph>") == [ArgumentsText(0, "\\n</paragraph>")]


def test_a_value_that_is_cut_off_stays_open() -> None:
    begin = "<tool_call>\n<function=f>\n"
    assert read(begin + "<parameter=text>\nab", "xml").calls == [("f", '{"text": "ab')]
    assert read(begin + "<parameter=count>\n1", "xml").calls == [("f", '{"count": "1')]
    assert read(begin, "xml").calls == [("f", "{")]


# -- any text --------------------------------------------------------------------------------------------------------------

PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "</parameter>"),
    *("<parameter=text>", "<parameter=count>", '{"name": "f", "arguments": {', '{"arguments": {}, "name": "g"}'),
    *('"text": "', '"', "}", "}}", "\\", "\n", " ", "<", "</", "a", "5"),
    *(hermes("f", {"text": "</tool_call>"}), xml("f", text="</parameter>", count="3")),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(cut_texts(), st.sampled_from(["hermes", "xml"]), st.booleans(), st.booleans())
@settings(max_examples=1500, deadline=None)
def test_the_same_however_it_is_cut(cut: tuple[str, list[str]], form: CallFormat, thinking: bool, parallel: bool) -> None:
    text, pieces = cut
    options: dict[str, Any] = {"thinking": thinking, "tools": Tools(TOOLS.definitions, parallel=parallel)}
    whole = Message.of(parse([text], form, **options))
    assert Message.of(parse(pieces, form, **options)) == whole
    assert Message.of(parse(list(text), form, **options)) == whole
    if not whole.calls and not thinking and not text.lstrip().startswith("<think>"):
        assert whole == Message(text), "text without calls and thoughts is content"


arguments = st.dictionaries(st.text(min_size=1), st.text() | st.integers() | st.lists(st.text(), max_size=2), max_size=4)


@given(st.lists(arguments, min_size=1, max_size=3), st.sampled_from([1, 2, 3, 5, 16]))
@settings(max_examples=200, deadline=None)
def test_calls_in_json_come_back(calls: list[dict[str, Any]], step: int) -> None:
    text = "\n".join(hermes("f", call) for call in calls)
    message = Message.of(parse([text[at : at + step] for at in range(0, len(text), step)]))
    assert [json.loads(source) for _, source in message.calls] == calls
    assert message.content == ""


values = st.dictionaries(
    st.from_regex("[a-z]{1,8}", fullmatch=True),
    st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=5)
    .map("".join)
    .filter(lambda value: "</parameter>" not in value and not re.search(r"</tool_call>\s*<tool_call>", value)),
    max_size=4,
)


@given(st.lists(values, min_size=1, max_size=3), st.sampled_from([1, 2, 3, 5, 16]))
@settings(max_examples=300, deadline=None)
def test_strings_in_xml_come_back(calls: list[dict[str, str]], step: int) -> None:
    text = "\n".join(xml("g", **call) for call in calls)
    message = Message.of(parse([text[at : at + step] for at in range(0, len(text), step)], "xml"))
    assert [json.loads(source) for _, source in message.calls] == calls


def test_choices() -> None:
    tool = TOOLS.definitions[0]
    named = {"type": "function", "function": {"name": "f"}}
    assert check_tools([tool], None, None) == TOOLS
    assert check_tools([tool], "required", False) == Tools((tool,), required=True, parallel=False)
    assert check_tools([tool], named, None) == Tools((tool,), named="f")
    assert check_tools([tool], "none", None) is check_tools([], "auto", True) is None


def test_a_schema_that_leads_back_to_itself_is_followed_for_a_while() -> None:
    """Its ways double with every step."""
    again = {"anyOf": [{"$ref": "#/properties/x"}] * 40}
    parameters = {"type": "object", "properties": {"x": again, "y": {"anyOf": [{"$ref": "#/$defs/z"}] * 40}}}
    tools = check_tools(
        [{"type": "function", "function": {"name": "f", "parameters": parameters | {"$defs": {"z": {"type": "integer"}}}}}],
        None,
        None,
    )
    assert tools is not None
    began = time.monotonic()
    assert tools.types("f", "x") == frozenset() and allowed_values(again, parameters) == []
    assert time.monotonic() - began < 1
    assert tools.types("f", "y") == {"integer"}
