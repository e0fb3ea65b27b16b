"""Tokens that an answer must have at certain places: its opening, and the end of a thought that has used up its budget.

Which token is forced at a row is a function of the request and of the tokens generated before that row, drafts included.
Most of it the host knows; whether a draft in front of the row ends the thought only the device does, so the host lists what
is forced in either case and the device looks it up. There is nothing to roll back. The rule is ``Forcing``'s docstring.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.transfer import to_device
from paceline.types import Forcing, Request, Row

NONE = -1
"""Nothing is forced; no token has this id."""
_NO_END = -2
"""In the place of a token: nothing is forced, but a token that would end the request ends the thought instead."""


def forced(picks: Tensor, rows: Sequence[Row], tokens: Tensor | None = None) -> Tensor:
    """``picks`` [R] with what is forced at the given rows; a copy if anything is. ``tokens`` [>= R] are the input tokens of
    the forward, which say what the drafts are. Nothing here waits for the device."""
    # looked for once, not for each row of a span
    ends = {row.request.id: _forcing(row).end_of_thought(row.generated) for row in rows}
    cases = [(row, *_cases(row, ends[row.request.id])) for row in rows]
    cases = [case for case in cases if any(token != NONE for token in case[2])]
    if not cases:
        return picks
    drafts = max(len(ids) for _, _, ids in cases) - 1
    packed = np.full((len(cases), 2 * drafts + 3), NONE, dtype=np.int64)
    for line, (row, end, ids) in zip(packed, cases, strict=True):
        known = len(ids) - 1
        line[0], line[1] = row.index, end
        line[2 : 2 + known], line[2 + drafts] = ids[:-1], ids[-1]
        line[3 + drafts : 3 + drafts + known] = range(row.drafts[0], row.drafts[0] + known)
    index, end, ids, sources = to_device(packed, picks.device).split((1, 1, drafts + 1, drafts), dim=1)
    chosen = ids[:, -1] if drafts == 0 else _by_draft(ids, sources, end, tokens)
    free = picks[index[:, 0]]
    if _NO_END in packed:
        over = (free[:, None] == _stops([row for row, _, _ in cases], picks.device)).any(dim=1)
        chosen = torch.where(chosen == _NO_END, torch.where(over, end[:, 0], NONE), chosen)
    out = picks.clone()
    out[index[:, 0]] = torch.where(chosen == NONE, free, chosen)
    return out


def foretold(drafts: Tensor, lanes: Sequence[tuple[Request, Sequence[int]]]) -> Tensor:
    """``drafts`` [D, K] with what will be forced in their place as far as the host can tell, where any other draft would be
    in vain. ``lanes`` are D requests with the tokens that they have generated."""
    places = [
        (lane, at, token)
        for lane, (request, generated) in enumerate(lanes)
        if request.forcing is not None
        for at, token in enumerate(_ahead(Row(lane, request, generated), drafts.shape[1]))
        if token != NONE
    ]
    if not places:
        return drafts
    lane, at, token = to_device(np.array(places, dtype=np.int64).T.copy(), drafts.device)
    return drafts.index_put((lane, at), token)


def _ahead(row: Row, count: int) -> list[int]:
    """What is forced at the next ``count`` tokens, if none of the free ones ends the thought."""
    forcing = _forcing(row)
    end, begin = forcing.end_of_thought(row.generated), forcing.thought(row.generated)
    if end is not None:
        tokens, first = forcing.opening, len(row.generated) - end
    elif forcing.budget is not None and begin is not None:
        tokens, first = forcing.closing + forcing.opening, len(row.generated) - begin - forcing.budget
    else:
        return []
    return [_at(tokens, first + at) for at in range(count)]


def _stops(rows: Sequence[Row], device: torch.device) -> Tensor:
    """[R, S]: the tokens that end each row's request."""
    packed = np.full((len(rows), max(1, *(len(row.request.stop_ids) for row in rows))), NONE, dtype=np.int64)
    for line, row in zip(packed, rows, strict=True):
        line[: len(row.request.stop_ids)] = sorted(row.request.stop_ids)
    return to_device(packed, device)


def _by_draft(ids: Tensor, sources: Tensor, end: Tensor, tokens: Tensor | None) -> Tensor:
    """[R]: entry j of a row's ``ids`` where draft j, at ``sources`` j, is the first that ends the thought; else the last."""
    assert tokens is not None, "drafts without the tokens of the forward"
    ends = (sources != NONE) & (tokens[sources.clamp(min=0)] == end)
    places = torch.arange(ends.shape[1], device=ids.device)
    first = torch.where(ends, places, ends.shape[1]).amin(dim=1, keepdim=True)
    return ids.gather(1, first)[:, 0]


def _cases(row: Row, end_of_thought: int | None) -> tuple[int, list[int]]:
    """What is forced at a row: the token that ends the thought; what is forced if draft 0, 1, … is the first such token,
    and, last, if none is."""
    forcing, drafts = _forcing(row), row.drafts[1] - row.drafts[0]
    before = len(row.generated) + drafts
    if end_of_thought is not None:
        return NONE, [_at(forcing.opening, before - end_of_thought)]
    begin = forcing.thought(row.generated)
    over = NONE if forcing.budget is None or begin is None else before - begin - forcing.budget
    after_draft = [_at(forcing.opening, drafts - at - 1) for at in range(drafts)]
    closing = _at(forcing.closing, over)
    must_answer = forcing.opening or row.request.structure
    still_open = _NO_END if closing == NONE and must_answer else closing
    return forcing.closing[-1], [*after_draft, still_open]


def _forcing(row: Row) -> Forcing:
    assert row.request.forcing is not None, "a row where nothing is forced"
    return row.request.forcing


def _at(tokens: Sequence[int], index: int) -> int:
    return tokens[index] if 0 <= index < len(tokens) else NONE
