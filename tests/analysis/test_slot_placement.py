"""The workspace on paper: no two values that are alive at once share a byte, and little is wasted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_plans import POLICIES
from torch import Tensor, fx
from toy_ops import SPLIT

import dsv4_compile
from benchmarks.attention_stack import stack_and_inputs
from dsv4_compile.analysis.sizes import Sizes
from dsv4_compile.analysis.slot_placement import (
    Placement,
    SlotRequest,
    aligned,
    check_placement,
    extent_bytes,
    place_requests,
    place_slots,
)
from dsv4_compile.config import Config
from dsv4_compile.errors import PlanError
from dsv4_compile.graph.partitioned import InputRole, PartitionedGraph
from dsv4_compile.graph.traced import TensorMeta
from dsv4_compile.inspect.make_plan import make_plan
from dsv4_compile.plan_graph import plan_graph
from dsv4_compile.runtime.memory.arena import slot_tensor

toy = torch.ops.toy
GRAIN = 256


@st.composite
def requests(draw: st.DrawFn) -> list[SlotRequest]:
    units = draw(st.integers(1, 8))
    made = []
    for _ in range(draw(st.integers(0, 12))):
        first = draw(st.integers(-1, units))
        nbytes = GRAIN * draw(st.sampled_from((0, 1, 1, 2, 3, 5, 8, 40)))
        made.append(SlotRequest(nbytes, first, draw(st.integers(first, units))))
    return made


def collides(wanted: Sequence[SlotRequest], offsets: Sequence[int]) -> bool:
    """By brute force: whether a block of 256 bytes has two owners in one unit."""
    for unit in range(-1, 10):
        owners: set[int] = set()
        for request, offset in zip(wanted, offsets, strict=True):
            if request.first <= unit <= request.last:
                blocks = set(range(offset // GRAIN, (offset + request.nbytes) // GRAIN))
                if owners & blocks:
                    return True
                owners |= blocks
    return False


def most_alive(wanted: Sequence[SlotRequest]) -> int:
    return max(sum(r.nbytes for r in wanted if r.first <= unit <= r.last) for unit in range(-1, 10))


@given(requests())
@settings(max_examples=300, deadline=None)
def test_placement_against_brute_force(wanted: list[SlotRequest]) -> None:
    placement = place_requests(wanted)
    check_placement(wanted, placement)
    assert not collides(wanted, placement.offsets)
    assert all(offset % GRAIN == 0 for offset in placement.offsets)
    assert placement.planned == max((o + r.nbytes for o, r in zip(placement.offsets, wanted, strict=True)), default=0)
    assert placement.lower_bound == most_alive(wanted) <= placement.planned
    assert placement.planned <= placement.unshared == sum(request.nbytes for request in wanted)


@given(requests(), st.data())
@settings(max_examples=300, deadline=None)
def test_check_raises_exactly_where_brute_force_finds_two_owners(
    wanted: list[SlotRequest], data: st.DataObject
) -> None:
    offsets = tuple(GRAIN * data.draw(st.integers(0, 30)) for _ in wanted)
    room = max((o + r.nbytes for o, r in zip(offsets, wanted, strict=True)), default=0)
    placement = Placement(offsets, planned=room, lower_bound=0, unshared=0)
    if collides(wanted, offsets):
        with pytest.raises(PlanError, match=r"workspace: in unit -?\d+, bytes up to \d+ and from \d+ are both in use"):
            check_placement(wanted, placement)
    else:
        check_placement(wanted, placement)


TWO = (SlotRequest(512, 0, 1), SlotRequest(256, 1, 2))


@pytest.mark.parametrize(
    ("offsets", "planned", "complaint"),
    [
        ((0, 256), 768, "in unit 1, bytes up to 512 and from 256 are both in use"),
        ((0, 513), 1024, "a slot of unit 1 is not aligned or outside of the arena"),
        ((0, 512), 512, "a slot of unit 1 is not aligned or outside of the arena"),
    ],
)
def test_placement_broken_on_purpose(offsets: tuple[int, int], planned: int, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        check_placement(TWO, Placement(offsets, planned=planned, lower_bound=0, unshared=0))


def test_plan_that_forgets_a_lifetime_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check does not lean on the placement's own idea of overlap."""
    monkeypatch.setattr("dsv4_compile.analysis.slot_placement._lowest_offset", lambda request, placed: 0)
    with pytest.raises(PlanError, match="both in use"):
        plans_of(lambda x: toy.fresh(x.sin()) + x.cos(), (torch.randn(5, 4),), [{"split_ops": SPLIT}])


# slots


def meta(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(tuple(shape), tuple(stride), 0, dtype, torch.device("cpu"), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.int8])
@pytest.mark.parametrize(
    ("shape", "stride", "elements"),
    [
        ((5, 4), (4, 1), 20),
        ((5, 4), (1, 5), 20),
        ((5, 4), (8, 1), 36),
        ((5, 4), (0, 1), 4),
        ((), (), 1),
        ((0, 4), (4, 1), 0),
        ((3, 0), (1, 1), 0),
    ],
)
def test_slot_has_its_layout_and_touches_only_its_bytes(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], elements: int
) -> None:
    layout = meta(shape, stride, dtype)
    nbytes = extent_bytes(layout, Sizes({}))
    assert nbytes == elements * dtype.itemsize
    arena = torch.full((2048,), 0x55, dtype=torch.uint8)
    slot = slot_tensor(arena, 512, layout, Sizes({}))
    assert (slot.shape, slot.stride(), slot.dtype) == (torch.Size(shape), stride, dtype)
    slot.fill_(1)
    changed = (arena != 0x55).nonzero()
    assert all(512 <= int(index) < 512 + nbytes for index in changed)
    assert aligned(nbytes) % GRAIN == 0 <= aligned(nbytes) - nbytes < GRAIN


