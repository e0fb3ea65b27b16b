from paceline.ops.dispatch import by_device
from paceline.ops.norm import ref

rms_norm = by_device(ref.rms_norm, "paceline.ops.norm.kernel")
add_rms_norm = by_device(ref.add_rms_norm, "paceline.ops.norm.kernel")
add_rms_norm_twice = by_device(ref.add_rms_norm_twice, "paceline.ops.norm.kernel")
l2_norm = by_device(ref.l2_norm, "paceline.ops.norm.kernel")
gated_rms_norm = by_device(ref.gated_rms_norm, "paceline.ops.norm.kernel")
gated_output = by_device(ref.gated_output, "paceline.ops.norm.kernel")

__all__ = ["add_rms_norm", "add_rms_norm_twice", "gated_output", "gated_rms_norm", "l2_norm", "rms_norm"]
