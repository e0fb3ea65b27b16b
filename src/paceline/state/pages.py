"""Allocation of K/V pages."""

from __future__ import annotations

from collections.abc import Iterable

DUMMY_PAGE = 0
"""A page that no lane owns: padding reads it and rows that nobody will read are written to it."""


class PageAllocator:
    """Hands out page ids 1 … ``total``; the dummy page is outside the count. A page that several own is read only, and
    free once the last of them has given it back."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))
        self._owners = [0] * (total + 1)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= self.free, f"{count} pages wanted, {self.free} free: admission must reserve"
        taken = [self._free.pop() for _ in range(count)]
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
        """In reverse order, so that the same pages are taken again."""
        for page in reversed(list(pages)):
            assert self._owners[page], f"page {page} is nobody's"
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def free_pages(self) -> list[int]:
        return list(self._free)
