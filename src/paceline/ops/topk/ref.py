"""Selection over the vocabulary with one order everywhere: higher value first, then lower id.

``torch.topk`` leaves the order of equal values open, so it is not used. A NaN counts as -inf (and is returned as -inf),
so that it never beats a number; among -inf the lower id comes first, as for any other tie.
"""

from __future__ import annotations

import torch


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Id of the largest value of each row: ``logits`` [R, V] float32, V >= 1 -> [R] int64. Ties go to the lower id."""
    return _numbers(logits).max(dim=-1).indices  # documented to be the first of equal maxima


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row: ``logits`` [R, V] float32 -> values [R, k] float32, ids [R, k] int64.

    Ordered by value, descending, and ties by lower id. The first j columns do not depend on k. Raises ``ValueError``
    unless 1 <= k <= V.

    Exact in two stages: only the k best blocks of columns, by (largest value descending, block ascending), can hold one
    of the k best values. For any other value, each of those k blocks holds one that is larger, or equal at a lower id.
    """
    vocab = logits.shape[-1]
    if not 1 <= k <= vocab:
        raise ValueError(f"k must lie in 1 ... {vocab} (the number of columns), got {k}")
    logits = _numbers(logits)
    width = _block_width(vocab, k)
    if width == 1:
        return _sorted(logits, k)
    if vocab % width:
        logits = torch.nn.functional.pad(logits, (0, -vocab % width), value=-torch.inf)
    blocks = logits.unflatten(-1, (-1, width))
    best = _sorted(blocks.amax(dim=-1), k)[1]
    # In ascending order, so that a candidate's place among the survivors still orders equal values by id.
    best = best.sort(dim=-1).values
    values = blocks.gather(1, best[..., None].expand(-1, -1, width)).flatten(1)
    ids = (best[..., None] * width + torch.arange(width, device=logits.device)).flatten(1)
    values, places = _sorted(values, k)
    return values, ids.gather(1, places)


def peaks(logits: torch.Tensor) -> torch.Tensor:
    """Maxima of T parts of each row, which a NaN is larger than: ``logits`` [R, V] float32 -> [R, T]. How many parts there
    are is left open. The largest of a row's maxima is finite unless one of its numbers is NaN or infinity, or all are minus
    infinity."""
    return logits.amax(dim=-1, keepdim=True)


def order_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys in whose descending order values [R, C] float32 with their ids ([R, C] or [C], below 2**31) stand: higher
    value first, then lower id. Keys of different rows compare as well."""
    bits = (_numbers(values) + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, which ties with 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(torch.int64) << 32) | (0x7FFFFFFF - ids)


def _numbers(logits: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(logits, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _sorted(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    ordered = values.sort(dim=-1, descending=True, stable=True)
    return ordered.values[:, :k], ordered.indices[:, :k]


def _block_width(vocab: int, k: int) -> int:
    """Columns per block: the power of two that about balances the sorts of V / width maxima and of k * width values.
    It changes how long the selection takes and never its result. 1 where blocks would not pay."""
    width = 1
    while k * 4 * width * width <= vocab:
        width *= 2
    return width if width >= 4 else 1
