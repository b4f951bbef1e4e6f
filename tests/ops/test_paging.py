"""Writing and reading paged rows: skipping is exact, whatever else the same call writes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4_compile.ops._paging import locate, read_rows, write_rows

BLOCKS, BLOCK_SIZE, WIDTH = 3, 5, 2
SLOTS = BLOCKS * BLOCK_SIZE


def random_bits(*shape):
    """Any bit pattern, NaNs with payloads among them."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32).view(torch.float32)


def assert_same_bits(actual, expected):
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


@st.composite
def slot_lists(draw):
    """Distinct slots with any number of -1 among them, the first and last slot often."""
    live = draw(st.lists(st.sampled_from([0, SLOTS - 1, *range(SLOTS)]), unique=True, max_size=8))
    skipped = draw(st.integers(0, 6))
    return draw(st.permutations(live + [-1] * skipped))


@given(slot_lists())
def test_write_rows_equals_a_loop(slots):
    cache = random_bits(BLOCKS, BLOCK_SIZE, WIDTH)
    rows = random_bits(len(slots), WIDTH)
    expected = cache.clone()
    for slot, row in zip(slots, rows, strict=True):
        if slot >= 0:
            expected[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = row
    write_rows(cache, torch.tensor(slots, dtype=torch.int64), rows)
    assert_same_bits(cache, expected)


@pytest.mark.parametrize("live", [0, SLOTS - 1])
def test_skipped_rows_do_not_undo_a_live_write(live):
    # many skipped rows on both sides of one live row: a skipped row that rewrote the old value would win somewhere
    slots = torch.full((4001,), -1)
    slots[2000] = live
    cache = torch.zeros(BLOCKS, BLOCK_SIZE, WIDTH)
    write_rows(cache, slots, torch.ones(4001, WIDTH))
    expected = torch.zeros(SLOTS, WIDTH)
    expected[live] = 1
    assert torch.equal(cache.flatten(0, 1), expected)


def test_write_rows_into_a_cache_with_padded_pages():
    pages = torch.zeros(BLOCKS, BLOCK_SIZE * WIDTH + 3)
    cache = pages.as_strided((BLOCKS, BLOCK_SIZE, WIDTH), (pages.stride(0), WIDTH, 1))
    write_rows(cache, torch.tensor([-1, 7]), torch.ones(2, WIDTH))
    assert cache[1, 2].tolist() == [1, 1]
    assert pages.sum() == 2


def test_write_rows_outside_of_the_cache_is_an_error():
    with pytest.raises(IndexError, match="out of bounds"):
        write_rows(torch.zeros(BLOCKS, BLOCK_SIZE, WIDTH), torch.tensor([SLOTS]), torch.ones(1, WIDTH))


@given(slot_lists())
def test_read_rows_equals_a_loop_and_is_zero_where_skipped(slots):
    cache = torch.full((BLOCKS, BLOCK_SIZE, WIDTH), float("nan"))
    for slot in slots:
        if slot >= 0:
            cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = slot + 0.5
    rows = read_rows(cache, torch.tensor(slots, dtype=torch.int64))
    assert rows.tolist() == [[slot + 0.5 if slot >= 0 else 0.0] * WIDTH for slot in slots]


def test_locate_skips_a_request_an_index_and_a_block_of_minus_one():
    table = torch.tensor([[4, -1], [2, 7]], dtype=torch.int32)
    requests = torch.tensor([[0], [1], [-1]], dtype=torch.int32)
    index = torch.tensor([[0, 5, -1]])
    assert locate(table, requests, index, BLOCK_SIZE).tolist() == [[20, -1, -1], [10, 35, -1], [-1, -1, -1]]


def test_locate_does_not_overflow_int32_tables():
    table = torch.tensor([[2**30]], dtype=torch.int32)
    assert locate(table, torch.tensor([0]), torch.tensor([3]), 64).tolist() == [2**36 + 3]
