"""Text to token ids and back to bytes, from GGUF metadata or from a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from paceline.errors import InvalidRequest, LoadError
from paceline.weights.files import read_json

_CONTROL, _USER_DEFINED = 3, 4
"""Values of ``tokenizer.ggml.token_type`` that are split out of the text before the vocabulary is applied."""

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"qwen2": _QWEN2_SPLIT, "qwen35": _QWEN35_SPLIT}

_END_TEXTS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<EOT>",
    "</s>",
)
"""Control tokens that end an answer whatever the file's id keys say: chat models stop on more than the one id they name."""

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


_LONG_TEXT = 4096
"""Characters from which encoding takes long enough to matter to other threads."""


class Tokenizer:
    """Byte-level BPE with added tokens. Thread safe: nothing changes after construction.

    ``vocab_size`` is one more than the largest token id, ``eos_ids`` the ids that end an answer, ``special_ids`` the control
    tokens (not shown to users as text), ``max_token_bytes`` the longest token in bytes.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        add_bos: bool = False,
    ) -> None:
        self._backend = backend
        self._bos_id = bos_id
        self._add_bos = add_bos and bos_id is not None
        added = backend.get_added_tokens_decoder()
        vocabulary = {index: token for token, index in backend.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = max(vocabulary, default=-1) + 1
        self._tokens = [vocabulary.get(i) for i in range(self.vocab_size)]
        self._bytes = [
            b"" if token is None else token.encode() if i in added else _plain_bytes(token)
            for i, token in enumerate(self._tokens)
        ]
        self.max_token_bytes = max(map(len, self._bytes), default=0)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        by_text = (backend.token_to_id(text) for text in _END_TEXTS)
        self.eos_ids = frozenset(eos_ids) | {i for i in by_text if i is not None and i in self.special_ids}

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of ``text``, with the special tokens in it parsed. ``add_special`` puts the file's BOS token in front
        where its metadata asks for one (a chat template writes its own)."""
        try:
            if len(text) < _LONG_TEXT:
                ids = self._backend.encode(text, add_special_tokens=False).ids
            else:  # releases the interpreter lock, so that a server's other streams go on
                ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:
            raise InvalidRequest(f"the text is not valid Unicode: {_unicode_fault(text)}") from None
        except BaseException as error:
            # A panic inside the bindings is no Exception. The regular expression gives up on millions of spaces in a row.
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidRequest(f"the text of {len(text):,} characters cannot be tokenised: {error}") from None
        return [self._bos_id, *ids] if add_special and self._add_bos and self._bos_id is not None else ids

    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes of a run of tokens, special ones included as their text. May end inside a UTF-8 sequence."""
        return b"".join(self.token_bytes(i) for i in ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that the vocabulary does not have (padding rows of a model's head)."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, ``None`` for an id that it does not have."""
        return self._tokens[token_id] if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it."""
        return self._backend.token_to_id(token)

    @classmethod
    def from_gguf(cls, path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from ``tokenizer.ggml.*``. Text is normalised to NFC as the Hugging Face original does."""
        keys: dict[str, Any] = {
            key: metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre", "tokens", "merges", "token_type")
        }
        missing = [f"tokenizer.ggml.{key}" for key, value in keys.items() if value is None]
        if missing:
            raise LoadError(f"{path}: no tokenizer: {', '.join(missing)} missing")
        if keys["model"] != "gpt2" or keys["pre"] not in _SPLITS:
            raise LoadError(
                f"{path}: tokenizer {keys['model']!r} with pre-tokenizer {keys['pre']!r} is not supported; "
                f"supported: 'gpt2' with {' or '.join(map(repr, _SPLITS))}"
            )
        backend = _byte_level_bpe(path, keys["tokens"], keys["merges"], keys["token_type"], _SPLITS[keys["pre"]])
        ids = (metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS)
        return cls(
            backend,
            eos_ids=[int(i) for i in ids if i is not None],
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        )

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Build from ``tokenizer.json``; end tokens also from ``config.json``, ``generation_config.json`` and
        ``tokenizer_config.json``."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise LoadError(f"{file}: no such file")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the bindings raise plain Exception
            raise LoadError(f"{file}: not a tokenizer: {error}") from error
        settings = read_json(path / "tokenizer_config.json")
        config = read_json(path / "config.json")
        ends: list[Any] = [token_text(settings.get("eos_token"))]
        for holder in (config, config.get("text_config") or {}, read_json(path / "generation_config.json")):
            value = holder.get("eos_token_id")
            ends += value if isinstance(value, list) else [value]
        ids = [backend.token_to_id(end) if isinstance(end, str) else end for end in ends]
        bos = token_text(settings.get("bos_token"))
        return cls(
            backend,
            eos_ids=[i for i in ids if i is not None],
            bos_id=backend.token_to_id(bos) if bos else None,
            add_bos=bool(settings.get("add_bos_token", False)),
        )


def _byte_level_bpe(
    path: Path, tokens: list[str], merges: list[str], token_types: list[int], split: str
) -> tokenizers.Tokenizer:
    if len(token_types) != len(tokens):
        raise LoadError(f"{path}: tokenizer.ggml.token_type has {len(token_types)} entries for {len(tokens)} tokens")
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise LoadError(f"{path}: tokenizer.ggml.merges holds {merge!r}, which is not a pair")
        pairs.append((left, right))
    try:
        model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    except Exception as error:  # the bindings raise plain Exception
        raise LoadError(f"{path}: the tokenizer's merges do not fit its tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [token for token, t in zip(tokens, token_types, strict=True) if t == kind]
        backend.add_tokens([AddedToken(token, normalized=False, special=special) for token in found])
    return backend


def _unicode_fault(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"lone surrogate at index {error.start}"
    return f"a {type(text).__name__} instead of a string"


def token_text(token: Any) -> str | None:
    """A token as ``tokenizer_config.json`` writes it: a string, or an object with the string as ``content``."""
    return token.get("content") if isinstance(token, dict) else token


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable alphabet: printable Latin-1 bytes stand for themselves, the others for characters from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _plain_bytes(token: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode()
