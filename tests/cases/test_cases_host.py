"""Cases about the host: numbers, branches, step contexts, random draws and Python state that a capture would freeze."""

from __future__ import annotations

import re

import pytest
import torch
from case_helpers import (
    Feeder,
    Pair,
    Setup,
    assert_same,
    captured,
    captured_mrv2,
    check,
    each_captured_once,
    equal_or_refused,
    everywhere,
    everywhere_and_compiled,
    reasons,
    rows,
    under_mrv1,
    under_mrv2,
)
from torch import Tensor
from toy_ops import SPLIT, Host, StepContext

import dsv4_compile
from dsv4_compile.errors import Dsv4Error, HazardError

toy = torch.ops.toy


def x_only(n: int) -> tuple[Tensor]:
    return (rows(n),)


def scaled(x: Tensor, scale: float, start: int) -> Tensor:
    return toy.fresh(x * scale + start) * scale - start


@everywhere
def test_b04_numbers_are_part_of_the_bucket(setup: Setup) -> None:
    values = [(0.5, 3), (2.0, 3), (0.5, 7), (-1.25, 2), (0.5, 3)]
    calls = [(n, *value) for value in values for n in (8, 16) for _ in range(3)]
    pair = Pair(scaled, setup)
    with dsv4_compile.counters.expect(graphs_compiled=1), each_captured_once(setup, calls):
        for n, scale, start in calls:
            pair(rows(n), scale, start)
    assert sorted(setup.explain(scaled, rows(8), 0.5, 3).scalars) == ["scale", "start"]


