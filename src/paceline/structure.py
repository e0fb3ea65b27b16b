"""Answers of a given structure: grammars over tokens, and the tokens that one allows.

llguidance knows, for the tokens of an answer so far, which token may come next; one that ends the answer may exactly where
the grammar can end. Which these are is a function of the grammar and of those tokens, so a matcher that is led along drafts
and back again changes nothing. Whitespace between the parts of JSON is bounded, since models are known to write it for ever.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from llguidance.numpy import fill_next_token_bitmask
from torch import Tensor

from paceline.errors import InvalidRequest
from paceline.intersections import MAX_INTERSECTED, of_lark, of_schema
from paceline.transfer import to_device
from paceline.types import Structure

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITESPACE = r" |\n {0,20}"
"""Between parts of JSON, at most once."""
WORD = 32
"""Bits in a word of a mask."""
_JSON: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
"""Also against a schema that brings options of its own."""
_STACK = 128 * 2**20
"""Bytes, of which only those used become memory. The deepest grammars found within ``MAX_STRUCTURE`` need 8 to 16 MiB."""
COMPILED = 32
"""Structures that are kept."""
_SHOWN = 400
"""Characters of an error, which may quote all of a structure."""
_MAX_STATES = 50_000
"""Of the automaton that reads the words of a grammar, about 2 kB each. It grows while it is used."""

_MAX_ITEMS = 10_000
"""In a row of the parser, which has four for each property that may be missing: enough for ``MAX_STRUCTURE``. What a mask
may cost has a bound of its own."""


class Codec(Protocol):
    """What is needed of a tokenizer."""

    vocab_size: int

    @property
    def special_ids(self) -> Collection[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


class Compiler:
    """Compiles structures for the tokens of a model with ``vocab_size`` logits, in a thread of its own. Thread safe; the
    first use takes about a second for a vocabulary of 250,000 unless ``prepare`` came before."""

    def __init__(self, codec: Codec, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._codec, self.vocab_size, self._eos_ids = codec, vocab_size, sorted(eos_ids)
        self._limits = LLParserLimits(max_items_in_row=_MAX_ITEMS, max_lexer_states=_MAX_STATES, verbose_errors=False)
        self._compiled = functools.lru_cache(COMPILED)(self._compile)

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(_Vocabulary(self._codec, self.vocab_size, self._eos_ids), self.vocab_size, self._eos_ids)

    @functools.cached_property
    def _worker(self) -> ThreadPoolExecutor:
        """llguidance goes into the depth of a grammar by recursion, which no limit of its own bounds."""
        before = threading.stack_size(_STACK)
        try:
            worker = ThreadPoolExecutor(1, thread_name_prefix="structures")
            worker.submit(int).result()  # starts the thread
        finally:
            threading.stack_size(before)
        return worker

    def prepare(self) -> None:
        """Begin with what the first use would take long for."""
        self._worker.submit(lambda: self._tokenizer)

    def submit(self, structure: Structure) -> Future[LLMatcher]:
        """The result of ``compile``, later."""
        return self._worker.submit(lambda: self._compiled(structure).deep_copy())

    def compile(self, structure: Structure) -> LLMatcher:
        """A matcher at the beginning of the answer. ``InvalidRequest`` says what is wrong with a structure that is none, is
        too large, or that no text has."""
        return self.submit(structure).result()

    def forget(self) -> None:
        """Compile every structure afresh. Copies of a matcher share what it has learnt, and reach its limits together."""
        self._compiled.cache_clear()

    def _compile(self, structure: Structure) -> LLMatcher:
        if not self._eos_ids:
            raise InvalidRequest(f"{structure.param}: the model has no end token", param=structure.param)
        for part in structure.parts:  # so that the part at fault is named, and one that no text has is found
            self._compile(part)
        grammar = _grammar(structure)
        together = _intersected(structure, grammar)
        if together > MAX_INTERSECTED:
            why = f"one text may have to fit {together} patterns and formats at a time; {MAX_INTERSECTED} can be met"
            raise _refused(structure, why)
        matcher = LLMatcher(self._tokenizer, grammar, limits=self._limits, log_level=0)
        if not matcher.is_error():
            # what is wrong may show up only here
            fill_next_token_bitmask(matcher, np.empty((1, words_of(self.vocab_size)), np.int32))
        if matcher.is_error():
            raise _refused(structure, matcher.get_error())
        return matcher


class _Vocabulary(TokenizerWrapper):
    """Tokens as llguidance asks for them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, codec: Codec, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._codec = codec
        self.eos_token_id = eos_ids[0]
        self.tokens = [codec.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(codec.special_ids)
        self._of_bytes = {text[0]: token for token, text in enumerate(self.tokens) if len(text) == 1}

    def __call__(self, text: str) -> list[int]:
        """The tokens that a model would write for a text that a grammar leaves no choice about. Where the tokenizer sees
        control tokens in it, or changes it, they are its bytes."""
        try:
            tokens = self._codec.encode(text)
        except InvalidRequest:
            tokens = []
        exact = b"".join(self.tokens[token] for token in tokens) == text.encode()
        if exact and not any(token in self._codec.special_ids for token in tokens):
            return tokens
        return [self._of_bytes[byte] for byte in text.encode()]


def _grammar(structure: Structure) -> str:
    """In llguidance's own form."""
    try:
        if structure.kind == "json":
            options: JsonCompileOptions = {**_JSON, "lenient": structure.lenient}
            return LLMatcher.grammar_from_json_schema(structure.text, overrides=options)
        if structure.kind == "calls":
            parts = [json.loads(_grammar(part))["grammars"][0] for part in structure.parts]
            named = [part | {"name": f"part{index}"} for index, part in enumerate(parts)]
            return json.dumps({"grammars": [{"lark_grammar": structure.text}, *named]})
        return grammar_from(structure.kind, structure.text)
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(structure, str(error)) from None


def _intersected(structure: Structure, grammar: str) -> int:
    """How many expressions meet, of a client's own text; ``grammar`` is llguidance's form of it."""
    if structure.kind == "json":
        return of_schema(json.loads(grammar)["grammars"][0]["json_schema"])
    return of_lark(grammar) if structure.kind == "grammar" else 1


def _refused(structure: Structure, why: str) -> InvalidRequest:
    what = {"json": "JSON schema", "regex": "regular expression", "grammar": "grammar", "calls": "calls"}[structure.kind]
    return InvalidRequest(f"{structure.param}: the {what} cannot be used: {summary(why)}", param=structure.param)


def summary(error: str) -> str:
    """What llguidance says, without its own state."""
    text = error.split("<state>")[0].replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtension"):
        return "no text fits it"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def words_of(vocab_size: int) -> int:
    """Words in a mask."""
    return -(-vocab_size // WORD)


def permitted(logits: Tensor, rows: Sequence[int], words: np.ndarray) -> Tensor:
    """``logits`` [R, V] where each of the given rows has only the tokens of its mask in ``words`` [rows, words] left; a copy
    if there are any. Nothing here waits for the device."""
    if not rows:
        return logits
    device = logits.device
    octets = to_device(words.view(np.uint8), device)
    bits = (octets.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    forbidden = torch.zeros(logits.shape, dtype=torch.bool, device=device)
    forbidden[to_device(np.array(rows, dtype=np.int64), device)] = bits.flatten(1)[:, : logits.shape[1]] == 0
    return logits.masked_fill(forbidden, -torch.inf)
