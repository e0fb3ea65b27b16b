from paceline.ops.dispatch import by_device
from paceline.ops.rope import ref
from paceline.ops.rope.ref import RopeTable

apply_rope = by_device(ref.apply_rope, "paceline.ops.rope.kernel")
norm_and_rope = by_device(ref.norm_and_rope, "paceline.ops.rope.kernel")

__all__ = ["RopeTable", "apply_rope", "norm_and_rope"]
