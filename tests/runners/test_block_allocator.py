"""Who owns which block: nothing is lost, nothing is shared, and a window costs only what it needs."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_compile.runners.block_allocator import BlockAllocator, BlockGroup

FULL = BlockGroup(name="full", block_size=8)
WINDOW = BlockGroup(name="window", block_size=4, window=10)


def make(full: int = 12, window: int = 20, rows: int = 3) -> BlockAllocator:
    return BlockAllocator((FULL, WINDOW), {"full": full, "window": window}, rows, max_model_len=64)


def held(blocks: BlockAllocator, name: str, row: int) -> list[int]:
    return [block for block in blocks.table(name)[row].tolist() if block >= 0]


def test_a_row_gets_the_blocks_its_tokens_need() -> None:
    blocks = make()
    row = blocks.open_row()
    blocks.extend(row, 9)
    assert len(held(blocks, "full", row)) == 2  # ceil(9 / 8)
    assert len(held(blocks, "window", row)) == 3  # ceil(9 / 4)
    before = blocks.table("full")[row].tolist()
    blocks.extend(row, 16)  # still two blocks
    assert blocks.table("full")[row].tolist() == before


def test_blocks_that_fell_out_of_the_window_go_back() -> None:
    blocks = make()
    row = blocks.open_row()
    blocks.extend(row, 20)
    # a query at 20 reads 11..20, so blocks 0 and 1 (tokens 0..7) go and block 2 (8..11) stays
    blocks.release_before(row, 20)
    assert [b < 0 for b in blocks.table("window")[row, :5].tolist()] == [True, True, False, False, False]
    assert blocks.free_blocks("window") == 20 - 3
    assert len(held(blocks, "full", row)) == 3


def test_a_token_at_the_edge_of_the_window_keeps_its_block() -> None:
    for position in range(1, 40):
        needed = [token // 4 for token in range(max(0, position - 10 + 1), position + 1)]
        assert WINDOW.first_block(position) == needed[0]


def test_peak_blocks_is_what_a_request_holds_at_most() -> None:
    for group in (
        FULL,
        WINDOW,
        BlockGroup(name="w", block_size=64, window=128),
        BlockGroup(name="o", block_size=3, window=1),
    ):
        for total in range(1, 70):
            peak = max(group.end_block(n + 1) - group.first_block(n) for n in range(total))
            assert peak <= group.peak_blocks(total) <= peak + 1


def test_how_many_tokens_fit_is_exact() -> None:
    blocks = make(full=2, window=20)
    row = blocks.open_row()
    assert blocks.tokens_that_fit(row, 0, 100) == 16
    assert blocks.tokens_that_fit(row, 0, 5) == 5
    blocks.extend(row, 3)
    other = blocks.open_row()
    blocks.extend(other, 8)
    assert blocks.tokens_that_fit(row, 3, 100) == 5  # the rest of its one block
    blocks.extend(row, 8)
    assert blocks.tokens_that_fit(row, 8, 1) == 0


def test_a_shortage_names_the_group_and_the_numbers() -> None:
    assert make().shortage(64) is None
    assert make(full=2).shortage(17) == "3 full blocks of 8 tokens, and the pool has 2"
    assert make(window=3).shortage(64) == "4 window blocks of 4 tokens, and the pool has 3"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.booleans()), max_size=60), st.integers(0, 99))
def test_every_block_has_one_owner_whatever_happens(actions: list[tuple[int, int, bool]], seed: int) -> None:
    blocks, length, rows = make(), {}, {}
    blocks.shuffle(random.Random(seed))
    for request, wanted, leave in actions:
        if leave and request in rows:
            blocks.close_row(rows.pop(request))
            continue
        if request not in rows:
            rows[request], length[request] = blocks.open_row(), 0
        wanted = min(wanted, 64 - length[request])
        fit = blocks.tokens_that_fit(rows[request], length[request], wanted)
        length[request] += fit
        blocks.extend(rows[request], length[request])
        blocks.release_before(rows[request], length[request])
        for name, total in (("full", 12), ("window", 20)):
            owned = [block for row in range(3) for block in held(blocks, name, row)]
            assert len(owned) == len(set(owned))
            assert len(owned) + blocks.free_blocks(name) == total
        row = blocks.table("window")[rows[request]].tolist()
        kept = range(max(0, length[request] - 9), length[request])  # the last 9 are still read by the next token
        assert all(row[token // 4] >= 0 for token in kept)
    for row in rows.values():
        blocks.close_row(row)
    assert (blocks.free_blocks("full"), blocks.free_blocks("window")) == (12, 20)
    assert (blocks.table("window") == -1).all()
