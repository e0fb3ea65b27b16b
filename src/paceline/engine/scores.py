"""The logprobs of one round: collected on the device behind its forwards, read with its other results in the one copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from paceline.logprobs import read_scores, score
from paceline.transfer import to_device
from paceline.types import Request, TokenLogprob

Logprobs = Mapping[str, Sequence[TokenLogprob]]
"""By request id, in the order of the rows."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows that were scored together: whose each is, and how many of the likeliest tokens it reports."""

    owners: tuple[str, ...]
    tops: tuple[int, ...]
    of_prompt: bool
    scores: Tensor


class Scores:
    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def add(self, logits: Tensor, tokens: Tensor, requests: Sequence[Request]) -> None:
        """Rows that drew ``tokens``; row r is of ``requests[r]``. Those that ask for no logprobs cost nothing."""
        asked = [(row, request.id, request.logprobs) for row, request in enumerate(requests) if request.logprobs is not None]
        if asked:
            rows, owners, tops = zip(*asked, strict=True)
            at = to_device(np.array(rows), logits.device)
            self._add(owners, tops, logits[at], tokens[at], of_prompt=False)

    def add_prompt(self, logits: Tensor, tokens: Tensor, request: Request) -> None:
        """Rows of a prompt, and the prompt's tokens that follow them."""
        assert request.prompt_logprobs is not None, "nobody asked"
        count = len(tokens)
        self._add((request.id,) * count, (request.prompt_logprobs,) * count, logits, tokens, of_prompt=True)

    def _add(
        self, owners: tuple[str, ...], tops: tuple[int, ...], logits: Tensor, tokens: Tensor, *, of_prompt: bool
    ) -> None:
        scores = score(logits, tokens, min(max(tops), logits.shape[1]))
        self._blocks.append(_Block(owners, tops, of_prompt, scores))

    def tensors(self) -> list[Tensor]:
        """What is to be copied to the host, each flat."""
        return [block.scores.flatten() for block in self._blocks]

    def read(self, numbers: Sequence[int]) -> tuple[Logprobs, Logprobs]:
        """Of what was copied: logprobs of tokens drawn, and of the prompts' tokens."""
        drawn: dict[str, list[TokenLogprob]] = defaultdict(list)
        prompts: dict[str, list[TokenLogprob]] = defaultdict(list)
        first = 0
        for block in self._blocks:
            size = block.scores.numel()
            rows = np.array(numbers[first : first + size], np.int64).reshape(block.scores.shape)
            first += size
            for owner, entry in zip(block.owners, read_scores(rows, block.tops), strict=True):
                (prompts if block.of_prompt else drawn)[owner].append(entry)
        return drawn, prompts
