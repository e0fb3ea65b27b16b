"""The k largest of a row, with ties in a fixed order."""

from paceline.ops.topk.ref import argmax, top_k

__all__ = ["argmax", "top_k"]
