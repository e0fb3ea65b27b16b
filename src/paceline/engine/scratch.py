"""What a round takes on a GPU beside weights and state. Upper bounds by which the state is sized; pure arithmetic.

Everything is counted as if it lived at the same time: captured forwards have memory of their own, so that little is shared.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from paceline.config import CHUNK_SIZE
from paceline.engine.graphs import prompt_shapes
from paceline.engine.pacing import IDLE_FACTOR
from paceline.logprobs import ROWS_AT_ONCE
from paceline.ops.attention import pieces_of
from paceline.state.shapes import StateShape

_F16, _F32 = 2, 4


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes. ``logits`` of every row that draws a token, partial sums and a copy included; ``scores`` a copy of them for
    logprobs and, for a few rows at a time, those of a prompt and what is made of them; ``attention`` the partial results
    over the longest context; ``rows`` the activations of a forward; ``states`` what prompt chunks leave for the commit;
    ``dequantised`` the largest product's weight in 16 bits, as prompt rows multiply it; ``captured`` the same three of
    captured prompt forwards."""

    logits: int
    scores: int
    attention: int
    rows: int
    states: int
    dequantised: int
    captured: int

    @property
    def total(self) -> int:
        return sum(astuple(self))


def round_scratch(shape: StateShape, prefill_tokens: int, *, graphs: bool = True) -> Scratch:
    """Of rounds in which every lane verifies its widest span and as many prompt rows are read as ever; ``graphs``: whether
    forwards are captured."""
    target = shape.target
    decode_rows = shape.lanes * max(1, shape.draft_rows)
    prompt_rows = IDLE_FACTOR * prefill_tokens
    piece_bytes = target.head_dim * (_F16 if shape.cache_type_v in ("f16", "q8_0") else _F32) + 2 * _F32
    return Scratch(
        logits=3 * _F32 * (decode_rows + shape.lanes) * target.vocab_size,
        scores=_F32 * (decode_rows + 5 * ROWS_AT_ONCE) * target.vocab_size,
        attention=decode_rows * target.num_heads * pieces_of(shape.max_ctx) * piece_bytes,
        rows=_F32 * (decode_rows + prompt_rows) * _numbers_per_row(shape),
        states=shape.lanes * _state_bytes(shape),
        dequantised=_F16 * _largest_product(shape),
        captured=_captured(shape) if graphs else 0,
    )


def _state_bytes(shape: StateShape) -> int:
    """Of one span behind a prompt chunk: the states and the histories of all layers."""
    target = shape.target
    state = target.gdn_value_heads * target.gdn_key_dim * target.gdn_value_dim
    history = (target.conv_kernel - 1) * target.conv_channels
    return _F32 * target.layer_types.count("gdn") * (state + history)


def _captured(shape: StateShape) -> int:
    """Of prefill graphs, which share all of it, the states, the activations, the copies of the residual stream and of the
    drafter's context rows, and a weight in 16 bits."""
    drafter, prompts = shape.drafter, prompt_shapes(shape.lanes)
    context = drafter.num_layers * drafter.num_kv_heads * drafter.head_dim if drafter is not None else 0
    of_row = _numbers_per_row(shape) + 2 * shape.target.hidden_size + 2 * context
    total = max(prompt.spans for prompt in prompts) * _state_bytes(shape) + _F16 * _largest_product(shape)
    return total + _F32 * max(prompt.rows for prompt in prompts) * of_row


def _numbers_per_row(shape: StateShape) -> int:
    """Float32 numbers of one row: the residual stream and its norm, before and after; the widest sublayer's inputs, outputs
    and what is between; the delta rule's chunk matrices and its q and k in two halves; features, taken and joined, and the
    drafter's context."""
    target, drafter = shape.target, shape.drafter
    inner = target.gdn_value_heads * target.gdn_value_dim
    heads = (2 * target.num_heads + 2 * target.num_kv_heads) * target.head_dim
    widest = max(target.intermediate_size, target.conv_channels + inner, heads)
    numbers = 4 * target.hidden_size + 4 * widest + 2 * target.gdn_value_heads * CHUNK_SIZE
    numbers += 2 * target.gdn_key_heads * target.gdn_key_dim
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
