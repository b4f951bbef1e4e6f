"""Run a program eagerly, under every plan, and compiled, and compare.

A program is traced once for each kind of token count (one, and more than one). The traced graph is planned under
every policy and runner; each plan is checked against `program_oracle` and run, and the calls themselves go through the
real backend under one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from case_helpers import bounds
from program_oracle import Deeds, clone_all, snapshot, watch, working_ops
from random_programs import make_arguments
from torch import Tensor, fx
from toy_ops import LOG, SPLIT, StepContext

import dsv4_compile
from dsv4_compile import uniform_decode
from dsv4_compile.backend import dsv4_piecewise
from dsv4_compile.config import Config
from dsv4_compile.errors import HazardError
from dsv4_compile.graph.partitioned import PartitionedGraph
from dsv4_compile.passes.check_hazards import check_hazards
from dsv4_compile.plan_graph import plan_graph
from dsv4_compile.runtime.pieces.pieces import Pieces
from dsv4_compile.runtime.traced_call import TracedCall
from dsv4_compile.runtime.uncaptured import UncapturedCallable

POLICIES = ("narrow", "wide", "minimal")
COMBINATIONS = [(runner, region) for runner in ("mrv1", "mrv2") for region in POLICIES]
Combination = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the calls of a program run.

    Attributes:
        combination: runner and region.
        engine: "off" or "host".
        check: as the option.
        piece_compiler: likewise.
        tokens: token count of each call; the first twice for a warm-up and a capture.
        overlaps: which inputs share memory, by call and from the start again; never in a call that is traced.
        decode: the split ops are registered as capturable, and three calls of four are said to be uniform decode.
    """

    combination: Combination
    engine: str
    check: str
    piece_compiler: str = "eager"
    tokens: Sequence[int]
    overlaps: Sequence[str] = ("apart",)
    decode: bool = False

    @property
    def new_step_state(self) -> bool:
        """Each call brings new tensors, as the old runner does; under narrow it may be the other one in its place."""
        return self.combination[0] == "mrv1" and self.combination[1] != "narrow"

    def options(self, refused: set[Combination]) -> dict[str, Any]:
        """Options of the backend; the other runner where this combination is refused."""
        runner, region = ("mrv2", self.combination[1]) if self.combination in refused else self.combination
        more = {} if self.engine == "off" else {"check": self.check}
        named = {"engine": self.engine, "runner": runner, "region": region, "piece_compiler": self.piece_compiler}
        return {"split_ops": SPLIT, **named, **more}


def register_step_ops() -> None:
    dsv4_compile.register_op("toy::kv_write", role="prepare", step_state=("slots",))
    dsv4_compile.register_op("toy::context_write", role="prepare", reads_context=True)


def promise_splits(promise: str) -> None:
    """Register the split ops of the programs; `tick` looks at data on the host, in any batch."""
    for name in SPLIT:
        dsv4_compile.register_op(name, role="split", capturable="never" if name == "toy::tick" else promise)


def check_program(function: Callable[..., Any], setting: Setting) -> None:
    """Compile a program and compare its calls with eager."""
    torch._dynamo.reset()
    promise_splits("decode" if setting.decode else "never")
    compiled = torch.compile(function, backend=CheckedBackend(setting), dynamic=True, fullgraph=True)
    caches: list[Tensor] = []
    traced: set[int] = set()
    for number, arguments in enumerate(arguments_of_calls(setting)):
        if number == 0:
            caches = clone_all([arguments["cache"]]) + clone_all([arguments["cache"]])
            torch._dynamo.mark_static_address(caches[1])
        seen = []
        kind = min(arguments["x"].shape[0], 2)  # no token, one, and more are graphs of their own
        overlap = OVERLAPS[setting.overlaps[number % len(setting.overlaps)] if kind in traced else "apart"]
        traced.add(kind)
        if not is_legal(function, arguments, caches[0], overlap):
            continue
        for run, cache in zip((function, compiled), caches, strict=True):
            step = arguments["step"]
            given = dict(zip(arguments, clone_all(list(arguments.values())), strict=True))
            given |= {"cache": cache, "step": step}
            given |= overlap(given["x"], given["y"], cache)
            LOG.clear()
            with uniform_decode() if setting.decode and number % 4 < 3 else nullcontext():
                returned = run(**given)
            seen.append([*snapshot(given, returned), list(LOG)])
        tolerant = setting.piece_compiler == "inductor"
        assert all(map(partial(alike, tolerant=tolerant), *seen)), f"call {number} differs from eager"


