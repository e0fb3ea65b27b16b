"""Logprobs beside the text they belong to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import InvalidRequest
from paceline.text import Detokenizer
from paceline.types import SamplingParams, TokenLogprob

TokenBytes = Callable[[int], bytes]
MAX_PROMPT_LOGPROBS = 2**20
"""Logprobs of the tokens of all prompts in one reply, the likeliest beside each included: some 100 MB of JSON."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token as replies show it: its bytes, its logprob (None for the first of a prompt, which nothing predicts), the
    likeliest tokens with theirs, and the character of the choice's text at which it begins."""

    token: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]
    offset: int


class AlignedLogprobs:
    """The logprobs of one choice, which wait until the text of their tokens is shown. ``shift`` characters are before it."""

    def __init__(self, token_bytes: TokenBytes, shift: int = 0) -> None:
        self._token_bytes, self._shift = token_bytes, shift
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()

    def add(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """An entry per token; those behind the last token do not count."""
        assert len(logprobs) >= len(tokens), "tokens without logprobs"
        self._waiting.extend(zip(tokens, logprobs, strict=False))

    def take(self, offsets: Sequence[int]) -> tuple[ScoredToken, ...]:
        """The next tokens, which begin at these characters."""
        entries = (self._waiting.popleft() for _ in offsets)
        return tuple(
            scored(self._token_bytes, token, entry, self._shift + offset)
            for (token, entry), offset in zip(entries, offsets, strict=True)
        )


def check_prompt_logprobs(prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> None:
    """Refuse a request whose echoed prompts would need more than ``MAX_PROMPT_LOGPROBS``."""
    if sampling.prompt_logprobs is None:
        return
    wanted = sum(map(len, prompts)) * sampling.n * (1 + sampling.prompt_logprobs)
    if wanted > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"echo with logprobs would give {wanted} logprobs of prompt tokens (tokens times n times 1 + logprobs); "
            f"a reply may have {MAX_PROMPT_LOGPROBS}",
            param="logprobs",
        )


def scored(token_bytes: TokenBytes, token: int, entry: TokenLogprob | None, offset: int) -> ScoredToken:
    top = tuple((token_bytes(other), logprob) for other, logprob in entry.top) if entry else ()
    return ScoredToken(token_bytes(token), entry.logprob if entry else None, top, offset)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as a choice repeats it: every token's text, control tokens included, and where each token begins."""

    prompt: tuple[int, ...]
    text: str
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, token_bytes: TokenBytes, prompt: tuple[int, ...]) -> Echo:
        detokenizer, length = Detokenizer(token_bytes), 0
        pieces, offsets = [], []
        for token in prompt:
            offsets.append(length)
            pieces.append(detokenizer.push((token,)))
            length += len(pieces[-1])
        return cls(prompt, "".join((*pieces, detokenizer.flush())), tuple(offsets))

    def scored(self, token_bytes: TokenBytes, logprobs: Sequence[TokenLogprob]) -> tuple[ScoredToken, ...]:
        """``logprobs`` are of every token but the first."""
        tokens = zip(self.prompt, (None, *logprobs), self.offsets, strict=True)
        return tuple(scored(token_bytes, token, entry, offset) for token, entry, offset in tokens)
