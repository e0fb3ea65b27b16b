"""Grammars of calls: what they take, and that the reader reads it as the schema says."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from paceline.errors import InvalidRequest
from paceline.parsing import CallFormat, Message, ReplyParser, Tools, calls_of, check_tools, opening_of
from paceline.structure import Compiler, words_of
from paceline.types import MAX_CALLS, Structure
from paceline.weights.tokenizer import Tokenizer

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "enum": ["wet", "dry"]}},
}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 3}}\n</tool_call>'
XML = """<tool_call>
<function=weather>
<parameter=city>
Bern
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""
ARGUMENTS = '{"city": "Bern", "days": 3}'
CALLS: dict[CallFormat, str] = {"hermes": HERMES, "xml": XML}
FORMS: Sequence[CallFormat] = ("hermes", "xml")


def tools(choice: object = None, parallel: bool = True, strict: bool = True, schema: Any = WEATHER, **more: Any) -> Tools:
    functions = [
        {"name": "weather", "parameters": schema, "strict": strict},
        {"name": "now", "parameters": {"properties": {}}},
    ]
    functions += [{"name": name, "parameters": parameters} for name, parameters in more.items()]
    made = check_tools([{"type": "function", "function": function} for function in functions], choice, parallel)
    assert made is not None
    return made


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


class Taking:
    """What answers the grammar for some tools takes."""

    def __init__(self, compiler: Compiler, tokenizer: Tokenizer, given: Tools, form: CallFormat, answer: Any = None) -> None:
        structure = calls_of(given, form, answer)
        assert structure is not None
        self.matcher, self.tokenizer, self.opening = compiler.compile(structure), tokenizer, opening_of(given, form)

    def __call__(self, text: str) -> bool:
        """Whether an answer may be this; it may be cut into tokens in any way."""
        assert text.startswith(self.opening)
        verdicts = {self._ends(self.tokenizer.encode(text.removeprefix(self.opening)))}
        pieces = [token for byte in text.removeprefix(self.opening).encode() for token in self._byte(byte)]
        verdicts.add(self._ends(pieces))
        (verdict,) = verdicts
        return verdict

    def _byte(self, byte: int) -> list[int]:
        return [next(t for t in range(self.tokenizer.vocab_size) if self.tokenizer.token_bytes(t) == bytes([byte]))]

    def _ends(self, tokens: Sequence[int]) -> bool:
        self.matcher.reset()
        return self.matcher.try_consume_tokens([*tokens]) == len(tokens) and self.matcher.is_accepting()


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_that_must_call_is_calls(compiler: Compiler, tokenizer: Tokenizer, form: CallFormat) -> None:
    call, other = CALLS[form], {"hermes": HERMES.replace('"weather"', '"now"').replace('{"city": "Bern", "days": 3}', "{}")}
    now = other.get(form, "<tool_call>\n<function=now>\n</function>\n</tool_call>")
    takes = Taking(compiler, tokenizer, tools("required"), form)
    assert takes(call) and takes(now) and takes(f"{call}\n{now}\n{call}")
    for wrong in (call + "\n", call + " Done.", call + call, call.replace("weather", "wether"), call.replace("3", "15")):
        assert not takes(wrong), wrong
    alone = Taking(compiler, tokenizer, tools("required", parallel=False), form)
    assert alone(now) and not alone(f"{call}\n{now}")
    only = Taking(compiler, tokenizer, tools(named("weather")), form)
    assert only(call) and not only(f"{call}\n{call}")


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_that_may_call_is_free_but_for_its_calls(
    compiler: Compiler, tokenizer: Tokenizer, form: CallFormat
) -> None:
    call = CALLS[form]
    takes = Taking(compiler, tokenizer, tools(), form)
    for text in ("", "No.", "Well: <tool_cal", "a < b é\n\n", call, f"Wait.\n{call}", f"{call}\n{call}", f"a{call}b{call}c"):
        assert takes(text), text
    for wrong in (
        "<tool_call>",
        "<tool_call>\nHm",
        call.replace("3", "15"),
        call + "<tool_call>",
        call.replace("weather", "x"),
    ):
        assert not takes(wrong), wrong
    one = Taking(compiler, tokenizer, tools(parallel=False), form)
    assert one("No.") and one(f"Wait.\n{call}") and not one(call + "b") and not one(f"{call}\n{call}")
    assert calls_of(tools(strict=False), form) is None
    if form == "xml":
        bare = call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        assert takes(bare) and takes(bare + "\n</tool_call>") and not takes(bare.replace("3", "15"))
        assert takes("<function") and not takes("<function=")


