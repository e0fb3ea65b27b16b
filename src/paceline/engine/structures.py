"""The tokens that structured answers allow in a round.

A row of a lane's span allows what its grammar allows behind the tokens before it, drafts included. A matcher is led along
the drafts while the grammar takes them, and back again; behind a draft that it does not take no row counts, because the pick
in that draft's place is another. The grammar begins where the answer does: behind the thought and behind what is forced.
Lanes are done side by side, in threads of llguidance's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from paceline.engine.plan import VerifySpan
from paceline.errors import LaneFailed
from paceline.structure import COMPILED, WORD, Compiler, summary, words_of
from paceline.types import Forcing, Request, Structure


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

    def check(self) -> None:
        if self.matcher.is_error():
            raise LaneFailed(f"the answer's structure could not be followed: {summary(self.matcher.get_error())}")


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows behind one another, from ``row`` on: a matcher, led to where the first is, and the drafts between them."""

    row: int
    matcher: LLMatcher
    drafts: Sequence[int] = ()


class Structures:
    """A matcher is kept while its request is in every round; a lane that was parked gets a new one, which reads its answer
    again."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self._pending: dict[Structure, Future[LLMatcher]] = {}
        self._compiled: dict[Structure, Future[LLMatcher]] = {}  # the last ones, in order
        self._walks: dict[str, _Walk] = {}

    @functools.cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

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
        """Masks of the rows of a forward whose answers have begun. A fault may be a limit that earlier answers have reached:
        whoever tries again has matchers that have seen nothing."""
        try:
            return self._permits(paths)
        except LaneFailed:
            failed = {path.request.structure for path in paths}
            self._compiled = {one: future for one, future in self._compiled.items() if one not in failed}
            self.compiler.forget()
            raise

    def _permits(self, paths: Sequence[Path]) -> Permits:
        walks: dict[str, _Walk] = {}
        for path in paths:
            kept = self._walks.pop(path.request.id, None)
            walks[path.request.id] = kept or _Walk(self._compile(path.request))
        spans = [span for path in paths for span in self._spans(path, walks[path.request.id])]
        permits = self._filled(spans)
        first = {path.first: path.request.forcing for path in paths if not path.generated}
        for row, words in zip(permits.rows, permits.words, strict=True):
            if forcing := first.get(row):
                _allow_thought(forcing, words)
        for walk in walks.values():
            walk.check()
        self._walks |= walks  # not those of a round that has failed: it would do so for ever
        return permits

    def _filled(self, spans: Sequence[_Span]) -> Permits:
        rows = [row for span in spans for row in range(span.row, span.row + len(span.drafts) + 1)]
        words = np.empty((len(rows), words_of(self.compiler.vocab_size)), np.int32)
        places = np.cumsum([0, *(len(span.drafts) + 1 for span in spans)]).tolist()
        placed = [*zip(spans, places[:-1], strict=True)]
        single = [(span.matcher, place) for span, place in placed if not span.drafts]
        along = [(span.matcher, place, [*span.drafts]) for span, place in placed if span.drafts]
        if single:
            fill_next_token_bitmask_par(self._executor, single, words)
        if along:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, along, words)
        return Permits(rows, words)

    def _compile(self, request: Request) -> LLMatcher:
        """At once, unless so many other structures came since that it has to be done again."""
        assert request.structure is not None, "a path without a structure"
        compiled = self._compiled.get(request.structure) or self.compiler.submit(request.structure)
        try:
            return compiled.result().deep_copy()
        except Exception:  # such as for want of memory: the next one tries again
            self._compiled.pop(request.structure, None)
            raise

    def _spans(self, path: Path, walk: _Walk) -> list[_Span]:
        """The path's rows that have masks."""
        request, known, tokens = path.request, len(path.generated), [*path.generated, *path.drafts]
        begin = _begin(request, tokens)
        spans = []
        if known == 0 and begin != 0 and _begin(request, ()) == 0:
            spans.append(_Span(path.first, self._compile(request)))  # a draft begins a thought, the answer was to begin
        if begin is None or begin > len(tokens):
            return spans
        self._catch_up(request, walk, tokens[begin:known])
        first = max(begin, known)
        end = next((at for at in range(first, len(tokens)) if tokens[at] in request.stop_ids), len(tokens))
        taken = walk.matcher.validate_tokens(tokens[first:end]) if end > first else 0
        return [*spans, _Span(path.first + first - known, walk.matcher, tokens[first : first + taken])]

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


def _begin(request: Request, tokens: Sequence[int]) -> int | None:
    """How many tokens are before the grammar's first; None where a thought goes on behind these tokens."""
    if request.forcing is None:
        return 0
    end = request.forcing.end_of_thought(tokens)
    return None if end is None else end + len(request.forcing.opening)


def _allow_thought(forcing: Forcing, mask: np.ndarray) -> None:
    """The first token may be the one that begins a thought."""
    if forcing.begin is not None:
        mask[forcing.begin // WORD] |= np.int32(np.uint32(1 << forcing.begin % WORD).view(np.int32))
