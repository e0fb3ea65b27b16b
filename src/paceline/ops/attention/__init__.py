from paceline.ops.attention import ref
from paceline.ops.attention.pieces import pieces_of
from paceline.ops.attention.ref import KEY_BLOCK, QUERY_TILE
from paceline.ops.dispatch import by_device

attention = by_device(ref.attention, "paceline.ops.attention.kernel")
attention_inputs = by_device(ref.attention_inputs, "paceline.ops.attention.kernel")

__all__ = ["KEY_BLOCK", "QUERY_TILE", "attention", "attention_inputs", "pieces_of"]