# plans of whole graphs


def plans_of(
    function: object, args: Sequence[object], options: Sequence[Mapping[str, object]]
) -> list[PartitionedGraph]:
    """The plans of one graph under several options; it is traced once."""
    plans: list[PartitionedGraph] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> object:
        for given_options in options:
            config = Config.from_options(given_options)
            plans.append(plan_graph(gm, example_inputs, config, lambda *stage: None))
            make_plan(plans[-1], config)
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(*args)
    return plans


def sizes_of(graph: PartitionedGraph, tokens: int) -> Sizes:
    """The sizes of a call; every size symbol stands for the tokens."""
    return Sizes(dict.fromkeys(graph.traced.symbols, tokens))


POLICY_OPTIONS = [{"runner": runner, "region": region} for runner, region in POLICIES.values()]


@pytest.fixture(scope="module", params=[3, pytest.param(61, marks=pytest.mark.exhaustive)])
def stack_plans(request: pytest.FixtureRequest) -> tuple[int, list[PartitionedGraph]]:
    stack, inputs = stack_and_inputs(request.param)
    return request.param, plans_of(stack, inputs, POLICY_OPTIONS)


def test_stacks_waste_less_than_five_percent(stack_plans: tuple[int, list[PartitionedGraph]]) -> None:
    layers, plans = stack_plans
    for graph in plans:
        for tokens in (2, 3, 8, 31, 64, 100, 256):
            placement = place_slots(graph.slots, sizes_of(graph, tokens))
            assert placement.lower_bound <= placement.planned <= 1.05 * placement.lower_bound
            assert placement.planned < placement.unshared / (1.2 if layers == 3 else 20)  # layers share


def test_slots_live_from_their_making_to_their_last_use(stack_plans: tuple[int, list[PartitionedGraph]]) -> None:
    """Lifetimes are read off the units once more, and the bytes of a bucket compared pair by pair."""
    for graph in stack_plans[1]:
        lives, sizes = lifetimes(graph), sizes_of(graph, 31)
        offsets = place_slots(graph.slots, sizes).offsets
        assert {slot.node for slot in graph.slots} == crossing(graph)
        spans = [
            (*lives[slot.node], offset, offset + extent_bytes(slot.meta, sizes))
            for slot, offset in zip(graph.slots, offsets, strict=True)
        ]
        for (first, last, start, end), (other_first, other_last, other_start, other_end) in combinations(spans, 2):
            alive_at_once = first <= other_last and other_first <= last
            assert not alive_at_once or end <= other_start or other_end <= start


def lifetimes(graph: PartitionedGraph) -> dict[fx.Node, tuple[int, int]]:
    """For every value the first and the last unit that mentions it; copied in inputs are there from the start."""
    assert graph.output_assembly is not None
    seen: dict[fx.Node, list[int]] = defaultdict(list)
    for index, unit in enumerate((*graph.units, graph.output_assembly)):
        for node in (*unit.inputs, *unit.outputs):
            seen[node].append(index)
    return {
        node: (-1 if graph.roles.get(node) is InputRole.COPIED_IN else min(units), max(units))
        for node, units in seen.items()
    }


def crossing(graph: PartitionedGraph) -> set[fx.Node]:
    """Tensors that a captured piece takes or gives at an address of the program's own, and shared allocations."""
    pieces = [unit for unit in graph.units if unit.kind == "piece"]
    touched = {node for unit in pieces for node in (*unit.inputs, *unit.outputs)} | set(graph.allocations)
    bound = (InputRole.STATIC, InputRole.BOUND, InputRole.NUMBER)
    own = {node for node in touched if graph.roles.get(node) not in bound}
    return {node for node in own if isinstance(graph.traced.effects[node].result, TensorMeta)}


@pytest.mark.exhaustive
def test_layers_share() -> None:
    """11 layers need what 3 need, whatever the policy."""
    needed = []
    for layers in (3, 11):
        plans = plans_of(*stack_and_inputs(layers), POLICY_OPTIONS)
        needed.append([place_slots(graph.slots, sizes_of(graph, 64)).planned for graph in plans])
    for three, eleven in zip(*needed, strict=True):
        assert three <= eleven <= 1.1 * three


def test_report_shows_planned_bytes_lower_bound_and_unshared_sum() -> None:
    def function(x: Tensor) -> Tensor:
        return toy.fresh(x.sin()) + x.cos()

    plan = dsv4_compile.explain(function, torch.randn(5, 4), options={"split_ops": SPLIT})
    # [5, 4] floats take 256 bytes; x, sin and fresh are alive in the region, and add may lie where sin was
    assert (plan.workspace.planned, plan.workspace.lower_bound, plan.workspace.unshared) == (3 * 256, 3 * 256, 4 * 256)
    assert "    768 bytes planned, 768 is the lower bound, 1024 if nothing were shared\n" in str(plan)
