"""Products that share their input, as few launches as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.ops.linear.ref import PackedWeight
from paceline.ops.linear.tiles import TILE_ROWS, TiledWeight, joined

Weight = PackedWeight | TiledWeight


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """Several weights [N_i, K]. ``weights`` are what is multiplied; ``parts`` says for each of the several which of these
    has it, and in which of its rows."""

    weights: tuple[Weight, ...]
    parts: tuple[tuple[int, slice], ...]


def merge(weights: Sequence[Weight]) -> Merged:
    """Join weights of equal K: those that are tiled and agree in form and scale become one, padded to whole tiles between
    the parts; the others stay products of their own. What is joined is copied, so keep only the result."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, weight in enumerate(weights):
        likeness = (weight.form, weight.shape[1], weight.scale) if isinstance(weight, TiledWeight) else (index,)
        groups.setdefault(likeness, []).append(index)
    parts: dict[int, tuple[int, slice]] = {}
    for product, members in enumerate(groups.values()):
        start = 0
        for index in members:
            rows = weights[index].shape[0]
            parts[index] = product, slice(start, start + rows)
            start += -(-rows // TILE_ROWS) * TILE_ROWS
    merged = tuple(_joined([weights[index] for index in members]) for members in groups.values())
    return Merged(merged, tuple(parts[index] for index in range(len(weights))))


def _joined(weights: Sequence[Weight]) -> Weight:
    tiled = [weight for weight in weights if isinstance(weight, TiledWeight)]
    return joined(tiled) if len(tiled) > 1 else weights[0]
