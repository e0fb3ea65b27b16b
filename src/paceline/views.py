"""What a forward sees of the state: committed values to read, places for what it adds.

Handed out by the pool, plain data here, so that models and state do not know each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from paceline.ops.gdn import ReplayLog
from paceline.ops.kv import PagedTensor


@dataclass(slots=True)
class AttentionView:
    """One attention layer: pages, and the table [L, P] of the pages of every lane."""

    k: PagedTensor
    v: PagedTensor
    page_table: Tensor


class GdnRoom(NamedTuple):
    """Room for what a prefill forward leaves of S spans, R >= S: states [R, Hv, Dk, Dv] and histories [R, w-1, C]."""

    state: Tensor
    history: Tensor


@dataclass(slots=True)
class GdnView:
    """One Gated-DeltaNet layer: committed ``state`` [L, Hv, Dk, Dv] and convolution ``history`` [L, w-1, C] of all lanes,
    read only; a batch's ``lanes`` says which are those of its spans.

    A verify forward fills ``log``; a prefill forward, which has none, leaves the new state and history of its spans, in
    ``room`` where there is some.
    """

    state: Tensor
    history: Tensor
    log: ReplayLog | None = None
    room: GdnRoom | None = None
    new_state: Tensor | None = None
    new_history: Tensor | None = None

    def advance(self, state: Tensor, history: Tensor) -> None:
        """state [S, Hv, Dk, Dv] and history [S, w-1, C] behind the rows of the forward."""
        self.new_state, self.new_history = state, history


@dataclass(slots=True)
class TargetViews:
    """One view per layer, in order."""

    layers: list[AttentionView | GdnView] = field(default_factory=list)


@dataclass(slots=True)
class ContextView:
    """One drafter layer: where a forward leaves the context K/V rows [N, Hkv, D] of its tokens, for the pool to store."""

    k: Tensor | None = None
    v: Tensor | None = None

    def stage(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v
