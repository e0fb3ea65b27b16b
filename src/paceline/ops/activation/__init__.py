from paceline.ops.activation import ref
from paceline.ops.activation.ref import sigmoid, silu, softcap, softplus
from paceline.ops.dispatch import by_device

swiglu = by_device(ref.swiglu, "paceline.ops.activation.kernel")
gated_heads = by_device(ref.gated_heads, "paceline.ops.activation.kernel")

__all__ = ["gated_heads", "sigmoid", "silu", "softcap", "softplus", "swiglu"]