def _in_one_memory(x: Tensor, y: Tensor, start: int) -> dict[str, Tensor]:
    """Both with the strides that they have, which Dynamo guards; y begins so many elements after x."""
    memory = torch.cat([x.reshape(-1), y.reshape(-1), y.reshape(-1), torch.zeros(8)])
    return {"x": memory.as_strided(x.size(), x.stride()), "y": memory.as_strided(y.size(), y.stride(), start)}


def _rows_of_the_cache(x: Tensor, y: Tensor, cache: Tensor) -> dict[str, Tensor]:
    return {"x": cache[2 : 2 + len(x)]}


# new x, y or both from x, y and the cache
OVERLAPS: dict[str, Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]] = {
    "apart": lambda x, y, cache: {},
    "shifted": lambda x, y, cache: _in_one_memory(x, y, 3),
    "the same start": lambda x, y, cache: _in_one_memory(x, y, 0),
    "rows of the cache": _rows_of_the_cache,
}


def is_legal(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    cache: Tensor,
    overlap: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]],
) -> bool:
    """Whether eager runs a program on such inputs; torch refuses some ops whose operands overlap."""
    given = dict(zip(arguments, clone_all(list(arguments.values())), strict=True)) | {"cache": cache.clone()}
    given |= overlap(given["x"], given["y"], given["cache"])
    try:
        function(**given)
    except RuntimeError:
        return False
    return True


def alike(expected: Any, actual: Any, *, tolerant: bool) -> bool:
    """Whether two items of snapshots, or logs, are the same; floats but for rounding if `tolerant`."""
    if not tolerant or expected == actual:
        return bool(expected == actual)
    if isinstance(expected, list):
        return len(expected) == len(actual) and _close(torch.tensor(expected), torch.tensor(actual))
    (layout, owner, memory), (other_layout, other_owner, other_memory) = expected, actual
    dtype = layout[0]
    if (layout, owner, len(memory)) != (other_layout, other_owner, len(other_memory)):
        return False
    return _close(*(torch.frombuffer(bytearray(data), dtype=dtype) for data in (memory, other_memory)))


def _close(expected: Tensor, actual: Tensor) -> bool:
    return torch.allclose(actual, expected, **bounds(expected, tolerant=True), equal_nan=True)


def arguments_of_calls(setting: Setting) -> Iterator[dict[str, Any]]:
    """The arguments of each call; the step state and the context come as the runner at hand brings them."""
    persistent = torch.full((2, max(setting.tokens)), -1)
    for seed, n in enumerate(setting.tokens):
        arguments = make_arguments(n, seed)
        slots = torch.stack([arguments["step"], arguments["step"].flip(0)])
        if not setting.new_step_state:
            slots = persistent[:, :n].copy_(slots)
        arguments["step"], StepContext.slots = slots[0], slots[1]
        yield arguments
    StepContext.slots = None