@everywhere
def test_b04_captures_are_bounded(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(scaled, setup, max_captures=3)
    with caplog.at_level("WARNING", logger="dsv4_compile"):
        for start in range(2, 9):
            for _ in range(3):
                pair(rows(8), 0.5, start)
    warnings = [record for record in caplog.records if "max_captures" in record.getMessage()]
    assert len(warnings) == (1 if setup.captures else 0)
    assert dsv4_compile.counters.captures == (3 if setup.captures else 0)


@everywhere
def test_b04_number_in_a_tensor_on_the_host(setup: Setup) -> None:
    def f(x, limit):
        return toy.fresh(x * limit.item()) + limit

    limit = torch.zeros((), dtype=torch.int64)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        pair = Pair(f, setup)
        for n in (8, 16):
            for value in (1, 5, 9, 1, 5, 9, 1):
                pair(rows(n), limit.fill_(value))


@everywhere
def test_b04_size_that_only_arithmetic_sees(setup: Setup) -> None:
    def f(x, other):
        return toy.fresh(x.sin()) * other.shape[0]

    calls = [(8, 5), (8, 6), (8, 7), (16, 5)] * 3
    pair = Pair(f, setup)
    with each_captured_once(setup, calls):
        for n, length in calls:
            pair(rows(n), torch.zeros(length))


def insert_from_context(x: Tensor, cache: Tensor) -> Tensor:
    toy.context_write(x.exp(), cache)
    return toy.fresh(x.sin()) + cache.sum(0)


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> type[StepContext]:
    for name in ("slots", "max_len", "lens", "is_capturing"):
        monkeypatch.setattr(StepContext, name, StepContext.__dict__[name])
    dsv4_compile.register_op("toy::context_write", role="prepare", reads_context=True)
    dsv4_compile.register_op("toy::kv_write", role="prepare", step_state=("slots",))
    return StepContext


def some_slots(n: int) -> Tensor:
    slots = torch.randperm(64)[:n]
    slots[n // 2] = -1
    return slots


@under_mrv1
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("region", ["runner", "minimal"])
def test_b14_old_runner_without_context_at_capture(setup: Setup, context, persistent: bool, region: str) -> None:
    feed = Feeder(persistent=persistent)
    cache = torch.zeros(64, 4)
    pair = Pair(insert_from_context, setup, region=region)
    for step, n in enumerate((8, 16) * 5):
        context.slots = feed("slots", some_slots(n)) if step >= 4 else None
        pair(rows(n), cache)
    assert cache.any()
    why = reasons(setup.explain(insert_from_context, rows(8), cache, region=region))
    assert why["toy::context_write"] == "reads the step context"


@under_mrv1
def test_b14_old_runner_refuses_the_narrow_region(setup: Setup, context) -> None:
    pair = Pair(insert_from_context, setup, region="narrow")
    message = r"op toy::context_write\.default reads the step context .*but it would be captured under mrv1.*region="
    with pytest.raises(HazardError, match=message):
        pair(rows(8), torch.zeros(64, 4))


@under_mrv2
def test_b14_new_runner_captures_what_reads_a_persistent_context(setup: Setup, context) -> None:
    feed = Feeder(persistent=True)
    cache = torch.zeros(64, 4)
    pair = Pair(insert_from_context, setup)
    for n in (8, 16) * 4:
        context.slots = feed("slots", some_slots(n))
        pair(rows(n), cache)
    assert reasons(setup.explain(insert_from_context, rows(8), cache)) == {"toy::fresh": "split op"}


@captured_mrv2
def test_b14_full_check_names_the_piece_that_read_an_old_context(setup: Setup, context) -> None:
    pair = Pair(insert_from_context, setup, check="full")
    kept, cache = [some_slots(8) for _ in range(4)], torch.zeros(64, 4)

    def run() -> None:
        for context.slots in kept:
            pair(rows(8), cache)

    with pytest.raises(Dsv4Error, match="piece_0"):
        run()


def insert_from_input(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
    toy.kv_write(x.exp(), slots, cache)
    return toy.fresh(x.sin()) + cache.sum(0)


@everywhere
@pytest.mark.parametrize("persistent", [False, True])
def test_b14_step_state_as_an_input(setup: Setup, context, persistent: bool) -> None:
    feed = Feeder(persistent=persistent)
    cache = torch.zeros(64, 4)
    torch._dynamo.mark_static_address(cache)
    pair = Pair(insert_from_input, setup)
    for n in (8, 16) * 4:
        args = (rows(n), feed("slots", some_slots(n)), cache)
        if setup.runner == "mrv2" and not persistent:
            equal_or_refused(pair, "slots", *args)  # the promise of this runner is broken
        else:
            pair(*args)
    why = reasons(setup.explain(insert_from_input, *args))
    assert why.get("toy::kv_write") == ("reads step state slots" if setup.runner == "mrv1" else None)


@under_mrv2
def test_b14_new_runner_whose_buffers_move_once(setup: Setup, context) -> None:
    cache = torch.zeros(64, 4)
    torch._dynamo.mark_static_address(cache)
    pair = Pair(insert_from_input, setup)
    for feed in (Feeder(persistent=True), Feeder(persistent=True)):
        for n in (8, 16) * 3:
            equal_or_refused(pair, "slots", rows(n), feed("slots", some_slots(n)), cache)


def select(x: Tensor, k: Tensor) -> Tensor:
    topk = torch.empty(x.shape[0], 4, dtype=torch.int64)
    out = torch.empty_like(x)
    toy.context_indexer(x.sin(), k, topk)
    toy.mqa(x, k, topk, torch.arange(x.shape[0] + 1), out)
    return out.cos()


def short_then_long(context, pair: Pair) -> None:
    k = rows(64)
    context.lens = torch.zeros(1)
    for length in (4, 3, 4, 4, 64, 40, 64, 2, 5):
        context.max_len = length
        context.lens.fill_(length)
        for n in (8, 16):
            pair(rows(n), k)


@everywhere
def test_b21_split_op_chooses_its_branch_every_step(setup: Setup, context) -> None:
    short_then_long(context, Pair(select, setup, split_ops=(*SPLIT, "toy::context_indexer")))


@under_mrv1
def test_b21_reader_of_the_context_is_eager_under_the_old_runner(setup: Setup, context) -> None:
    dsv4_compile.register_op("toy::context_indexer", role="capture", reads_context=True)
    short_then_long(context, Pair(select, setup))


@captured
def test_b21_capture_takes_the_general_path(setup: Setup, context) -> None:
    dsv4_compile.register_op("toy::context_indexer", role="capture")
    context.is_capturing = staticmethod(dsv4_compile.is_capturing)
    short_then_long(context, Pair(select, setup))


def noisy(x: Tensor) -> Tensor:
    mask = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
    return toy.fresh(x * mask + torch.rand_like(x)) * mask


@pytest.mark.sampled(2)
@everywhere_and_compiled
def test_b53_every_call_draws_as_eager_does(setup: Setup) -> None:
    check(setup, noisy, x_only)


@everywhere
def test_b53_three_replays_give_three_masks(setup: Setup) -> None:
    pair = Pair(noisy, setup)
    x = rows(16)
    results = [pair(x) for _ in range(6)]
    for index, one in enumerate(results):
        assert not any(torch.equal(one, other) for other in results[:index])


@everywhere
def test_b53_same_seed_gives_the_same_numbers(setup: Setup) -> None:
    pair = Pair(noisy, setup)
    x = rows(16)
    results = []
    for _ in range(5):
        torch.manual_seed(7)
        results.append(pair(x))
    assert all(torch.equal(result, results[0]) for result in results)


@everywhere
def test_b53_generator_of_the_user(setup: Setup) -> None:
    generator = torch.Generator()

    def f(x):
        return toy.fresh(x + torch.empty_like(x).bernoulli_(0.5, generator=generator)).cos()

    compiled = Pair(f, setup).compiled
    for n in (8, 16) * 4:
        x, before = rows(n), generator.get_state()
        with torch.no_grad():
            expected = f(x)
            drawn = generator.get_state()
            generator.set_state(before)
            assert_same(compiled(x), expected, tolerant=setup.tolerant)
        assert torch.equal(generator.get_state(), drawn)


@everywhere
def test_b54_lengths_on_the_host_refilled_in_place(setup: Setup) -> None:
    def f(x, lengths):
        keep = torch.arange(x.shape[0]).unsqueeze(1) < lengths.cpu().sum()
        return toy.fresh(x * keep) + lengths.max()

    lengths = torch.zeros(3, dtype=torch.int64)
    pair = Pair(f, setup)
    for n in (8, 16) * 4:
        pair(rows(n), lengths.random_(0, 4))


@everywhere
def test_b54_scalar_tensor_on_the_host(setup: Setup) -> None:
    def f(x, scale):
        return toy.fresh(x * scale) / scale

    scale = torch.ones(())
    pair = Pair(f, setup)
    for n in (8, 16) * 4:
        pair(rows(n), scale.uniform_(1, 2))


@everywhere
def test_b54_host_work_in_a_device_graph_is_eager(setup: Setup) -> None:
    def f(x, lengths, scale):
        y = toy.fresh(x.sin() * scale)
        return y.cos(), y.cpu(), lengths * 2

    x = torch.empty(8, 4, device="meta")
    plan = setup.explain(f, x, torch.zeros(3), torch.ones(()))
    assert [op.op for piece in plan.pieces for op in piece.ops] == ["sin", "cos"]
    assert [op.op for region in plan.regions for op in region.ops] == ["mul", "toy::fresh", "cpu", "mul"]
    for op in ("mul", "cpu"):
        assert re.fullmatch(r"touches \w+ in host memory, the graph runs on meta", reasons(plan)[op])


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "uploaded", None)


def upload(q: Tensor, scale: float) -> Tensor:
    out = torch.empty_like(q)
    toy.upload(q, scale, out)
    return out


@everywhere
def test_b55_layers_with_other_constants_interleave(setup: Setup, uploads) -> None:
    def f(x):
        h = upload(x.sin(), 2.0).cos()
        return upload(h, 3.0) + upload(h, 3.0) + upload(x, 2.0)

    check(setup, f, x_only, split_ops=(*SPLIT, "toy::upload"))


def upload_for_somebody_else(setup: Setup, **options) -> tuple[Pair, Tensor]:
    """A pair captured with an upload that its warm-up made unnecessary, and what it should be called with now."""
    pair, x = Pair(lambda x: toy.fresh(upload(x.sin(), 2.0)), setup, **options), rows(8)
    with torch.no_grad():
        for _ in range(3):
            assert_same(pair.compiled(x), 4 * x.sin(), tolerant=setup.tolerant)
    upload(x, 3.0)
    return pair, x


@captured
def test_b55_captured_op_that_skips_its_upload_is_exposed(setup: Setup, uploads) -> None:
    pair, x = upload_for_somebody_else(setup)
    with torch.no_grad():
        assert_same(pair.compiled(x), 6 * x.sin(), tolerant=setup.tolerant)  # host code does not run in a replay


@captured
def test_b55_full_check_names_the_piece_that_skipped_its_upload(setup: Setup, uploads) -> None:
    pair, x = upload_for_somebody_else(setup, check="full")
    with torch.no_grad(), pytest.raises(Dsv4Error, match="piece_0"):
        pair.compiled(x)


@everywhere
def test_b55_counter_in_an_op_counts_every_call_once(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(Host, "function", staticmethod(lambda q: calls.append(q.shape[0]) or q + len(calls)))

    def f(x):
        out = torch.empty_like(x)
        toy.hook(x.sin(), out)
        return out * 2

    compiled = Pair(f, setup, split_ops=(*SPLIT, "toy::hook")).compiled
    sizes = (8, 16) * 4
    for step, n in enumerate(sizes, start=1):
        x = rows(n)
        with torch.no_grad():
            assert_same(compiled(x), (x.sin() + step) * 2, tolerant=setup.tolerant)
    assert calls == list(sizes)


class Remembering(torch.nn.Module):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = x.sin()
        self.last = h
        return toy.fresh(h) + 1


@everywhere
def test_b55_attribute_set_in_forward_is_this_calls(setup: Setup) -> None:
    model = Remembering()
    pair = Pair(model, setup)
    kept = []
    for n in (8, 16) * 4:
        x = rows(n)
        pair(x)
        kept.append((x, model.last))
    for x, last in kept:
        assert_same(last, x.sin(), tolerant=setup.tolerant)
