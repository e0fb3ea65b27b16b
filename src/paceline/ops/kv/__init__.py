from torch import Tensor

from paceline.batch import PackedBatch
from paceline.ops.dispatch import by_device
from paceline.ops.kv import ref
from paceline.ops.kv.ref import PagedTensor, StagedRows, allocate_pages, bytes_per_token, copy_pages, read_pages

row_slots = by_device(ref.row_slots, "paceline.ops.kv.kernel")
write_rows = by_device(ref.write_rows, "paceline.ops.kv.kernel")
write_kept = by_device(ref.write_kept, "paceline.ops.kv.kernel")


def slots(page_table: Tensor, batch: PackedBatch) -> Tensor:
    """``row_slots``, found once for all layers of a forward."""
    key = ("slots", id(page_table))
    if key not in batch.plans:
        # the table is kept beside the slots, so that its id cannot be taken over by another while the batch lives
        batch.plans[key] = (row_slots(page_table, batch), page_table)
    found: Tensor = batch.plans[key][0]
    return found


__all__ = [
    "PagedTensor",
    "StagedRows",
    "allocate_pages",
    "bytes_per_token",
    "copy_pages",
    "read_pages",
    "row_slots",
    "slots",
    "write_kept",
    "write_rows",
]
