"""The k largest of a row, with ties in a fixed order."""

from paceline.ops.dispatch import by_device
from paceline.ops.topk import ref

_KERNEL = "paceline.ops.topk.kernel"

argmax = by_device(ref.argmax, _KERNEL)
peaks = by_device(ref.peaks, _KERNEL)
top_k = by_device(ref.top_k, _KERNEL)

__all__ = ["argmax", "peaks", "top_k"]