class CheckedBackend:
    """The backend, with every plan of the same graph checked beside it."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs, refused = plan_all(gm, example_inputs)
        run = dsv4_piecewise(gm, example_inputs, options=self._setting.options(refused))
        checked = False

        def call(*args: Any) -> Any:
            nonlocal checked
            if not checked:
                check_plans(gm, args, graphs, refused)
                checked = True
            return run(*args)

        return call


def plan_all(
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[dict[Combination, PartitionedGraph], set[Combination]]:
    """The graph of every combination that is not refused, and those that are.

    Under narrow and wide the runner only matters to the hazard check, so one graph serves both.
    """
    graphs: dict[Combination, PartitionedGraph] = {}
    refused: set[Combination] = set()
    for runner, region in COMBINATIONS:
        if runner == "mrv2" or region == "minimal":
            options = {"split_ops": SPLIT, "engine": "off", "runner": runner, "region": region}
            config = Config.from_options(options)
            graphs[runner, region] = plan_graph(gm, example_inputs, config, lambda stage, graph: None)
    for region in ("narrow", "wide"):
        try:
            check_hazards(graphs["mrv2", region].traced, runner="mrv1")
            graphs["mrv1", region] = graphs["mrv2", region]
        except HazardError:
            refused.add(("mrv1", region))
    return graphs, refused


def check_plans(
    gm: fx.GraphModule, args: Sequence[Any], graphs: Mapping[Combination, PartitionedGraph], refused: set[Combination]
) -> None:
    """Check every plan on paper, then by a call of it."""
    deeds = watch(gm, args)
    expected, ops = outcome(gm, args), working_ops(gm, args)
    check_refusals(deeds, refused)
    for combination, graph in graphs.items():
        check_graph(graph, deeds, *combination)
    full = [graph.full for graph in graphs.values() if graph.full is not None]
    for graph in {id(graph): graph for graph in (*graphs.values(), *full)}.values():
        run = UncapturedCallable(graph, Pieces(graph, {}), TracedCall(graph.traced, args))
        assert working_ops(run, args) == ops, "some op runs twice, or not at all"
        assert outcome(run, args) == expected, "a plan computes something else"


def outcome(run: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """What a call on copies of the arguments returns, changes and logs."""
    copies, logged = clone_all(args), len(LOG)
    returned = run(*copies)
    seen = [*snapshot(copies, returned), LOG[logged:]]
    del LOG[logged:]
    return seen


def check_refusals(deeds: Deeds, refused: set[Combination]) -> None:
    """Exactly a captured reader of step state under the old runner is refused."""
    captured = {deed.name for deed in deeds.working} - deeds.must_be_eager("mrv1", "narrow")
    hazard = any(deeds.reads_step(deeds.by_name[name]) for name in captured)
    assert refused == ({("mrv1", "narrow")} if hazard else set()), "a hazard is missed or made up"


def check_graph(graph: PartitionedGraph, deeds: Deeds, runner: str, region: str) -> None:
    placed = [node.name for unit in graph.units for node in unit.nodes]
    in_order = [deed.name for deed in deeds.working]
    assert sorted(placed) == sorted(in_order), "a node is lost or doubled"
    for early, late in deeds.ordered_pairs():
        assert placed.index(early) < placed.index(late), f"{late} passed {early}"
    assert region == "minimal" or placed == in_order, "a node moved"
    check_regions(graph, deeds, runner, region)
    check_crossings(graph, deeds)


def check_regions(graph: PartitionedGraph, deeds: Deeds, runner: str, region: str) -> None:
    """Regions hold what the policy says and no more, and moving never makes more of them."""
    expected = deeds.must_be_eager(runner, region)
    regions = [unit for unit in graph.units if unit.kind == "region"]
    found = {node.name for unit in regions for node in unit.nodes}
    assert found == expected, f"{sorted(found ^ expected)} is eager and should not be, or the reverse"
    assert all(unit.nodes for unit in graph.units), "a unit is empty"
    in_order = [deed.name for deed in deeds.working if deed.name in expected]
    assert [node.name for unit in regions for node in unit.nodes] == in_order, "eager nodes changed places"
    order = [deed.name in expected for deed in deeds.working]
    runs = sum(eager and not before for before, eager in zip([False, *order], order, strict=False))
    assert len(regions) <= runs, "moving made regions"
    assert region == "minimal" or len(regions) == runs, "regions are not the runs of eager nodes"


def check_crossings(graph: PartitionedGraph, deeds: Deeds) -> None:
    """Only numbers and tensors that own their memory cross, each storage once."""
    inputs = {graph_input.node.name for graph_input in graph.traced.inputs}
    crossing = {node for unit in graph.units for node in (*unit.inputs, *unit.outputs) if node.name not in inputs}
    owners = []
    for node in crossing:
        value = deeds.by_name[node.name].value if node.name in deeds.by_name else node.meta["example_value"]
        assert isinstance(value, (int, float, torch.SymInt, Tensor)), f"{node.name} crosses as {type(value)}"
        if isinstance(value, Tensor):
            owners.append(value.untyped_storage()._cdata)
            maker = deeds.made_by[owners[-1]]
            assert maker in (node.name, *(arg.name for arg in node.all_input_nodes)), f"{node.name} is a view"
            assert maker not in inputs, f"{node.name} is a view of an input"
    assert len(owners) == len(set(owners)), "a storage crosses twice"
