from paceline.ops.dispatch import by_device
from paceline.ops.selector import ref

_KERNEL = "paceline.ops.selector.kernel"

candidate_scores = by_device(ref.candidate_scores, _KERNEL)
selector_walk = by_device(ref.selector_walk, _KERNEL)

__all__ = ["candidate_scores", "selector_walk"]
