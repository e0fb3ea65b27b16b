"""Grammars over the demo pair's tokens."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from paceline.errors import InvalidRequest
from paceline.structure import Compiler, permitted, words_of
from paceline.types import MAX_STRUCTURE, SamplingParams, Structure
from paceline.weights.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", 7]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def allowed(matcher: LLMatcher, vocab_size: int) -> list[int]:
    words = np.empty((1, words_of(vocab_size)), np.int32)
    fill_next_token_bitmask(matcher, words)
    bits: list[int] = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].nonzero()[0].tolist()
    return bits


def fits(compiler: Compiler, tokenizer: Tokenizer, structure: Structure, text: str) -> bool:
    """Whether the text, and then the end, may be written."""
    matcher, tokens = compiler.compile(structure), tokenizer.encode(text)
    whole = matcher.try_consume_tokens(tokens) == len(tokens)
    return whole and set(tokenizer.eos_ids) <= set(allowed(matcher, tokenizer.vocab_size))


@pytest.mark.parametrize(
    "structure, good, bad",
    [
        (
            Structure.json(PERSON),
            [
                '{"name": "é \\" x", "tags": []}',
                '{"name":"","age":-3,"tags":["a",7]}',
                '{\n  "name": "",\n  "tags": [\n    7\n  ]\n}',
            ],
            [
                '{"tags": [], "name": ""}',
                '{"name": "", "tags": []',
                '{"name": "", "tags": [8]}',
                '{"name": "", "tags": [], "x": 1}',
                "{}",
            ],
        ),
        (Structure.json(json.dumps(PERSON)), ['{"name": "", "tags": []}'], ["[]"]),
        (Structure.json_object(), ["{}", '{"a": {"b": [1, null, true, 2.5e3]}}'], ["[]", "7", "{} "]),
        (Structure.regex(r"\d{3}-[a-c]*"), ["123-", "123-abba"], ["12-", "123-d", "x123-"]),
        (Structure.choice(["yes", "no", 'a "b"\n']), ["yes", "no", 'a "b"\n'], ["ye", "yes ", "maybe"]),
        (Structure.grammar('root ::= "a" [0-9]+ ("," root)?'), ["a1", "a12,a3"], ["a", "a1,"]),
        (Structure.grammar('start: "<" NAME ">"\nNAME: /[a-z]+/'), ["<ab>"], ["<>", "ab"]),
    ],
    ids=lambda value: value.kind if isinstance(value, Structure) else "",
)
def test_what_fits(compiler: Compiler, tokenizer: Tokenizer, structure: Structure, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not fits(compiler, tokenizer, structure, text)] == []
    assert [text for text in bad if fits(compiler, tokenizer, structure, text)] == []


def test_many_properties_may_be_missing(compiler: Compiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1000)}}
    assert fits(compiler, tokenizer, Structure.json(schema), '{"p7":"x","p999":"y","other":1}')


def test_white_space_in_json_is_bounded(compiler: Compiler, tokenizer: Tokenizer) -> None:
    lenient = {**PERSON, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": r"\s+"}}
    for structure in (Structure.json(PERSON), Structure.json_object(), Structure.json(lenient)):
        assert fits(compiler, tokenizer, structure, '{"name":' + "\n" + " " * 20 + '"", "tags": []}')
        for space in ("  ", "\n\n", "\n" + " " * 21, "\t", " \n"):
            assert not fits(compiler, tokenizer, structure, '{"name":' + space + '"", "tags": []}'), repr(space)


@pytest.mark.parametrize(
    "structure, reason",
    [
        (Structure.json({"type": "foo"}, "field"), "foo"),
        (Structure.json("{", "field"), "EOF"),
        (Structure.json("true", "field"), "object"),
        (Structure.json({"$ref": "file:///etc/passwd"}, "field"), "does not fetch"),
        (Structure.json({"$ref": "http://localhost/schema.json"}, "field"), "does not fetch"),
        (Structure.json({"not": {}}, "field"), "not"),
        (Structure.json({"enum": []}, "field"), "anyOf is empty"),
        (Structure.json({"type": "string", "pattern": "("}, "field"), "unclosed"),
        (Structure.json({"$ref": "#"}, "field"), "no text fits it"),
        (Structure.regex("(", "field"), "unclosed"),
        (Structure.regex("(?=a)b", "field"), "look-around"),
        (Structure.regex(r"[^\s\S]", "field"), "no text fits it"),
        (Structure.regex("\ud800", "field"), "surrogates"),
        (Structure.grammar("root ::= (", "field"), "Expected"),
        (Structure.grammar("root ::= root", "field"), "no text fits it"),
        (Structure.grammar("start: other", "field"), "unknown name"),
        (Structure.grammar("root ::= " + "(" * 20_000, "field"), "recursion"),
        (Structure.json('{"items":' * 3_000 + "{}" + "}" * 3_000), "recursion"),
    ],
    ids=lambda value: value.text[:20] if isinstance(value, Structure) else "",
)
def test_what_cannot_be_compiled_is_refused(compiler: Compiler, structure: Structure, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiler.compile(structure)
    assert caught.value.param == structure.param
    assert structure.param in caught.value.message


def test_structures_are_checked_before_they_are_compiled() -> None:
    with pytest.raises(InvalidRequest, match=f"{MAX_STRUCTURE} characters, it has {MAX_STRUCTURE + 1}"):
        Structure.regex("a" * (MAX_STRUCTURE + 1))
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for schema in (deep, {"enum": [float("nan")]}, {"enum": [object()]}):
        with pytest.raises(InvalidRequest, match="structure is not a JSON schema"):
            Structure.json(schema)
    with pytest.raises(InvalidRequest, match="choice must hold non-empty texts"):
        Structure.choice(["a", ""], "choice")
    with pytest.raises(InvalidRequest, match="must be a Structure"):
        SamplingParams(structure={"type": "object"})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="ignore_eos cannot go with structure"):
        SamplingParams(structure=Structure.regex("a"), ignore_eos=True)


def test_a_grammar_that_explodes_stops_by_itself(compiler: Compiler, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="limit|too many|Too many"):
        compiler.compile(Structure.grammar('root ::= root root root | "a" | [a-z ]+'))


def test_the_deepest_grammars_overflow_no_stack(compiler: Compiler) -> None:
    """Such an overflow would end the process."""
    lines = [f"r{n:x}: r{n + 1:x}" for n in range(2600)]
    compiler.compile(Structure.grammar("\n".join(["start: r0", *lines, 'ra28: "a"'])))
    schemas: dict[str, Any] = {f"{n:x}": {"allOf": [{"$ref": f"#/$defs/{n + 1:x}"}]} for n in range(700)}
    compiler.compile(Structure.json({"$ref": "#/$defs/0", "$defs": {**schemas, "2bc": {"type": "null"}}}))


def test_the_first_structure_waits_for_nothing_that_is_prepared(tokenizer: Tokenizer) -> None:
    seen: list[str] = []

    class Watched:
        vocab_size, special_ids, encode = tokenizer.vocab_size, tokenizer.special_ids, tokenizer.encode

        def token_bytes(self, token_id: int) -> bytes:
            seen.append(threading.current_thread().name)
            return tokenizer.token_bytes(token_id)

    compiler = Compiler(Watched(), tokenizer.vocab_size, tokenizer.eos_ids)
    compiler.prepare()
    compiler._worker.submit(int).result()
    assert len(seen) == tokenizer.vocab_size and {*seen} == {"structures_0"}
    compiler.compile(Structure.json_object())
    assert len(seen) == tokenizer.vocab_size


def test_a_vocabulary_without_an_end_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no end token"):
        Compiler(tokenizer, tokenizer.vocab_size, ()).compile(Structure.json_object())


def test_control_tokens_are_text_only_where_they_are_spelt(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """Where the grammar leaves no choice too."""
    constant = "a<|im_end|>e\u0301"
    matcher, tokens = compiler.compile(Structure.choice([constant])), []
    while not matcher.is_stopped():
        tokens += allowed(matcher, tokenizer.vocab_size)[-1:]
        assert matcher.consume_token(tokens[-1])
    assert tokenizer.decode(tokens) == constant.encode()
    assert not set(tokens) & tokenizer.special_ids
    inside = compiler.compile(Structure.json_object())
    assert inside.consume_tokens(tokenizer.encode('{"a'))
    assert not set(allowed(inside, tokenizer.vocab_size)) & tokenizer.special_ids


def test_masks_depend_on_the_tokens_alone(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """Walks ahead and back leave no trace, and a matcher that has seen nothing else has the same masks."""
    dice, vocab = random.Random(0), tokenizer.vocab_size
    for structure in (
        Structure.json(PERSON),
        Structure.regex(r"([a-z]+ ){2,9}\d+"),
        Structure.grammar('root ::= "(" root* ")"'),
    ):
        matcher: LLMatcher = compiler.compile(structure)
        tokens: list[int] = []
        while len(tokens) < 25 and not matcher.is_stopped():
            steps = 0
            for _ in range(dice.randrange(6)):
                choices = [*allowed(matcher, vocab), dice.randrange(vocab)]
                if matcher.is_stopped() or matcher.try_consume_tokens([dice.choice(choices)]) == 0:
                    break
                steps += 1
            assert matcher.rollback(steps)
            fresh = compiler.compile(structure)
            assert fresh.try_consume_tokens(tokens) == len(tokens)
            assert allowed(matcher, vocab) == allowed(fresh, vocab)
            tokens.append(dice.choice(allowed(matcher, vocab)))
            assert matcher.consume_token(tokens[-1])


def test_rows_keep_the_logits_of_their_tokens() -> None:
    logits = torch.randn(4, 70)
    words = np.zeros((2, words_of(70)), np.int32)
    words[0, 0], words[1, 2] = np.int32(-(2**31)), np.int32(0b100000)
    out = permitted(logits, [3, 1], words)
    assert out[3].isfinite().nonzero()[:, 0].tolist() == [31] and out[3, 31] == logits[3, 31]
    assert out[1].isfinite().nonzero()[:, 0].tolist() == [69] and out[1, 69] == logits[1, 69]
    assert torch.equal(out[[0, 2]], logits[[0, 2]]) and logits.isfinite().all()
    assert permitted(logits, [], words[:0]) is logits
