from paceline.ops.activation.ref import sigmoid, silu, softcap, softplus, swiglu

__all__ = ["sigmoid", "silu", "softcap", "softplus", "swiglu"]
