from paceline.ops.conv import ref
from paceline.ops.conv.ref import Convolved
from paceline.ops.dispatch import by_device

causal_conv = by_device(ref.causal_conv, "paceline.ops.conv.kernel")
conv_history = by_device(ref.conv_history, "paceline.ops.conv.kernel")
advance_history = by_device(ref.advance_history, "paceline.ops.conv.kernel")
dynamic_conv = by_device(ref.dynamic_conv, "paceline.ops.conv.kernel")

__all__ = ["Convolved", "advance_history", "causal_conv", "conv_history", "dynamic_conv"]
