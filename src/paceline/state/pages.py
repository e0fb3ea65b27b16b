"""Allocation of K/V pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

DUMMY_PAGE = 0
"""A page that no lane owns: padding reads it and rows that nobody will read are written to it."""


class PageAllocator:
    """Hands out page ids 1 … ``total``; the dummy page is outside the count. A page that several own is read only, and
    free once the last of them has given it back. What has been free longest is taken first: a forward that was begun for
    a lane that is gone may still write to its pages."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = deque(range(1, total + 1))
        self._owners = [0] * (total + 1)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= self.free, f"{count} pages wanted, {self.free} free: admission must reserve"
        taken = [self._free.popleft() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> list[int]:
        """The same pages for one more owner."""
        shared = list(pages)
        for page in shared:
            assert self._owners[page], f"page {page} is nobody's"
            self._owners[page] += 1
        return shared

    def owners(self, page: int) -> int:
        return self._owners[page]

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._owners[page], f"page {page} is nobody's"
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def free_pages(self) -> list[int]:
        return list(self._free)
