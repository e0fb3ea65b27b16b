"""What a round takes on a GPU beside weights and state. Upper bounds by which the state is sized; pure arithmetic.

Everything is counted as if it lived at the same time: captured forwards have memory of their own, so that little is shared.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from paceline.config import CHUNK_SIZE
from paceline.state.shapes import StateShape

_IDLE_PREFILL = 4
"""The scheduler reads this many times ``prefill_tokens`` in a round in which no lane decodes."""
_PIECE = 256
"""Attention of decode rows leaves one partial result per so many keys."""
_F16, _F32 = 2, 4


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes. ``logits`` of every row that draws a token, partial sums and a copy included; ``attention`` the partial results
    over the longest context; ``rows`` the activations of a forward; ``states`` what a prompt chunk leaves for the commit;
    ``dequantised`` the largest product's weight in 16 bits, as prompt rows multiply it."""

    logits: int
    attention: int
    rows: int
    states: int
    dequantised: int

    @property
    def total(self) -> int:
        return sum(astuple(self))


def round_scratch(shape: StateShape, prefill_tokens: int) -> Scratch:
    """Of rounds in which every lane verifies its widest span and as many prompt rows are read as ever."""
    target = shape.target
    decode_rows = shape.lanes * max(1, shape.draft_rows)
    prompt_rows = _IDLE_PREFILL * prefill_tokens
    pieces = -(-shape.max_ctx // _PIECE)
    state = target.gdn_value_heads * target.gdn_key_dim * target.gdn_value_dim
    history = (target.conv_kernel - 1) * target.conv_channels
    return Scratch(
        logits=3 * _F32 * (decode_rows + shape.lanes) * target.vocab_size,
        attention=_F32 * decode_rows * target.num_heads * pieces * (target.head_dim + 2),
        rows=_F32 * (decode_rows + prompt_rows) * _numbers_per_row(shape),
        states=2 * _F32 * shape.lanes * target.layer_types.count("gdn") * (state + history),
        dequantised=_F16 * _largest_product(shape),
    )


def _numbers_per_row(shape: StateShape) -> int:
    """Float32 numbers of one row: the residual stream and its norm, before and after; the widest sublayer's inputs, outputs
    and what is between; the chunk matrices of the delta rule; features, taken and joined, and the drafter's context."""
    target, drafter = shape.target, shape.drafter
    inner = target.gdn_value_heads * target.gdn_value_dim
    heads = (2 * target.num_heads + 2 * target.num_kv_heads) * target.head_dim
    widest = max(target.intermediate_size, target.conv_channels + inner, heads)
    numbers = 4 * target.hidden_size + 4 * widest + 2 * target.gdn_value_heads * CHUNK_SIZE
    if drafter is not None:
        context = 2 * drafter.num_layers * drafter.num_kv_heads * drafter.head_dim
        numbers += 2 * len(drafter.target_layer_ids) * target.hidden_size + context
    return numbers


def _largest_product(shape: StateShape) -> int:
    """Elements of the largest weight that prompt rows are multiplied by; those that share an input are one product."""
    target, drafter = shape.target, shape.drafter
    heads = (2 * target.num_heads + 2 * target.num_kv_heads) * target.head_dim
    inner = target.gdn_value_heads * target.gdn_value_dim
    outputs = max(2 * target.intermediate_size, target.conv_channels + inner, heads)
    taps = len(drafter.target_layer_ids) * target.hidden_size if drafter is not None else 0
    return target.hidden_size * max(outputs, taps)
