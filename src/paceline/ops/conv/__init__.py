from paceline.ops.conv.ref import causal_conv, conv_history, dynamic_conv

__all__ = ["causal_conv", "conv_history", "dynamic_conv"]
