"""The features of a lane's latest rows, until the drafter makes context of them."""

from paceline.ops.dispatch import by_device
from paceline.ops.features import ref

_KERNEL = "paceline.ops.features.kernel"

keep_features = by_device(ref.keep_features, _KERNEL)
kept_features = by_device(ref.kept_features, _KERNEL)

__all__ = ["keep_features", "kept_features"]
