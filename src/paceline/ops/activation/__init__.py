from paceline.ops.activation import ref
from paceline.ops.activation.ref import sigmoid, silu, softcap, softplus
from paceline.ops.dispatch import by_device

swiglu = by_device(ref.swiglu, "paceline.ops.activation.kernel")

__all__ = ["sigmoid", "silu", "softcap", "softplus", "swiglu"]
