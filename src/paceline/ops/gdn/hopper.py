"""Generated rows on Hopper GPUs (compute capability 9.0): ``mixer.cu``, compiled at run time, and its launches.

A span's bits depend on its own rows and state only. How many columns of a state a thread has follows from the number of
spans, so that the states of all of them lie in registers at once; the order of every sum is the same for all. What a row
does to a state is what replay does, to the bit; the sums are taken in another order than the portable kernels':
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
from paceline.ops.gdn.ref import ReplayLog
from paceline.ops.linear.rows import COLUMN_STEP, Rows, empty_rows

VERSION = 2
"""Of the arithmetic: raise it when the bits of the results change."""
HEAD_DIM, TAPS = 128, 4


class Form(NamedTuple):
    """Columns of each thread, warps of a CTA, which has a whole head, and how many CTAs a multiprocessor shall have room
    for, which limits the registers of a thread; ``reload``: k is read twice from shared memory rather than held."""

    columns: int
    warps: int
    ctas: int
    reload: bool


FORMS = (Form(4, 8, 1, False), Form(4, 8, 2, False), Form(8, 4, 3, True))
_SPANS = (3, 6)
"""Up to how many spans each but the last is for, of which one is without rows in captured forwards. Where there is a
multiprocessor for every CTA, two must not share one because it was the first to be free."""
_SOURCE = Path(__file__).with_name("mixer.cu")
_POINTERS = (
    *("raw", "z", "b", "a", "norms", "history", "taps", "decay", "dt_bias", "norm", "state", "values", "factors"),
    *("log_raw", "log_k", "log_d", "log_g", "head_map", "lanes", "starts", "lengths"),
)
_STRIDES = ("raw_stride", "z_stride", "b_stride", "a_stride")


class _Arguments(ctypes.Structure):
    """As in ``mixer.cu``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        ("key_heads", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("bound", ctypes.c_float),
    ]


def fits(z: Tensor, state: Tensor, taps: Tensor, operand: torch.dtype | None) -> bool:
    """Whether ``mixer`` is for such numbers: heads of 128 by 128, whose gates lie by fours, and rows of float16 that need no
    padding."""
    heads, dk, dv = state.shape[1:]
    sizes = dk == dv == HEAD_DIM and taps.shape[1] == TAPS and heads % 4 == 0 and heads * dv % COLUMN_STEP == 0
    return sizes and operand == torch.float16 and nvrtc.available(z.device)


def mixer(
    raw: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    history: Tensor,
    taps: Tensor,
    key_heads: int,
    state: Tensor,
    head_map: Tensor,
    norm: Tensor,
    eps: float,
    batch: PackedBatch,
    log: ReplayLog,
    norms: Tensor,
    bound: float,
    overlaps: bool,
) -> Rows:
    """``gdn_mixer``. Rows of raw, z, b and a begin at multiples of 16 bytes; what else there is is contiguous and begins at
    one too, ``norms`` [R] in whole fours. With ``overlaps`` nothing in front writes histories, states or weights."""
    assert len(norms) % 4 == 0, "norms are read by fours"
    rows, heads = raw.shape[0], state.shape[1]
    result = empty_rows(rows, heads * HEAD_DIM, torch.float16, raw.device)
    facts = (head_map, batch.lanes, batch.starts, batch.span_lengths)
    tensors = (raw, z, b, a, norms, history, taps, decay, dt_bias, norm, state, result.values, result.factors, *log, *facts)
    strides = (x.stride(0) for x in (raw, z, b, a))
    if batch.num_spans:
        form = form_for(batch.num_spans)
        arguments = _Arguments(*(tensor.data_ptr() for tensor in tensors), *strides, key_heads, eps, bound)
        with torch.cuda.device(raw.device):
            kernel = _kernels(raw.device.index)[form]
            nvrtc.launch(kernel, (heads, batch.num_spans, 1), 32 * form.warps, [arguments], overlaps=overlaps)
    return result


def form_for(spans: int) -> Form:
    return FORMS[sum(spans > limit for limit in _SPANS)]


def source(form: Form) -> str:
    names = ("COLUMNS", "WARPS", "CTAS", "RELOAD")
    return nvrtc.with_constants(dict(zip(names, map(int, form), strict=True)), _SOURCE)


@functools.cache
def _kernels(device: int) -> dict[Form, ctypes.c_void_p]:
    """All forms at once, loaded on the current device: another number of spans shall find its form there."""
    return {form: nvrtc.load(source(form), "mixer") for form in FORMS}
