"""What is asked of every server: the manifest of 60 chats, or prompts and answers of fixed lengths.

The same number is the same request in every cell, so that answers can be compared. Bodies hold nothing that only one
server knows; what a server needs besides is in its description (``paceline.bench.servers``).
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.bench.artefact import WORKLOAD, load_workload, prompts
from paceline.bench.figures import percentile
from paceline.errors import ConfigError
from paceline.weights.tokenizer import Tokenizer

FACTS = Path(__file__).with_name("workload_facts.json")
"""Hashes and lengths of the manifest, kept beside it."""
_WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its number, the suite it is of, where its body goes, and what the answer's counts must be: the prompt's
    tokens where they are known, and ``cap`` tokens, exactly so if ``exact``, else at most."""

    number: int
    label: str
    path: str
    body: Mapping[str, Any]
    cap: int
    prompt_tokens: int | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """Chats of the manifest, suites taking turns, in an order drawn with ``seed``; natural end, at most ``max_tokens``."""

    requests: int = 60
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    kind: Literal["manifest"] = "manifest"
    long_tokens: int = 0

    def __post_init__(self) -> None:
        most = len(load_workload())
        if not 1 <= self.requests <= most:
            raise ConfigError(f"requests must lie in [1, {most}] for the manifest, got {self.requests}", param="requests")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens")

    @property
    def name(self) -> str:
        return "manifest"

    def asks(self, concurrency: int, tokenizer: Tokenizer | None) -> list[Ask]:
        """The same for every concurrency."""
        chosen = in_turns(load_workload())[: self.requests]
        random.Random(self.seed).shuffle(chosen)
        return [
            Ask(number, entry["suite"], "/v1/chat/completions", self._body(entry["messages"], number), self.max_tokens)
            for number, entry in chosen
        ]

    def warming(self, count: int, tokenizer: Tokenizer | None) -> list[Ask]:
        """Chats that are not in the manifest."""
        chats = [[{"role": "user", "content": f"Warm-up {n}: count to ten, then write a haiku."}] for n in range(count)]
        return [
            Ask(n, "warm-up", "/v1/chat/completions", self._body(chat, n), self.max_tokens) for n, chat in enumerate(chats)
        ]

    def _body(self, messages: list[dict[str, Any]], number: int) -> dict[str, Any]:
        return {"messages": messages, "max_tokens": self.max_tokens, "temperature": self.temperature, "seed": number}


@dataclass(frozen=True, slots=True)
class Fixed:
    """Prompts of ``prompt_tokens`` token ids and answers of ``output_tokens`` whatever they say. Without ``requests``,
    3 C + 3 of them. Where ``long_tokens`` is set, a prompt of that many tokens comes beside them, ``long_seconds``
    after the last such was answered."""

    prompt_tokens: int = 107
    output_tokens: int = 96
    temperature: float = 0.0
    requests: int | None = None
    kind: Literal["fixed"] = "fixed"
    long_tokens: int = 0
    long_seconds: float = 2.0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", param=name)

    @property
    def name(self) -> str:
        beside = f", {self.long_tokens} beside" if self.long_tokens else ""
        return f"{self.prompt_tokens}+{self.output_tokens}{beside}"

    def asks(self, concurrency: int, tokenizer: Tokenizer | None) -> list[Ask]:
        count = 3 * concurrency + 3 if self.requests is None else self.requests
        return self._made(0, count, "fixed", tokenizer)

    def warming(self, count: int, tokenizer: Tokenizer | None) -> list[Ask]:
        """Prompts that no measured request begins like: each begins with its number."""
        return self._made(1_000_000, count, "warm-up", tokenizer)

    def long(self, number: int, tokenizer: Tokenizer | None) -> Ask:
        """A long prompt, all of them different, with one token for an answer."""
        assert tokenizer is not None, "prompts of a fixed length need a tokenizer"
        (prompt,) = prompts(tokenizer, 1, self.long_tokens, first=2_000_000 + number)
        return self._ask(number, "long", prompt, 1)

    def _made(self, first: int, count: int, label: str, tokenizer: Tokenizer | None) -> list[Ask]:
        assert tokenizer is not None, "prompts of a fixed length need a tokenizer"
        made = prompts(tokenizer, count, self.prompt_tokens, first=first)
        return [self._ask(number, label, prompt, self.output_tokens) for number, prompt in enumerate(made)]

    def _ask(self, number: int, label: str, prompt: list[int], tokens: int) -> Ask:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": self.temperature, "seed": number, "ignore_eos": True}
        return Ask(number, label, "/v1/completions", body, tokens, len(prompt), exact=True)


Workload = Manifest | Fixed


def in_turns(entries: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Entries with their numbers, one of each suite after another, so that the first few are of all suites."""
    by_suite: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, entry in enumerate(entries):
        by_suite.setdefault(entry["suite"], []).append((number, entry))
    return [suite[turn] for turn in range(len(entries)) for suite in by_suite.values() if turn < len(suite)]


def canonical(entries: Sequence[dict[str, Any]]) -> bytes:
    """The ``messages`` alone, one compact JSON object a line with sorted keys: the same for every way to write the file."""
    lines = (
        json.dumps({"messages": entry["messages"]}, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        for entry in entries
    )
    return "".join(line + "\n" for line in lines).encode()


def manifest_facts(tokenizer: Tokenizer, template: Any) -> dict[str, Any]:
    """What ``FACTS`` holds: hashes, and lengths of the prompts in bytes of content and in tokens of this tokenizer, through
    this template."""
    entries = load_workload()
    lengths: dict[str, list[tuple[int, int]]] = {}
    for entry in entries:
        size = sum(len(message["content"].encode()) for message in entry["messages"])
        tokens = len(tokenizer.encode(template.render(entry["messages"])))
        lengths.setdefault(entry["suite"], []).append((size, tokens))
    lengths["all"] = [pair for suite in lengths.values() for pair in suite]
    return {
        **manifest_hashes(),
        "lengths": {
            suite: {
                "requests": len(pairs),
                "content_bytes": _spread([size for size, _ in pairs]),
                "prompt_tokens": _spread([tokens for _, tokens in pairs]),
            }
            for suite, pairs in lengths.items()
        },
    }


def manifest_hashes() -> dict[str, Any]:
    return {
        "file": WORKLOAD.name,
        "requests": len(load_workload()),
        "sha256": hashlib.sha256(WORKLOAD.read_bytes()).hexdigest(),
        "messages_sha256": hashlib.sha256(canonical(load_workload())).hexdigest(),
    }


def _spread(values: Sequence[int]) -> dict[str, float | None]:
    numbers = sorted(map(float, values))
    middle = {"median": statistics.median(numbers), "p90": percentile(numbers, 90)}
    return {"min": numbers[0], **middle, "max": numbers[-1], "sum": sum(numbers)}
