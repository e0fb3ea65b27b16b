"""Acceptance: how many drafts of each lane hold, and what the lane emits."""

from paceline.ops.accept import ref
from paceline.ops.accept.ref import PADDING, Verdict
from paceline.ops.dispatch import by_device

accept = by_device(ref.accept, "paceline.ops.accept.kernel")

__all__ = ["PADDING", "Verdict", "accept"]
