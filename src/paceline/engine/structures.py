"""The tokens that structured answers allow in a round.

A row of a lane's span allows what its grammar allows behind the tokens before it, drafts included. A matcher is led along
the drafts while the grammar takes them, and back again; behind a draft that it does not take no row counts, because the pick
in that draft's place is another. The grammar begins where the answer does: behind the thought and behind what is forced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from paceline.engine.plan import VerifySpan
from paceline.errors import LaneFailed
from paceline.structure import COMPILED, WORD, Compiler, summary, words_of
from paceline.types import Request, Structure


@dataclass(frozen=True, slots=True)
class Path:
    """A request's rows: row ``first`` draws the token behind ``generated``, each next one that behind one of ``drafts``."""

    request: Request
    first: int
    generated: Sequence[int] = ()
    drafts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Permits:
    """Row ``rows[i]`` allows the tokens of mask ``words[i]``."""

    rows: list[int]
    words: np.ndarray


@dataclass(slots=True)
class _Walk:
    """A matcher, and the tokens of the answer that it has seen."""

    matcher: LLMatcher
    seen: list[int] = field(default_factory=list)

    def step(self, token: int) -> bool:
        """Whether the grammar takes it."""
        taken = self.matcher.try_consume_tokens([token]) == 1
        if taken:
            self.seen.append(token)
        return taken

    def back(self, steps: int) -> None:
        if steps:
            self.matcher.rollback(steps)
            del self.seen[-steps:]

    def check(self) -> None:
        if self.matcher.is_error():
            raise LaneFailed(f"the answer's structure could not be followed: {summary(self.matcher.get_error())}")


class Structures:
    """A matcher is kept while its request is in every round; a lane that was parked gets a new one, which reads its answer
    again."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self._pending: dict[Structure, Future[LLMatcher]] = {}
        self._compiled: dict[Structure, Future[LLMatcher]] = {}  # the last ones, in order
        self._walks: dict[str, _Walk] = {}

    def ready(self, request: Request) -> bool:
        """Whether a round may have the request; asking begins to compile its structure. A fault is left to the round."""
        structure = request.structure
        if structure is None:
            return True
        for one in [one for one, future in self._pending.items() if future.done()]:
            self._compiled[one] = self._pending.pop(one)
        for one in [*self._compiled][:-COMPILED]:
            del self._compiled[one]
        if structure in self._compiled:
            return True
        if structure not in self._pending:
            self._pending[structure] = self.compiler.submit(structure)
        return False

    def begin(self, requests: Iterable[Request]) -> None:
        """A round of these requests; whoever is not among them is forgotten."""
        self._walks = {request.id: self._walks[request.id] for request in requests if request.id in self._walks}

    def permits(self, paths: Sequence[Path]) -> Permits:
        """Masks of the rows of a forward whose answers have begun."""
        rows: list[int] = []
        words = np.empty((sum(len(path.drafts) + 1 for path in paths), words_of(self.compiler.vocab_size)), np.int32)
        for path in paths:
            walk = self._walks.pop(path.request.id, None) or _Walk(self._compile(path.request))
            self._fill(path, walk, rows, words)
            self._walks[path.request.id] = walk  # not of one that has failed: it would do so for ever
        return Permits(rows, words[: len(rows)])

    def _compile(self, request: Request) -> LLMatcher:
        """At once, unless so many other structures came since that it has to be done again."""
        assert request.structure is not None, "a path without a structure"
        compiled = self._compiled.get(request.structure) or self.compiler.submit(request.structure)
        return compiled.result().deep_copy()

    def _fill(self, path: Path, walk: _Walk, rows: list[int], words: np.ndarray) -> None:
        """Add the path's rows to ``rows`` and their masks to ``words``."""
        tokens, steps = list(path.generated), 0
        begin = _begin(path.request, tokens)
        self._catch_up(path.request, walk, [] if begin is None else tokens[begin:])
        for row in range(len(path.drafts) + 1):
            if row > 0:
                tokens.append(path.drafts[row - 1])
                if begin is None:
                    begin = _begin(path.request, tokens)
                elif len(tokens) > begin:
                    if not walk.step(tokens[-1]):
                        break
                    steps += 1
            if begin is not None and len(tokens) >= begin:
                fill_next_token_bitmask(walk.matcher, words, len(rows))
                walk.check()
                _allow_thought(path.request, tokens, words[len(rows)])
                rows.append(path.first + row)
        walk.back(steps)
        walk.check()

    def _catch_up(self, request: Request, walk: _Walk, answer: list[int]) -> None:
        if walk.seen != answer[: len(walk.seen)]:
            walk.matcher, walk.seen = self._compile(request), []
        for token in answer[len(walk.seen) :]:
            if not walk.step(token):
                walk.check()
                raise LaneFailed(f"token {token} does not fit the answer's structure")


def paths(spans: Sequence[VerifySpan], drafts: Sequence[Sequence[int]]) -> list[Path]:
    """Of the spans with a structure whose tokens are drawn. ``drafts`` are those of the drafting spans, in order."""
    found, first, drafting = [], 0, iter(drafts)
    for span in spans:
        own = next(drafting, ())[: span.drafts] if span.drafting else ()
        if span.request.structure is not None and span.known is None:
            found.append(Path(span.request, first, span.generated, own))
        first += span.length
    return found


def _begin(request: Request, tokens: list[int]) -> int | None:
    """How many tokens are before the grammar's first; None where a thought goes on behind these tokens."""
    if request.forcing is None:
        return 0
    end = request.forcing.end_of_thought(tokens)
    return None if end is None else end + len(request.forcing.opening)


def _allow_thought(request: Request, tokens: list[int], mask: np.ndarray) -> None:
    """The first token may be the one that begins a thought."""
    begin = request.forcing.begin if request.forcing and not tokens else None
    if begin is not None:
        mask[begin // WORD] |= np.int32(np.uint32(1 << begin % WORD).view(np.int32))
