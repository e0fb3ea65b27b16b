"""What the attention of generated rows on Hopper GPUs is for, and that its host and its source agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from paceline.batch import pack
from paceline.config import PAGE_SIZE
from paceline.ops.attention import attention_arithmetic, hopper, pieces
from paceline.ops.attention.ref import QUERY_TILE
from paceline.ops.kv import allocate_pages

SHARED = 228 << 10
RESERVED = 1 << 10


def source() -> str:
    return Path(hopper.__file__).with_name("attend.cu").read_text(encoding="utf-8")


@pytest.mark.parametrize("group", range(1, hopper._MOST_GROUP + 1))
def test_two_ctas_have_room_in_a_multiprocessor(group: int) -> None:
    assert hopper._RESIDENT * (hopper.shared_bytes(group) + RESERVED) <= SHARED


def test_the_source_has_the_same_sizes() -> None:
    text = source()
    for name, value in (
        ("DIM", hopper.HEAD_DIM),
        ("ROWS", hopper.TILE_ROWS),
        ("KEYS", hopper._KEYS),
        ("WARPS", hopper._WARPS),
    ):
        assert re.search(rf"constexpr int {name} = {value}\b", text), name
    assert f"__launch_bounds__(THREADS, {hopper._RESIDENT})" in text
    assert QUERY_TILE["decode"] == hopper.TILE_ROWS
    assert hopper.source(6).startswith(f"#define GROUP 6\n#define PAGE {PAGE_SIZE}\n#define NEAR {pieces.NEAR}\n")


def test_pieces_are_whole_pages_and_blocks_do_not_cross_them() -> None:
    for keys in (pieces.NEAR, pieces.MIDDLE, pieces.FAR, hopper._KEYS):
        assert keys % PAGE_SIZE == 0
    assert pieces.FAR % hopper._KEYS == 0 and hopper._KEYS >= pieces.MIDDLE


def test_the_arguments_are_those_of_the_source() -> None:
    (body,) = re.findall(r"struct Arguments \{(.*?)\};", source(), re.DOTALL)
    fields = re.sub(r"//.*", "", body).replace("const ", "")
    declared = [re.sub(r"^(float|uint8|uint2|int64|int)\b", "", part.strip()).strip() for part in re.split(r"[;,]", fields)]
    names = [name.lstrip("* ") for name in declared if name]
    assert names == [field[0] for field in hopper._Arguments._fields_]
    assert [name.lstrip("* ") for name in declared if name.startswith("*")] == list(hopper._POINTERS)


def test_a_cpu_has_the_reference() -> None:
    cpu = torch.device("cpu")
    assert attention_arithmetic(cpu).startswith("reference-")
    cache = allocate_pages("q8_0", 2, 4, 256, cpu)
    assert not hopper.fits(torch.empty(1, 24, 256), cache, cache, pack("decode", [1], [0], cpu), True, None)
