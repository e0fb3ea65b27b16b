"""Weights in the block formats of GGUF files."""

from paceline.ops.dispatch import by_device
from paceline.ops.quant import ref
from paceline.ops.quant.ref import BLOCKS, KeepsStored, QuantTensor, dequantize, pack

dequantize_rows = by_device(ref.dequantize_rows, "paceline.ops.quant.kernel")

__all__ = ["BLOCKS", "KeepsStored", "QuantTensor", "dequantize", "dequantize_rows", "pack"]
