from paceline.ops.kv.ref import PagedTensor, allocate_pages, bytes_per_token, read_pages, write_rows

__all__ = ["PagedTensor", "allocate_pages", "bytes_per_token", "read_pages", "write_rows"]
