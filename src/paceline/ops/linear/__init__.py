from paceline.ops.linear.ref import TILE_ROWS, PackedWeight, linear, pack

__all__ = ["TILE_ROWS", "PackedWeight", "linear", "pack"]
