"""Verify on Hopper GPUs (compute capability 9.0): ``verify.cu``, compiled at run time, and its launches.

A span's bits depend on its own rows and state only. How many columns of a state a thread has follows from the number of
spans, so that as few multiprocessors as possible have more to do than others; the order of every sum is the same for all.
What a row does to a state is what replay does, to the bit; the sums are taken in another order than the portable kernel's:
``ops.gdn.verify_arithmetic`` tells.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.ops import nvrtc
from paceline.ops.dispatch import uses_special_kernels

VERSION = 1
"""Of the arithmetic: raise it when the bits of verify's results change."""
HEAD_DIM = 128
_GROUPS = 4
"""Of columns in a warp."""


class Form(NamedTuple):
    """Columns of each thread, warps of a CTA, and how many CTAs a multiprocessor shall have room for, which limits the
    registers of a thread; ``reload``: k is read twice from shared memory rather than held."""

    columns: int
    warps: int
    ctas: int
    reload: bool

    @property
    def parts(self) -> int:
        """CTAs for each head of a span."""
        return HEAD_DIM // (_GROUPS * self.columns * self.warps)


FORMS = (Form(4, 4, 3, False), Form(4, 4, 5, True), Form(8, 4, 3, True))
_SPANS = (3, 6)
"""Up to how many spans each but the last is for."""
_SOURCE = Path(__file__).with_name("verify.cu")


def runs_on(device: torch.device) -> bool:
    return uses_special_kernels() and nvrtc.available(device)


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    state: Tensor,
    out: Tensor,
    delta: Tensor,
    head_map: Tensor,
    batch: PackedBatch,
) -> None:
    """``gdn_verify`` for heads of 128 by 128 into ``out`` and ``delta``, with rows of q and k that begin at multiples of 16
    bytes; what else there is is contiguous, v and state at such an address too."""
    if not batch.num_spans:
        return
    form = form_for(batch.num_spans)
    tensors = (q, k, v, beta, g, state, out, delta, head_map, batch.lanes, batch.starts, batch.span_lengths)
    arguments: list[nvrtc.Argument] = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    arguments += [ctypes.c_int64(x.stride(0)) for x in (q, k)]
    with torch.cuda.device(q.device):
        kernel = _kernels(q.device.index)[form]
        nvrtc.launch(kernel, (form.parts, state.shape[1], batch.num_spans), 32 * form.warps, arguments)


def form_for(spans: int) -> Form:
    return FORMS[sum(spans > limit for limit in _SPANS)]


def source(form: Form) -> str:
    names = ("COLUMNS", "WARPS", "CTAS", "RELOAD")
    constants = "".join(f"#define {name} {int(value)}\n" for name, value in zip(names, form, strict=True))
    return constants + _SOURCE.read_text(encoding="utf-8")


@functools.cache
def _kernels(device: int) -> dict[Form, ctypes.c_void_p]:
    """All forms at once, loaded on the current device: another number of spans shall find its form there."""
    return {form: nvrtc.load(source(form), "verify") for form in FORMS}
