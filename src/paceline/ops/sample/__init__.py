"""Draws from a softmax with noise keyed by the token id."""

from paceline.ops.dispatch import by_device
from paceline.ops.sample import ref

_KERNEL = "paceline.ops.sample.kernel"

draw = by_device(ref.draw, _KERNEL)
draw_candidates = by_device(ref.draw_candidates, _KERNEL)
gumbel = by_device(ref.gumbel, _KERNEL)
gumbel_of_vocabulary = by_device(ref.gumbel_of_vocabulary, _KERNEL)
last_kept = by_device(ref.last_kept, _KERNEL)

__all__ = ["draw", "draw_candidates", "gumbel", "gumbel_of_vocabulary", "last_kept"]
