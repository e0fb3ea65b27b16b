from paceline.ops.dispatch import by_device
from paceline.ops.kv import ref
from paceline.ops.kv.ref import PagedTensor, allocate_pages, bytes_per_token, read_pages

write_rows = by_device(ref.write_rows, "paceline.ops.kv.kernel")

__all__ = ["PagedTensor", "allocate_pages", "bytes_per_token", "read_pages", "write_rows"]
