"""What is done to a row's logits before a token is drawn: penalties, bias, bans.

A function of the request and of the tokens that it has generated up to that row, drafts in front of it included; so it is
computed anew for each row, and there is nothing to roll back. Order: repetition, frequency and presence penalties; bias;
then bans, by which a logit becomes -inf. With c(t) the number of times that token t has been generated before:

    l <- l / r if l > 0 else l * r    where t is in the prompt or c(t) > 0        (repetition r, Keskar et al., 2019)
    l <- l - frequency * c(t) - presence * [c(t) > 0]
    l <- l + bias(t)

Bans that would leave a row nothing do not count: where an answer's structure allows few tokens, it comes first. Every step
but this question is elementwise, so a row's bits do not depend on the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.transfer import to_device
from paceline.types import Adjustments, Row


def adjusted(logits: Tensor, rows: Sequence[Row], tokens: Tensor | None = None) -> Tensor:
    """``logits`` [R, V] with the given rows adjusted; a copy if there are any. ``tokens`` [>= R] are the input tokens of the
    forward, which says what the drafts are. Nothing here waits for the device."""
    if not rows:
        return logits
    out = logits.clone()
    index = to_device(np.array([row.index for row in rows]), logits.device)
    values = out[index]
    if any(row.request.adjust is not None and row.request.adjust.penalises for row in rows):
        values = _penalised(values, rows, tokens)
    values = _banned(_biased(values, rows), rows)
    out[index] = values
    return out


def _penalised(values: Tensor, rows: Sequence[Row], tokens: Tensor | None) -> Tensor:
    count = _counts(values, rows, tokens)
    prompt = _scattered(values, [(at, t, 1.0) for at, row in enumerate(rows) for t in _adjust(row).prompt_ids]) > 0
    repetition, frequency, presence = (
        _column(values, [getattr(_adjust(row), name) for row in rows])
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    used = count > 0
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(used | prompt, repeated, values)
    return values - frequency * count - presence * used


def _counts(values: Tensor, rows: Sequence[Row], tokens: Tensor | None) -> Tensor:
    """[R, V]: how often each token has been generated before each row."""
    known = [(at, t, float(c)) for at, row in enumerate(rows) for t, c in Counter(row.generated).items()]
    count = _scattered(values, known)
    places = np.array(
        [(at, source) for at, row in enumerate(rows) for source in range(*row.drafts)], dtype=np.int64
    ).reshape(-1, 2)
    if len(places):
        assert tokens is not None, "drafts without the tokens of the forward"
        at, source = to_device(places.T.copy(), values.device)
        count.index_put_((at, tokens[source]), torch.ones((), device=values.device), accumulate=True)
    return count


def _biased(values: Tensor, rows: Sequence[Row]) -> Tensor:
    bias = [(at, t, b) for at, row in enumerate(rows) for t, b in _adjust(row).bias]
    return values + _scattered(values, bias) if bias else values


def _banned(values: Tensor, rows: Sequence[Row]) -> Tensor:
    if not any(_adjust(row).allowed or _bans(row) for row in rows):
        return values
    left = values.clone()
    for at, row in enumerate(rows):
        adjust = _adjust(row)
        if adjust.allowed:
            kept = torch.full_like(values[at], -torch.inf)
            index = to_device(np.array(adjust.allowed), values.device)
            left[at] = kept.index_copy_(0, index, values[at][index])
    bans = [(at, t, 1.0) for at, row in enumerate(rows) for t in _bans(row)]
    left = left.masked_fill(_scattered(values, bans) > 0, -torch.inf) if bans else left
    return torch.where(left.amax(1, keepdim=True) == -torch.inf, values, left)


def _bans(row: Row) -> tuple[int, ...]:
    """The tokens that this row must not draw; before ``min_tokens`` those that would end the request are among them."""
    adjust = _adjust(row)
    generated = len(row.generated) + row.drafts[1] - row.drafts[0]
    return (*adjust.banned, *(row.request.stop_ids if generated < adjust.min_tokens else ()))


def _adjust(row: Row) -> Adjustments:
    assert row.request.adjust is not None, "a row that needs no adjusting"
    return row.request.adjust


def _scattered(values: Tensor, entries: Sequence[tuple[int, int, float]]) -> Tensor:
    """Zeros like ``values`` with the given entries (row, token, number), of which no place is given twice."""
    out = torch.zeros_like(values)
    if entries:
        rows, ids, numbers = zip(*entries, strict=True)
        at = to_device(np.array([rows, ids], dtype=np.int64), values.device)
        out[at[0], at[1]] = to_device(np.array(numbers, dtype=np.float32), values.device)
    return out


def _column(values: Tensor, numbers: Sequence[float]) -> Tensor:
    return to_device(np.array(numbers, dtype=np.float32)[:, None], values.device)
