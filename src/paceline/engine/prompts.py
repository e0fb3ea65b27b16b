"""The prompt half of a round: what its forward is fed, and the forward, which runs as it is or captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from paceline.batch import PackedBatch, facts, unpack
from paceline.config import CHUNK_SIZE
from paceline.engine.drafting import Drafter
from paceline.engine.plan import PrefillSpan
from paceline.models.qwen35 import Hidden, Qwen35
from paceline.ops.gdn import CHUNK_PLAN, chunk_facts
from paceline.state.pool import Half, StatePool
from paceline.transfer import to_device


@dataclass(frozen=True, slots=True)
class PromptShape:
    """``rows`` N and ``spans`` S of a prefill forward, ``chunks`` C of the delta rule; with ``padded`` there may be fewer
    real ones."""

    rows: int
    spans: int
    chunks: int
    padded: bool = False

    @classmethod
    def of(cls, spans: Sequence[PrefillSpan]) -> PromptShape:
        chunks = sum(-(-span.length // CHUNK_SIZE) for span in spans)
        return cls(sum(span.length for span in spans), len(spans), chunks)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Lengths of the parts of ``pack_prompts``: the batch's facts, the tokens, the chunks."""
        return 2 * self.rows + 4 * self.spans, self.rows, 2 * self.chunks + self.spans


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """A prefill forward: its half and the tokens [N] of its rows."""

    half: Half
    tokens: Tensor


def pack_prompts(spans: Sequence[PrefillSpan], shape: PromptShape, spare_lane: int) -> np.ndarray:
    """All numbers of a prefill forward, for one transfer."""
    packed = np.zeros(sum(shape.sizes), np.int64)
    of_batch, tokens, chunks = np.split(packed, np.cumsum(shape.sizes)[:2])
    lengths = [span.length for span in spans]
    padding = (shape.rows, shape.spans, spare_lane) if shape.padded else ()
    of_batch[:] = facts(lengths, [span.start for span in spans], [span.lane for span in spans], *padding)
    tokens[: sum(lengths)] = [token for span in spans for token in span.tokens]
    chunks[:] = chunk_facts(lengths, shape.chunks, shape.spans)
    return packed


def unpack_prompts(
    packed: Tensor, shape: PromptShape, lengths: Sequence[int], bases: Sequence[int]
) -> tuple[PackedBatch, Tensor]:
    """(batch, tokens [N]) as views of ``pack_prompts``'s array on a device."""
    of_batch, tokens, chunks = packed.split(shape.sizes)
    batch = unpack("prefill", of_batch, lengths, bases, shape.rows, shape.spans)
    return replace(batch, plans={CHUNK_PLAN: chunks.split((shape.chunks, shape.chunks, shape.spans))}), tokens


def prompt_inputs(spans: Sequence[PrefillSpan], pool: StatePool) -> PromptInputs:
    """Inputs of exactly these spans, for a forward that is not captured."""
    shape = PromptShape.of(spans)
    packed = to_device(pack_prompts(spans, shape, pool.spare_lane), pool.device)
    batch, tokens = unpack_prompts(packed, shape, [span.length for span in spans], [span.start for span in spans])
    return PromptInputs(pool.half(batch), tokens)


def prefill_forward(target: Qwen35, drafter: Drafter | None, inputs: PromptInputs) -> Hidden:
    """The residual stream of every row; what the rows add to the state is left in the views."""
    half = inputs.half
    hidden, features = target(inputs.tokens, half.batch, half.target, drafter.taps if drafter else ())
    if drafter is not None and features is not None:
        drafter.project(features, half.batch, half.context)
    return hidden
