"""The compressor op: entries equal pooling by hand, however a request is cut into steps, and only they are written."""

import pytest
import reference
import torch
from paging import Paging, tiny_config

from dsv4_compile.models.deepseek_v4 import LayerKind, build_cos_sin

CONFIG = tiny_config(ratios=(4, 128))
CASES = pytest.mark.parametrize(
    ("kind", "width"),
    [(LayerKind.C4A, CONFIG.head_dim), (LayerKind.C4A, CONFIG.index_head_dim), (LayerKind.C128A, CONFIG.head_dim)],
    ids=["c4-main", "c4-indexer", "c128-main"],
)
LENGTHS = [263, 131, 9]
# every request twice or more, cut inside and at the ends of blocks; decodes among prefills
SCHEDULE = [
    [(0, 0, 3), (1, 0, 127)],
    [(1, 127, 1), (0, 3, 1)],
    [(2, 0, 7), (0, 4, 251), (1, 128, 1)],
    [(0, 255, 1), (1, 129, 1), (2, 7, 1)],
    [(1, 130, 1), (2, 8, 1), (0, 256, 7)],
]


class Bench:
    """One compressor: random inputs of all requests, its caches, and the step runner."""

    def __init__(self, kind, width, *, max_reqs=5, seed=0):
        torch.manual_seed(seed)
        self.kind, self.width, self.ratio = kind, width, kind.value
        self.group = f"c{kind.value}_state"
        self.paging = Paging(CONFIG, LENGTHS, max_reqs=max_reqs, seed=seed)
        channels = kind.overlap * width
        self.kv_score = [torch.randn(length, 2 * channels) for length in LENGTHS]
        self.ape = torch.randn(kind.value, channels)
        self.norm = torch.randn(width)
        blocks, rows = self.paging.num_blocks, CONFIG.compressed_block_size // kind.value
        self.state = torch.full((blocks[self.group], CONFIG.state_block_size(kind), 2 * channels), float("nan"))
        self.cache = torch.full((blocks["compressed"], rows, width), float("nan"))
        self.cos_sin = build_cos_sin(CONFIG, kind)

    def run(self, spans, *, padding=0, table=None):
        positions, step = self.paging.step(spans, padding=padding)
        rows = [self.kv_score[r][start : start + count] for r, start, count in spans]
        rows.append(torch.full((padding, self.kv_score[0].shape[1]), float("nan")))
        torch.ops.dsv4.compress_kv_insert(
            torch.cat(rows),
            self.ape,
            self.norm,
            positions,
            self.cos_sin,
            step.token_to_req,
            getattr(step, f"{self.group}_block_table") if table is None else table,
            getattr(step, f"{self.group}_slot_mapping"),
            getattr(step, f"c{self.ratio}_slot_mapping"),
            self.ratio,
            1e-6,
            self.state,
            self.cache,
        )

    def entries(self, request):
        """All completed entries of a request, read from the cache slot by slot."""
        blocks = LENGTHS[request] // self.ratio
        slots = [self.paging.slot("compressed", request, b * self.ratio, self.ratio) for b in range(blocks)]
        return self.cache.flatten(0, 1)[slots]

    def expected(self, request):
        k, z = self.kv_score[request].double().chunk(2, dim=1)
        z = z + torch.stack([self.ape.double()[j % self.ratio] for j in range(len(z))])
        freqs = reference.frequencies(CONFIG, compressed=True)
        entries = [
            reference.compressed_entry(k, z, b, self.ratio, self.norm.double(), freqs, 1e-6)
            for b in range(LENGTHS[request] // self.ratio)
        ]
        return torch.stack(entries) if entries else torch.zeros(0, self.width, dtype=torch.float64)

    def check(self):
        for request in range(len(LENGTHS)):
            torch.testing.assert_close(self.entries(request).double(), self.expected(request), rtol=0, atol=2e-6)


@CASES
@pytest.mark.parametrize("padding", [0, 5])
def test_entries_equal_pooling_by_hand(kind, width, padding):
    bench = Bench(kind, width)
    for spans in SCHEDULE:
        bench.run(spans, padding=padding)
    bench.check()
    written = sum(length // bench.ratio for length in LENGTHS)
    assert (~bench.cache.isnan().any(-1)).sum() == written


@CASES
def test_one_prefill_of_each_request_equals_token_by_token(kind, width):
    whole, single = Bench(kind, width), Bench(kind, width)
    whole.run([(request, 0, length) for request, length in enumerate(LENGTHS)])
    for position in range(max(LENGTHS)):
        single.run([(r, position, 1) for r, length in enumerate(LENGTHS) if position < length])
    torch.testing.assert_close(single.cache, whole.cache, rtol=0, atol=1e-6, equal_nan=True)
    assert torch.equal(single.state.nan_to_num(7), whole.state.nan_to_num(7))


@CASES
def test_states_are_kv_and_score_plus_ape(kind, width):
    bench = Bench(kind, width)
    bench.run([(0, 0, 6)])
    for position in range(6):
        slot = bench.paging.slot(bench.group, 0, position)
        kv, score = bench.kv_score[0][position].chunk(2)
        expected = torch.cat([kv, score + bench.ape[position % bench.ratio]])
        assert torch.equal(bench.state.flatten(0, 1)[slot], expected)


@CASES
def test_blocks_out_of_the_window_may_be_freed(kind, width):
    bench = Bench(kind, width)
    bench.run([(0, 0, 255)])
    window = kind.overlap * kind.value
    table = bench.paging.table(bench.group)
    freed = (256 - window) // CONFIG.state_block_size(kind)
    bench.state[table[0, :freed].long()] = float("nan")
    table[0, :freed] = -1
    bench.run([(0, 255, 1)], table=table)
    last = bench.entries(0)[256 // bench.ratio - 1]
    torch.testing.assert_close(last.double(), bench.expected(0)[256 // bench.ratio - 1], rtol=0, atol=2e-6)


def test_the_most_blocks_that_one_step_can_close():
    # each request closes one block more than its share of T // ratio: 10 // 4 + 2 = 4 rows, all used
    bench = Bench(LayerKind.C4A, CONFIG.head_dim, max_reqs=2)
    bench.paging.tables = {group: rows[:2] for group, rows in bench.paging.tables.items()}
    bench.run([(0, 0, 3), (1, 0, 3)])
    bench.run([(0, 3, 5), (1, 3, 5)])
    for request in (0, 1):
        torch.testing.assert_close(bench.entries(request)[:2].double(), bench.expected(request)[:2], rtol=0, atol=2e-6)


def test_more_closing_tokens_than_requests_can_have_is_an_error():
    bench = Bench(LayerKind.C4A, CONFIG.head_dim)
    positions, step = bench.paging.step([(0, 0, 20)])
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.ops.dsv4.compress_kv_insert(
            bench.kv_score[0][:20],
            bench.ape,
            bench.norm,
            positions,
            bench.cos_sin,
            step.token_to_req,
            step.c4_state_block_table,
            step.c4_state_slot_mapping,
            torch.arange(20),
            4,
            1e-6,
            bench.state,
            bench.cache,
        )


def test_states_in_another_dtype_are_refused():
    bench = Bench(LayerKind.C4A, CONFIG.head_dim)
    bench.state = bench.state.bfloat16()
    with pytest.raises(TypeError, match=r"state_cache is torch\.bfloat16; bind caches after casting the model"):
        bench.run([(0, 0, 3)])
