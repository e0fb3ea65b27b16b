from paceline.ops.rope.ref import RopeTable, apply_rope

__all__ = ["RopeTable", "apply_rope"]
