"""The frozen branch of a preparation op: garbage where nothing checks, an error where the check runs, right otherwise.

`toy::context_write` writes the cache if there is a step context and does nothing if there is none. A runner of the old
kind has none when it captures: recorded is nothing, for ever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from case_helpers import rows
from layer_plans import mark_request_dims
from paging import Paging
from runtime_helpers import compile_host
from serving import CONFIG
from torch import Tensor, nn
from toy_ops import StepContext

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.errors import HazardError, ReplayMismatchError
from dsv4_compile.graph.partitioned import PartitionedGraph
from dsv4_compile.models.deepseek_v4 import AttentionStack, bind_caches

toy = torch.ops.toy


class Model(nn.Module):
    """Projections, a cache write that reads the step context, attention, and a look at the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("cache", torch.zeros(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        kv = (x @ self.w).sin()
        toy.context_write(kv, self.cache)
        out = torch.empty_like(kv)
        toy.attn(kv, out)
        return out @ self.w + self.cache.sum(0)


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    """The op is registered as what it is, and there is no step context to begin with."""
    dsv4_compile.register_op("toy::context_write", role="prepare", reads_context=True)
    before, StepContext.slots = StepContext.slots, None
    yield
    StepContext.slots = before


def new_slots(n: int) -> Tensor:
    return torch.randperm(16)[:n]


def serve(model: Model, set_context: Callable[[Tensor], None], **options: object) -> list[bool]:
    """Capture with dummy inputs and no context, then serve: whether each step equals eager."""
    compiled, eager = compile_host(model, **options), copy.deepcopy(model)
    dsv4_compile.capture(compiled, rows, sizes=(5, 6), progress=False)
    right = []
    for n in (5, 6, 5, 6):
        set_context(new_slots(n))
        x = rows(n)
        with torch.no_grad():
            result, wanted = compiled(x), eager(x)
        right.append(torch.equal(result, wanted) and torch.equal(model.cache, eager.cache))
        StepContext.slots = None
    return right


def fresh_context(slots: Tensor) -> None:
    StepContext.slots = slots


def test_without_the_check_a_captured_reader_of_the_context_gives_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed failure: no error, and the cache is never written."""

    def no_check(graph: PartitionedGraph, *, runner: str) -> PartitionedGraph:
        return graph

    monkeypatch.setattr("dsv4_compile.passes.check_hazards", no_check)
    model = Model()
    with counters.expect(replays=2 + 4, uncaptured_calls=2):
        assert serve(model, fresh_context, runner="mrv1", region="narrow") == [False] * 4
    assert not model.cache.any()


def test_with_the_check_it_is_an_error() -> None:
    match = "op toy::context_write.default reads the step context .* but it would be captured under mrv1, at .*kv"
    with pytest.raises(HazardError, match=match):
        serve(Model(), fresh_context, runner="mrv1", region="narrow")


@pytest.mark.parametrize("region", ["runner", "wide", "minimal"])
def test_the_regions_of_the_old_runner_are_right(region: str) -> None:
    with counters.expect(replays=2 + 4, uncaptured_calls=2):
        assert serve(Model(), fresh_context, runner="mrv1", region=region) == [True] * 4


def test_minimal_region_keeps_the_projections_captured() -> None:
    plan = dsv4_compile.explain(
        Model(), rows(5), options={"runner": "mrv1", "region": "minimal", "split_ops": ("toy::attn",)}
    )
    assert [op.op for piece in plan.pieces for op in piece.ops] == ["matmul[w]", "sin", "matmul[w]", "sum", "add"]


class PersistentContext:
    """The context of the new runner: it is complete when the model is captured, and refilled in place."""

    def __init__(self) -> None:
        self.buffers = {n: torch.full((n,), -1) for n in (5, 6)}

    def rows(self, n: int) -> Tensor:
        """Dummy inputs, for which the context is there."""
        StepContext.slots = self.buffers[n]
        return rows(n)

    def refill(self, slots: Tensor) -> None:
        self.buffers[len(slots)].copy_(slots)
        StepContext.slots = self.buffers[len(slots)]

    def replace(self, slots: Tensor) -> None:
        StepContext.slots = slots


@pytest.mark.parametrize("region", ["runner", "narrow", "minimal"])
def test_new_runner_with_a_persistent_context_may_capture_the_reader(region: str) -> None:
    context, model = PersistentContext(), Model()
    compiled, eager = compile_host(model, runner="mrv2", region=region), copy.deepcopy(model)
    dsv4_compile.capture(compiled, context.rows, sizes=(5, 6), progress=False)
    assert not model.cache.any()
    with counters.expect(replays=6, eager_op_calls=6):  # the attention alone is eager
        for n in (5, 6) * 3:
            context.refill(new_slots(n))
            x = rows(n)
            with torch.no_grad():
                assert torch.equal(compiled(x), eager(x))
            assert torch.equal(model.cache, eager.cache)


def test_context_that_breaks_the_promise_is_found_by_a_full_check() -> None:
    """No input of the graph moves, so only a comparison with eager can tell."""
    context, model = PersistentContext(), Model()
    compiled = compile_host(model, runner="mrv2", check="full")
    dsv4_compile.capture(compiled, context.rows, sizes=(5,), progress=False)
    context.replace(new_slots(5))
    with torch.no_grad(), pytest.raises(ReplayMismatchError, match=r"the replay of piece_0 differs .* wrote to cache"):
        compiled(rows(5))


def test_the_attention_stack_is_refused_with_op_input_and_line() -> None:
    stack, paging = AttentionStack(CONFIG), Paging(CONFIG, [40, 40], max_reqs=3)
    bind_caches(stack, paging.caches())
    positions, step = paging.step([(0, 0, 5), (1, 0, 8)])
    ids = torch.zeros(13, dtype=torch.long)
    compiled = compile_host(stack, runner="mrv1", region="narrow")
    match = r"op dsv4::qnorm_rope_kv_insert.default reads the step state step\.swa_slot_mapping .* at .*attention\.py"
    with torch.no_grad(), pytest.raises(HazardError, match=match):
        compiled(ids, positions, mark_request_dims(step))
