from paceline.ops.attention.ref import KEY_BLOCK, QUERY_TILE, attention

__all__ = ["KEY_BLOCK", "QUERY_TILE", "attention"]
