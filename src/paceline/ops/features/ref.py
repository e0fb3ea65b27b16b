"""The features of a lane's latest rows, until the drafter makes context of them.

A ring [L, R, F] has room for R positions of each lane; position p is in place p % R. No span has more than R rows.
"""

from __future__ import annotations

from torch import Tensor

from paceline.batch import PackedBatch


def keep_features(ring: Tensor, features: Tensor, batch: PackedBatch) -> None:
    """Put features [N, F] of the batch's rows where their lanes' are."""
    ring[batch.lanes[batch.row_span], batch.positions % ring.shape[1]] = features


def kept_features(ring: Tensor, batch: PackedBatch) -> Tensor:
    """[N, F]: what was put there for the batch's rows, or for later ones since."""
    found: Tensor = ring[batch.lanes[batch.row_span], batch.positions % ring.shape[1]]
    return found
