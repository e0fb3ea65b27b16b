from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.state.pages import DUMMY_PAGE, PageAllocator


@given(st.lists(st.integers(-4, 6), max_size=40))
def test_pages_are_neither_lost_nor_shared(steps: list[int]) -> None:
    """Positive steps take pages, negative ones give the oldest back."""
    allocator, owned = PageAllocator(20), list[int]()
    for step in steps:
        if step >= 0:
            owned += allocator.take(min(step, allocator.free))
        else:
            allocator.give_back(owned[:-step])
            del owned[:-step]
        assert sorted(owned + allocator.free_pages()) == list(range(1, 21))
        assert allocator.free == 20 - len(owned)


def test_the_dummy_page_is_never_handed_out() -> None:
    assert DUMMY_PAGE not in PageAllocator(5).take(5)


def test_what_has_been_free_longest_is_taken_first() -> None:
    allocator = PageAllocator(8)
    first, second = allocator.take(2), allocator.take(3)
    allocator.give_back(first)
    allocator.give_back(second)
    assert allocator.take(8) == [6, 7, 8, *first, *second]


def test_taking_more_than_there_is_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        PageAllocator(2).take(3)
