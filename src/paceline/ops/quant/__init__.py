"""Weights in the block formats of GGUF files."""

from paceline.ops.quant.ref import BLOCKS, KeepsStored, QuantTensor, dequantize, dequantize_rows, pack

__all__ = ["BLOCKS", "KeepsStored", "QuantTensor", "dequantize", "dequantize_rows", "pack"]
