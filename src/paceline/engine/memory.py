"""Memory of the process."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LIMIT = 1 << 30

IDLE_SECONDS = 5.0
"""After which an engine that nobody asks gives freed memory back: its largest round may have been long ago."""


def stop_searching() -> None:
    """Tell the garbage collector that what has been loaded stays: looking through it again and again costs some rounds
    milliseconds."""
    gc.collect()
    gc.freeze()


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Collect garbage before and not within: what is freed on a GPU while a graph is captured spoils the graph."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_freed_memory() -> None:
    """Let glibc keep what is freed instead of giving it back to the system at once.

    A round takes and frees hundreds of buffers of up to a few MiB; faulting their pages in anew each time costs about 7 % of
    a prompt's time on a CPU. Elsewhere than on Linux with glibc this does nothing.
    """
    _glibc("mallopt", _M_TRIM_THRESHOLD, _LIMIT)
    _glibc("mallopt", _M_MMAP_THRESHOLD, _LIMIT)


def give_back_freed_memory() -> None:
    """Give the system what was kept."""
    _glibc("malloc_trim", 0)


def _glibc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*arguments)
