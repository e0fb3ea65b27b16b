"""What a forward sees of the state: committed values to read, places to leave what it adds.

Handed out by the pool, plain data here, so that models and state do not know each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from paceline.ops.kv import PagedTensor


@dataclass(slots=True)
class AttentionView:
    """One attention layer: pages, the page table [S, P] of the batch's spans, and the slot [N] of each row."""

    k: PagedTensor
    v: PagedTensor
    page_table: Tensor
    slots: Tensor


@dataclass(slots=True)
class GdnView:
    """One Gated-DeltaNet layer: committed ``state`` [L, Hv, Dk, Dv] and convolution ``history`` [L, w-1, C] of all lanes,
    read only; a batch's ``lanes`` says which are those of its spans.

    A verify forward leaves its replay log (k, d, g per row), a prefill forward the new state; both leave the raw inputs.
    """

    state: Tensor
    history: Tensor
    raw: Tensor | None = None
    replay: tuple[Tensor, Tensor, Tensor] | None = None
    new_state: Tensor | None = None

    def log(self, raw: Tensor, k: Tensor, d: Tensor, g: Tensor) -> None:
        self.raw, self.replay = raw, (k, d, g)

    def advance(self, raw: Tensor, state: Tensor) -> None:
        self.raw, self.new_state = raw, state


@dataclass(slots=True)
class TargetViews:
    """One view per layer, in order."""

    layers: list[AttentionView | GdnView] = field(default_factory=list)


@dataclass(slots=True)
class ContextView:
    """One drafter layer: where a forward leaves the context K/V rows [N, Hkv, D] of its tokens; commit stores the kept."""

    k: Tensor | None = None
    v: Tensor | None = None

    def stage(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v