@pytest.mark.parametrize("form", FORMS)
def test_calls_or_json(compiler: Compiler, tokenizer: Tokenizer, form: CallFormat) -> None:
    answer = Structure.json({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}, "format")
    takes = Taking(compiler, tokenizer, tools(strict=False), form, answer)
    assert takes('{"ok": true}') and takes(CALLS[form]) and takes(f"{CALLS[form]}\n{CALLS[form]}")
    assert not takes("yes") and not takes(f'{{"ok": true}}{CALLS[form]}')
    must = Taking(compiler, tokenizer, tools("required"), form, answer)
    assert must(CALLS[form])
    spelt = '{"ok": true, "x": "<tool_call>{\\"name\\"<function=weather>\\n</function>"}'
    assert takes(spelt)
    for text, message in ((spelt, Message(content=spelt)), (CALLS[form], Message(calls=[("weather", ARGUMENTS)]))):
        reader = ReplyParser(tools=tools(), form=form, either=True)
        events = [event for character in text for event in reader.push(character)]
        assert Message.of([*events, *reader.finish()]) == message


def test_values_in_xml(compiler: Compiler, tokenizer: Tokenizer) -> None:
    takes = Taking(compiler, tokenizer, tools("required"), "xml")

    def value(key: str, text: str, city: str = "Bern") -> str:
        return XML.replace("Bern", city).replace(
            "3\n</parameter>\n", f"3\n</parameter>\n<parameter={key}>\n{text}\n</parameter>\n"
        )

    for key, text in (("unit", "C"), ("tags", '["wet", "dry"]'), ("tags", "[]"), ("note", "null"), ("note", "3")):
        assert takes(value(key, text)), (key, text)
    for key, text in (("unit", "K"), ("unit", '"C"'), ("tags", '["hot"]'), ("tags", "wet"), ("days", "4"), ("more", "x")):
        assert not takes(value(key, text)), (key, text)
    for city in ("", "a\nb\n", "say </parameter> and </function>", '"quoted"', "</tool_call>", "</parameter>\n</function"):
        text = value("unit", "C", city)
        assert takes(text), city
        reader = ReplyParser(tools=tools(), form="xml")
        ((name, arguments),) = Message.of([*reader.push(text), *reader.finish()]).calls
        assert (name, json.loads(arguments)) == ("weather", {"city": city, "days": 3, "unit": "C"})
    for city in ("</parameter></function>", "</parameter>\n <parameter=x", "</function></tool_call>\n<tool_call>"):
        assert not takes(value("unit", "C", city)), "the reader would see the end of the value"
    free = Taking(compiler, tokenizer, tools("required", open={"type": "object"}, none=None), "xml")
    for name in ("open", "none"):
        assert free(XML.replace("weather", name)) and free(f"<tool_call>\n<function={name}>\n</function>\n</tool_call>")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("choice", ["required", None])
def test_what_the_grammar_takes_is_read_as_the_schema_says(
    compiler: Compiler, tokenizer: Tokenizer, form: CallFormat, choice: object
) -> None:
    """Answers at random. Each is read whole and byte for byte."""
    dice, given = random.Random(0), tools(choice)
    structure, opening = calls_of(given, form), opening_of(given, form)
    assert structure is not None
    read = 0
    for _ in range(12):
        text = opening + _said(compiler, tokenizer, structure, dice, "" if choice else "<tool_call>")
        messages = []
        for size in (1, len(text)):
            reader = ReplyParser(tools=given, form=form)
            events = [event for at in range(0, len(text), size) for event in reader.push(text[at : at + size])]
            messages.append(Message.of([*events, *reader.finish()]))
        assert messages[0] == messages[1]
        assert messages[0].calls and (choice is None or not messages[0].content), text
        for name, arguments in messages[0].calls:
            read += 1
            _check(name, json.loads(arguments), text)
    assert read >= 12


