from paceline.ops.dispatch import by_device
from paceline.ops.kv import ref
from paceline.ops.kv.ref import PagedTensor, StagedRows, allocate_pages, bytes_per_token, copy_pages, read_pages

write_rows = by_device(ref.write_rows, "paceline.ops.kv.kernel")
write_kept = by_device(ref.write_kept, "paceline.ops.kv.kernel")

__all__ = [
    "PagedTensor",
    "StagedRows",
    "allocate_pages",
    "bytes_per_token",
    "copy_pages",
    "read_pages",
    "write_kept",
    "write_rows",
]
