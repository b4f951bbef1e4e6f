"""From a `PartitionedGraph` to its `Plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from ..analysis.eager_reasons import ops_of
from ..analysis.sizes import Sizes
from ..analysis.slot_placement import aligned, extent_bytes, place_slots
from ..compat.dispatch import OpOverload, op_name
from ..compat.symbols import size_text
from ..config import Config, runner_reason
from ..graph.joined_call import op_of
from ..graph.partitioned import PartitionedGraph, Subgraph, Unit
from ..graph.source_lines import where
from ..graph.traced import GraphInput, Provenance, TensorMeta
from ..piece_compilers import piece_compiler_for
from .plan import Plan, PlanFull, PlanOp, PlanSlot, PlanSubgraph, PlanUnit, PlanValue, PlanWorkspace


def make_plan(graph: PartitionedGraph, config: Config) -> Plan:
    """Describe a partitioned graph."""
    by_node = {graph_input.node: graph_input for graph_input in graph.traced.inputs}
    compiler = piece_compiler_for(config, graph)
    return Plan(
        runner=config.resolved_runner,
        runner_reason=runner_reason(config),
        region=config.resolved_region,
        piece_compiler=compiler.name if compiler is not None and graph.subgraphs else None,
        tokens=None if graph.token_count is None else str(graph.token_count),
        sizes=tuple((str(symbol), by_node[node].name) for symbol, node in graph.traced.symbols.items()),
        scalars=tuple(_scalars(graph, by_node)),
        units=tuple(_units(graph, by_node, compiles=compiler is not None)),
        inputs=tuple(
            _value(graph, i.node, by_node) for i in graph.traced.inputs if i.provenance is not Provenance.SIZE
        ),
        traced_sizes=tuple((str(symbol), int(size)) for symbol, size in graph.traced.traced_sizes.items()),
        workspace=_workspace(graph),
        notes=(*graph.notes, *_uncalled(graph, config), *_uncaptured(graph), *_no_full(graph)),
        full=None if graph.full is None else _full(graph.full, by_node, compiles=compiler is not None),
    )


def _full(graph: PartitionedGraph, by_node: Mapping[fx.Node, GraphInput], *, compiles: bool) -> PlanFull:
    (unit,) = _units(graph, by_node, compiles=compiles)
    return PlanFull(unit=unit, workspace=_workspace(graph))


def _scalars(graph: PartitionedGraph, by_node: Mapping[fx.Node, GraphInput]) -> Iterator[str]:
    for node, effects in graph.traced.effects.items():
        if effects.bucket_scalar:
            yield by_node[node.all_input_nodes[0]].name
    for graph_input in graph.traced.inputs:
        if graph_input.provenance is Provenance.SIZE and not graph_input.measures:
            yield graph_input.name


def _units(graph: PartitionedGraph, by_node: Mapping[fx.Node, GraphInput], *, compiles: bool) -> Iterator[PlanUnit]:
    """An allocation made outside shows as given by the first unit that touches it, which is the one that fills it."""
    waiting = dict.fromkeys(graph.allocations)
    for unit in graph.units:
        filled = [node for node in waiting if node in unit.inputs]
        for node in filled:
            del waiting[node]
        yield _unit(graph, unit, filled, by_node, compiles=compiles)


def _unit(
    graph: PartitionedGraph,
    unit: Unit,
    filled: Sequence[fx.Node],
    by_node: Mapping[fx.Node, GraphInput],
    *,
    compiles: bool,
) -> PlanUnit:
    assert unit.kind != "output assembly", "it runs no op"
    return PlanUnit(
        kind=unit.kind,
        name=unit.name,
        ops=tuple(_op(graph, node, by_node) for node in unit.nodes),
        inputs=tuple(_value(graph, node, by_node) for node in unit.inputs if node not in filled),
        outputs=tuple(_value(graph, node, by_node) for node in sorted((*filled, *unit.outputs))),
        duplicate_of=graph.duplicates.get(unit.name),
        subgraphs=tuple(_subgraph(subgraph) for subgraph in graph.subgraphs.get(unit.name, ())) if compiles else (),
    )


def _subgraph(subgraph: Subgraph) -> PlanSubgraph:
    return PlanSubgraph(
        name=subgraph.unit.name,
        nodes=len(subgraph.unit.nodes),
        uncompiled=subgraph.uncompiled,
        duplicate_of=subgraph.duplicate_of,
    )


def _op(graph: PartitionedGraph, node: fx.Node, by_node: Mapping[fx.Node, GraphInput]) -> PlanOp:
    weights = (by_node[arg].name for arg in node.all_input_nodes if arg in by_node and _is_weight(by_node[arg]))
    weight = next(weights, None)
    return PlanOp(
        node=node.name,
        op=call_name(node) if weight is None else f"{call_name(node)}[{weight}]",
        reason=graph.traced.eager.get(node),
        line=where(node),
        stream=graph.streams.get(node, 0),
        weight=weight,
    )


def _is_weight(graph_input: GraphInput) -> bool:
    return graph_input.provenance is Provenance.WEIGHT


def call_name(node: fx.Node) -> str:
    """What a node calls: "dsv4::forward_mqa", "linear", "add_"."""
    op = op_of(node.target)
    if isinstance(op, OpOverload):
        return op_name(op).removesuffix(".default")
    return str(getattr(op, "__name__", op))


def _value(graph: PartitionedGraph, node: fx.Node, by_node: Mapping[fx.Node, GraphInput]) -> PlanValue:
    if graph.traced.effects[node].bucket_scalar:
        return PlanValue(name=by_node[node.all_input_nodes[0]].name, layout="number", origin="host scalar")
    graph_input = by_node.get(node)
    name = graph_input.name if graph_input else node.name
    if graph_input is not None and graph_input.provenance is Provenance.OBJECT:
        return PlanValue(name=name, layout=type(graph_input.value).__name__, origin=graph_input.provenance.value)
    return PlanValue(name=name, layout=layout(graph.traced.effects[node].result), origin=_origin(graph_input))


def _origin(graph_input: GraphInput | None) -> str:
    if graph_input is None:
        return Provenance.ACTIVATION.value
    is_number = graph_input.provenance is Provenance.SIZE and not graph_input.measures
    return "host scalar" if is_number else graph_input.provenance.value


def layout(result: object) -> str:
    """ "[s77, 64] float32" of a tensor; "number" of anything else."""
    if not isinstance(result, TensorMeta):
        return "number"
    sizes = ", ".join(map(size_text, result.shape))
    return f"[{sizes}] {str(result.dtype).removeprefix('torch.')}"


def _workspace(graph: PartitionedGraph) -> PlanWorkspace:
    sizes = Sizes(graph.traced.traced_sizes)
    placement = place_slots(graph.slots, sizes)
    names = {-1: "start", **{index: unit.name for index, unit in enumerate(graph.units)}, len(graph.units): "end"}
    slots = tuple(
        PlanSlot(
            name=slot.node.name,
            offset=offset,
            nbytes=aligned(extent_bytes(slot.meta, sizes)),
            first=names[slot.first],
            last=names[slot.last],
        )
        for slot, offset in zip(graph.slots, placement.offsets, strict=True)
    )
    return PlanWorkspace(
        slots=slots,
        planned=placement.planned,
        lower_bound=placement.lower_bound,
        unshared=placement.unshared,
    )


def _uncaptured(graph: PartitionedGraph) -> Iterator[str]:
    if graph.uncaptured is not None:
        yield f"calls run uncaptured: {graph.uncaptured}"


def _no_full(graph: PartitionedGraph) -> Iterator[str]:
    if graph.no_full is not None:
        yield f"uniform decode runs in pieces: {graph.no_full}"


def _uncalled(graph: PartitionedGraph, config: Config) -> Iterator[str]:
    called = {op for node in graph.traced.effects for op in ops_of(graph.traced, node)}
    for name in config.split_ops:
        if not any(op == name or op.partition(".")[0] == name for op in called):
            yield f"split_ops names {name}, which this graph never calls"