def _said(compiler: Compiler, tokenizer: Tokenizer, structure: Structure, dice: random.Random, begin: str) -> str:
    """An answer of random tokens and of what may end a value, which ends as soon as it may."""
    matcher = compiler.compile(structure)
    tokens = tokenizer.encode(begin)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    words = np.empty((1, words_of(tokenizer.vocab_size)), np.int32)
    closing = [tokenizer.encode(text) for text in ('"', "}", '"}', "]", "\n</parameter>\n", "</parameter><parameter=")]
    while True:
        fill_next_token_bitmask(matcher, words, 0)
        allowed = np.unpackbits(words.view(np.uint8)[0], bitorder="little").nonzero()[0].tolist()
        if tokens and tokenizer.eos_ids & {*allowed}:
            return b"".join(map(tokenizer.token_bytes, tokens)).decode()
        likely = [end for end in closing if dice.random() < 0.2 and matcher.validate_tokens(end) == len(end)]
        tokens += dice.choice(likely or [[token] for token in allowed if token not in tokenizer.eos_ids])
        matcher.reset()
        assert matcher.try_consume_tokens(tokens) == len(tokens) < 4000


def _check(name: str, arguments: Any, text: str) -> None:
    if name == "now":
        assert isinstance(arguments, dict)
        return
    assert name == "weather" and {"city", "days"} <= set(arguments) <= set(WEATHER["properties"]), text  # type: ignore[call-overload]
    assert isinstance(arguments["city"], str) and arguments["days"] in range(1, 15), text
    assert arguments.get("unit", "C") in ("C", "F") and isinstance(arguments.get("note"), str | None), text
    assert set(arguments.get("tags", ())) <= {"wet", "dry"}, text


@pytest.mark.parametrize("form", FORMS)
def test_schemas_that_cannot_be_kept(compiler: Compiler, form: CallFormat) -> None:
    where = "tools[0].function.parameters"

    def refused(schema: Any, strict: bool = True, choice: object = "required") -> str:
        with pytest.raises(InvalidRequest) as caught:
            structure = calls_of(tools(choice, strict=strict, schema=schema), form)
            assert structure is not None
            compiler.compile(structure)
        assert caught.value.param == where and where in caught.value.message
        return caught.value.message

    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert "uniqueItems" in refused(unique) and "uniqueItems" in refused(unique, choice=None)
    lenient = calls_of(tools("required", strict=False, schema=unique), form)
    assert lenient is not None and compiler.compile(lenient)
    assert "foo" in refused({"type": "object", "properties": {"a": {"type": "foo"}}}, strict=False)
    assert "type object, got 'string'" in refused({"type": "string"}, strict=False)
    if form == "xml":
        for key in ("a>b", " a", "", "a\nb", "a" * 257):
            assert repr(key) in refused({"properties": {key: {"type": "string"}}})
    large: Any = {f"f{n}": {"properties": {f"p{m}": {"enum": ["x" * 1000]} for m in range(30)}} for n in range(6)}
    with pytest.raises(InvalidRequest, match=f"{MAX_CALLS} characters") as caught:
        calls_of(tools("required", **large), form)
    assert caught.value.param == "tool_choice"


def test_matchers_are_of_the_whole(compiler: Compiler) -> None:
    structure = calls_of(tools("required"), "hermes")
    assert structure is not None and isinstance(compiler.compile(structure), LLMatcher)
    assert structure == calls_of(tools("required"), "hermes"), "so that it is compiled once"
    assert structure != calls_of(tools("required", strict=False), "hermes")
