"""Allocation of K/V pages."""

from __future__ import annotations

from collections.abc import Iterable

DUMMY_PAGE = 0
"""A page that no lane owns: padding reads it and rows that nobody will read are written to it."""


class PageAllocator:
    """Hands out page ids 1 … ``total``; the dummy page is outside the count."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= self.free, f"{count} pages wanted, {self.free} free: admission must reserve"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Iterable[int]) -> None:
        """In reverse order, so that the same pages are taken again."""
        self._free.extend(reversed(list(pages)))

    def free_pages(self) -> list[int]:
        return list(self._free)
