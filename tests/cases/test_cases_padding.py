"""Cases about padding: runners pad, ops skip rows of -1, the backend never pads; and dummy runs for a capture."""

from __future__ import annotations

import copy
import itertools

import op_samples
import pytest
import torch
from case_helpers import Feeder, Pair, Setup, assert_same, captured, check, everywhere, everywhere_and_compiled, rows
from paging import Paging, tiny_config
from torch import Tensor

import dsv4_compile
from dsv4_compile.models.deepseek_v4 import LayerKind, build_cos_sin

toy, dsv4 = torch.ops.toy, torch.ops.dsv4
CONFIG = tiny_config(ratios=(4, 128))
NAN = float("nan")


def padded(values: Tensor, size: int, fill: float) -> Tensor:
    return torch.cat([values, torch.full((size - len(values), *values.shape[1:]), fill, dtype=values.dtype)])


def feeder(setup: Setup) -> Feeder:
    return Feeder(persistent=setup.runner == "mrv2")


class Inserting(torch.nn.Module):
    """The KV insert of `dsv4` into a cache of 4 blocks of 8 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 8, CONFIG.head_dim))
        self.register_buffer("cos_sin", build_cos_sin(CONFIG, LayerKind.SWA))

    def forward(self, q: Tensor, kv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        out = torch.empty_like(q)
        dsv4.qnorm_rope_kv_insert(q.sin(), kv, positions, self.cos_sin, slots, 1e-6, out, self.cache)
        return toy.fresh(out) + 1


@everywhere
def test_b16_padded_slot_leaves_the_last_row(setup: Setup) -> None:
    model, feed = Inserting(), feeder(setup)
    model.cache[-1, -1] = 12345.0
    pair = Pair(model, setup)
    for n, size in [(5, 8), (8, 8), (5, 8), (11, 16), (1, 8), (16, 16), (9, 16), (0, 8)]:
        q, kv = torch.randn(n, 6, CONFIG.head_dim), torch.randn(n, CONFIG.head_dim)
        slots = torch.randperm(31)[:n]
        before = model.cache.clone()
        pair(
            feed("q", padded(q, size, NAN)),
            feed("kv", padded(kv, size, NAN)),
            feed("positions", padded(torch.arange(n), size, 0)),
            feed("slots", padded(slots, size, -1)),
        )
        untouched = torch.ones(32, dtype=torch.bool)
        untouched[slots] = False
        assert torch.equal(model.cache.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])
        assert (model.cache[-1, -1] == 12345.0).all()


class Attending(torch.nn.Module):
    """`forward_mqa` over the caches of the op samples; the arguments of a step are passed."""

    STEP = ("q", "positions", "token_to_req", "out")

    def __init__(self) -> None:
        super().__init__()
        self.sample = op_samples.sample("forward_mqa", "c4")
        for name, value in self.sample.items():
            if isinstance(value, Tensor) and name not in self.STEP:
                self.register_buffer(name, value)

    def forward(self, q: Tensor, positions: Tensor, token_to_req: Tensor) -> Tensor:
        arguments = {name: getattr(self, name, value) for name, value in self.sample.items() if name not in self.STEP}
        out = torch.empty_like(q)
        dsv4.forward_mqa(q=q.sin(), positions=positions, token_to_req=token_to_req, out=out, **arguments)
        return out * 2


@everywhere
def test_b16_topk_of_minus_one_reads_no_row(setup: Setup) -> None:
    model, feed = Attending(), feeder(setup)
    model.kv_cache[-1] = model.swa_cache[-1] = NAN  # what an index of -1 would read
    pair = Pair(model, setup)
    for n, size in [(14, 14), (14, 16), (5, 8), (11, 16), (5, 8), (14, 14), (14, 14), (9, 16), (8, 8)]:
        q = torch.randn(n, 6, 20)
        step = {"positions": model.sample["positions"][:n], "token_to_req": model.sample["token_to_req"][:n]}
        args = [feed(name, padded(values, size, -1)) for name, values in step.items()]
        args[0] = args[0].clamp_(min=0)
        result = pair(feed("q", padded(q, size, NAN)), *args)
        unpadded = model(q, *step.values())
        torch.testing.assert_close(result[:n], unpadded, rtol=0, atol=1e-6)
        assert not result[:n].isnan().any()
        assert not result[n:].any()


def crossing_tokens(x: Tensor) -> tuple[Tensor, ...]:
    scaled, centred = x / x.abs().amax(), x - x.mean(0)
    y = toy.fresh(scaled)
    return y + centred, x / x.shape[0], torch.softmax(y, 0)


@everywhere
@pytest.mark.parametrize("poison", [NAN, 1e9])
def test_b17_the_backend_never_pads(setup: Setup, poison: float) -> None:
    pair = Pair(crossing_tokens, setup, capture_sizes=[8])
    for n in (8, 5, 8, 5, 8, 5):
        pair(rows(8) * poison)
        for result in pair(rows(n)):
            assert result.isfinite().all()
    if setup.captures:
        with dsv4_compile.counters.expect(uncaptured_calls=1, captures=0):
            pair(rows(5))


@pytest.mark.sampled(2)
@everywhere
@pytest.mark.parametrize("poison", [NAN, 1e9])
def test_b17_padded_rows_do_not_reach_real_ones(setup: Setup, poison: float) -> None:
    model, feed = Attending(), feeder(setup)
    pair = Pair(model, setup)
    step = [model.sample["positions"][:5], model.sample["token_to_req"][:5]]
    for n in (8, 5, 8, 5, 8, 5):
        q = torch.randn(n, 6, 20)
        positions = feed("positions", padded(step[0], 8, 0))
        owner = feed("token_to_req", padded(step[1], 8, -1))
        result = pair(feed("q", padded(q, 8, poison)), positions, owner)
        torch.testing.assert_close(result[:5], model(q[:5], *step), rtol=0, atol=1e-6)


class Reserving(torch.nn.Module):
    """Writes rows into a cache whose block 0 is nobody's, and gathers rows that a weight of 0 masks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(32, 4))

    def forward(self, x: Tensor, slots: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        toy.kv_write(x.exp(), slots, self.cache)
        gathered = self.cache[index] * weight.unsqueeze(-1)
        return toy.fresh(gathered.sum(1)) + x


def dummy(n: int) -> tuple[Tensor, ...]:
    return torch.full((n, 4), NAN), torch.zeros(n, dtype=torch.int64), torch.zeros(n, 3, dtype=torch.int64), rows(n, 3)


def request(n: int) -> tuple[Tensor, ...]:
    index, weight = torch.randint(1, 32, (n, 3)), torch.rand(n, 3)
    index[:, 2] = weight[:, 2] = 0  # padded with block 0, of no weight
    return rows(n), torch.randperm(31)[:n] + 1, index, weight


@everywhere
def test_b19_dummy_batches_that_write_nothing(setup: Setup) -> None:
    model = Reserving()
    pair = Pair(model, setup)
    for n in (16, 8) * 2:  # a warm-up and a capture of each
        x, slots, *rest = dummy(n)
        pair(x, slots - 1, *rest)
        assert not model.cache.any()
    for n in (8, 16) * 3:
        assert pair(*request(n)).isfinite().all()


@captured
def test_b19_capture_leaves_every_state_as_it_was(setup: Setup) -> None:
    model = Reserving()
    model.cache.copy_(rows(32))
    before = copy.deepcopy(model.state_dict())
    pair = Pair(model, setup)
    with torch.no_grad(), dsv4_compile.counters.expect(captures=2):
        dsv4_compile.capture(pair.compiled, dummy, [8, 16])  # writes NaN into rows that are live
    assert_same(dict(model.state_dict()), dict(before))
    with dsv4_compile.counters.expect(captures=0, uncaptured_calls=0):
        for n in (8, 16) * 3:
            assert pair(*request(n)).isfinite().all()


class Indexing(torch.nn.Module):
    """`sparse_indexer` into a persistent buffer for the largest step."""

    def __init__(self, paging: Paging) -> None:
        super().__init__()
        blocks, per_block = paging.num_blocks["compressed"], CONFIG.compressed_block_size // 4
        self.register_buffer("keys", torch.randn(blocks, per_block, CONFIG.index_head_dim))
        self.register_buffer("table", paging.table("compressed"))
        self.register_buffer("topk", torch.full((64, CONFIG.index_topk), 77, dtype=torch.int32))

    def forward(self, q: Tensor, weights: Tensor, positions: Tensor, token_to_req: Tensor) -> Tensor:
        dsv4.sparse_indexer(q.sin(), None, weights, positions, self.keys, token_to_req, self.table, 4, self.topk)
        return self.topk[: q.shape[0]].sort().values


def index_steps(setup: Setup, steps: list[tuple[list[tuple[int, int, int]], int]]) -> None:
    """Spans of (request, start, count), each with the size it is padded to."""
    paging, feed = Paging(CONFIG, [300, 300]), feeder(setup)
    model = Indexing(paging)
    pair = Pair(model, setup)
    for spans, size in steps:
        n = sum(count for _, _, count in spans)
        positions, step = paging.step(spans, padding=size - n)
        q, weights = torch.randn(size, 64, CONFIG.index_head_dim), torch.randn(size, 64)
        below = model.topk[size:].clone()
        pair(q, weights, feed("positions", positions), feed("owner", step.token_to_req))
        assert (model.topk[n:size] == -1).all()
        assert torch.equal(model.topk[size:], below)


@everywhere
def test_b21_indexer_goes_from_short_to_long_contexts(setup: Setup) -> None:
    short, long = [(0, 0, 5), (1, 3, 2)], [(0, 200, 5), (1, 20, 2)]
    index_steps(setup, [(spans, size) for spans in (short, short, long, short, long) for size in (8, 16)])


@everywhere
def test_b24_topk_rows_of_a_larger_step_are_reset(setup: Setup) -> None:
    index_steps(setup, [([(0, 100, n)], size) for n, size in [(16, 16), (5, 8), (16, 16), (9, 16), (3, 8), (1, 8)]])


class Compressing(torch.nn.Module):
    def __init__(self, paging: Paging, ratio: int) -> None:
        super().__init__()
        kind, group, width = LayerKind(ratio), f"c{ratio}_state", CONFIG.head_dim
        channels, per_block = kind.overlap * width, CONFIG.compressed_block_size // ratio
        self.ratio = ratio
        self.register_buffer("ape", torch.randn(ratio, channels))
        self.register_buffer("norm", torch.randn(width))
        self.register_buffer("cos_sin", build_cos_sin(CONFIG, kind))
        self.register_buffer("table", paging.table(group))
        self.register_buffer(
            "state", torch.zeros(paging.num_blocks[group], CONFIG.state_block_size(kind), 2 * channels)
        )
        self.register_buffer("rows", torch.full((paging.num_blocks["compressed"], per_block, width), NAN))

    def forward(self, x: Tensor, positions: Tensor, owner: Tensor, state_slots: Tensor, slots: Tensor) -> Tensor:
        inputs = x.sin(), self.ape, self.norm, positions, self.cos_sin, owner, self.table, state_slots, slots
        dsv4.compress_kv_insert(*inputs, self.ratio, 1e-6, self.state, self.rows)
        return toy.fresh(x)

    def written(self) -> int:
        return int((~self.rows.isnan().any(-1)).sum())


@everywhere
@pytest.mark.parametrize(("ratio", "start"), [(4, 0), (4, 3), (128, 120)])
def test_b36_steps_that_do_not_divide_by_the_ratio(setup: Setup, ratio: int, start: int) -> None:
    paging, feed = Paging(CONFIG, [300]), feeder(setup)
    model = Compressing(paging, ratio)
    unpadded = copy.deepcopy(model)
    pair = Pair(model, setup)
    sizes = (1, 3, 5, 7, 9, 9, 9)
    starts = itertools.accumulate(sizes, initial=start)
    for n, position in zip(sizes, starts, strict=False):
        x = torch.randn(n, model.state.shape[-1])
        for target, size in ((pair, 8 if n <= 8 else 16), (unpadded, n)):
            positions, step = paging.step([(0, position, n)], padding=size - n)
            state_slots, slots = getattr(step, f"c{ratio}_state_slot_mapping"), getattr(step, f"c{ratio}_slot_mapping")
            state = {"positions": positions, "owner": step.token_to_req, "state_slots": state_slots, "slots": slots}
            made = [feed(name, values) for name, values in state.items()] if target is pair else state.values()
            target(padded(x, size, NAN), *made)
        assert model.written() == (position + n) // ratio - start // ratio
        torch.testing.assert_close(model.rows, unpadded.rows, rtol=0, atol=1e-6, equal_nan=True)
        assert_same(model.state, unpadded.state, tolerant=setup.tolerant)


@everywhere_and_compiled
def test_b17_row_counts_are_the_true_ones(setup: Setup) -> None:
    check(setup, crossing_tokens, lambda n: (rows(n),), sizes=(8, 5, 8, 5, 8, 5, 16, 9, 9, 9))
