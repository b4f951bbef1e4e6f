"""From a partitioned `Draft` to its `Plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from .compat import HigherOrderOperator, OpOverload, expr_of, hint_of, op_name, pytree, size_text
from .config import Config, runner_reason
from .draft import Draft, GraphInput, Part, Provenance, TensorMeta, Unit
from .op_facts import bind_arguments
from .ops.registry import find_op
from .piece_compilers import piece_compiler_for
from .plan import Plan, PlanOp, PlanPart, PlanSlot, PlanUnit, PlanValue, PlanWorkspace
from .reasons import ops_of, why_split
from .runtime.sizes import Sizes
from .runtime.workspace import aligned, extent_bytes, place_slots
from .userlines import where


def make_plan(draft: Draft, config: Config) -> Plan:
    """Describe a partitioned draft."""
    by_node = {graph_input.node: graph_input for graph_input in draft.inputs}
    compiler = piece_compiler_for(config, draft)
    return Plan(
        runner=config.resolved_runner,
        runner_reason=runner_reason(config),
        region=config.resolved_region,
        piece_compiler=compiler.name if compiler is not None and draft.parts else None,
        tokens=None if (tokens := token_count(draft)) is None else str(tokens),
        sizes=tuple((str(symbol), by_node[node].name) for symbol, node in draft.symbols.items()),
        scalars=tuple(_scalars(draft, by_node)),
        units=tuple(_units(draft, by_node, compiles=compiler is not None)),
        inputs=tuple(_value(draft, i.node, by_node) for i in draft.inputs if i.provenance is not Provenance.SIZE),
        traced_sizes=tuple(
            (str(symbol), hint_of(node.meta["example_value"])) for symbol, node in draft.symbols.items()
        ),
        workspace=_workspace(draft),
        notes=(*draft.notes, *_uncalled(draft, config), *_uncaptured(draft)),
    )


def token_count(draft: Draft) -> sympy.Expr | None:
    """Dim 0 of the first tensor argument (or the registered one) of the first split op, as an expression.

    Without a split op: dim 0 of the first tensor input that is not static.
    """
    for node in draft.working_nodes():
        if why_split(draft, node) and not isinstance(node.target, HigherOrderOperator):
            tokens = _tokens_of_call(draft, node)
            if tokens is None or tokens.free_symbols <= draft.symbols.keys():
                return tokens  # a split op on rows that data selects is no measure of the batch
    for graph_input in draft.inputs:
        if isinstance(graph_input.value, torch.Tensor) and not graph_input.static and graph_input.value.dim():
            return expr_of(graph_input.value.shape[0])
    return None


def _tokens_of_call(draft: Draft, node: fx.Node) -> sympy.Expr | None:
    wanted: list[Any] = [*node.args, *node.kwargs.values()]
    if isinstance(node.target, OpOverload):
        registered = find_op(draft.ops, op_name(node.target))
        if registered is not None and registered.tokens is not None:
            wanted = [bind_arguments(node.target, node.args, node.kwargs).get(registered.tokens)]
    for arg in wanted:
        for leaf in pytree.tree_leaves(arg):
            meta = draft.effects[leaf].result if isinstance(leaf, fx.Node) else None
            if isinstance(meta, TensorMeta) and meta.shape:
                return expr_of(meta.shape[0])
    return None


def _scalars(draft: Draft, by_node: Mapping[fx.Node, GraphInput]) -> Iterator[str]:
    for node, effects in draft.effects.items():
        if effects.bucket_scalar:
            yield by_node[node.all_input_nodes[0]].name
    for graph_input in draft.inputs:
        if graph_input.provenance is Provenance.SIZE and not graph_input.measures:
            yield graph_input.name


def _units(draft: Draft, by_node: Mapping[fx.Node, GraphInput], *, compiles: bool) -> Iterator[PlanUnit]:
    """An allocation made outside shows as given by the first unit that touches it, which is the one that fills it."""
    waiting = dict.fromkeys(draft.allocations)
    for unit in draft.units:
        filled = [node for node in waiting if node in unit.inputs]
        for node in filled:
            del waiting[node]
        yield _unit(draft, unit, filled, by_node, compiles=compiles)


def _unit(
    draft: Draft, unit: Unit, filled: Sequence[fx.Node], by_node: Mapping[fx.Node, GraphInput], *, compiles: bool
) -> PlanUnit:
    assert unit.kind != "epilogue", "it runs no op"
    return PlanUnit(
        kind=unit.kind,
        name=unit.name,
        ops=tuple(_op(draft, node, by_node) for node in unit.nodes),
        takes=tuple(_value(draft, node, by_node) for node in unit.inputs if node not in filled),
        gives=tuple(_value(draft, node, by_node) for node in sorted((*filled, *unit.outputs))),
        copy_of=draft.copies.get(unit.name),
        parts=tuple(_part(part) for part in draft.parts.get(unit.name, ())) if compiles else (),
    )


def _part(part: Part) -> PlanPart:
    return PlanPart(name=part.unit.name, nodes=len(part.unit.nodes), uncompiled=part.uncompiled, copy_of=part.copy_of)


def _op(draft: Draft, node: fx.Node, by_node: Mapping[fx.Node, GraphInput]) -> PlanOp:
    weights = (by_node[arg].name for arg in node.all_input_nodes if arg in by_node and _is_weight(by_node[arg]))
    weight = next(weights, None)
    return PlanOp(
        node=node.name,
        op=call_name(node) if weight is None else f"{call_name(node)}[{weight}]",
        reason=draft.eager.get(node),
        line=where(node),
        lane=draft.lanes.get(node, 0),
        weight=weight,
    )


def _is_weight(graph_input: GraphInput) -> bool:
    return graph_input.provenance is Provenance.WEIGHT


def call_name(node: fx.Node) -> str:
    """What a node calls: "dsv4::forward_mqa", "linear", "add_"."""
    if isinstance(node.target, OpOverload):
        return op_name(node.target).removesuffix(".default")
    return str(getattr(node.target, "__name__", node.target))


def _value(draft: Draft, node: fx.Node, by_node: Mapping[fx.Node, GraphInput]) -> PlanValue:
    if draft.effects[node].bucket_scalar:
        return PlanValue(name=by_node[node.all_input_nodes[0]].name, layout="number", origin="host scalar")
    graph_input = by_node.get(node)
    name = graph_input.name if graph_input else node.name
    return PlanValue(name=name, layout=layout(draft.effects[node].result), origin=_origin(graph_input))


def _origin(graph_input: GraphInput | None) -> str:
    if graph_input is None:
        return Provenance.ACTIVATION.value
    is_number = graph_input.provenance is Provenance.SIZE and not graph_input.measures
    return "host scalar" if is_number else graph_input.provenance.value


def layout(result: Any) -> str:
    """ "[s77, 64] float32" of a tensor; "number" of anything else."""
    if not isinstance(result, TensorMeta):
        return "number"
    sizes = ", ".join(map(size_text, result.shape))
    return f"[{sizes}] {str(result.dtype).removeprefix('torch.')}"


def _workspace(draft: Draft) -> PlanWorkspace:
    sizes = Sizes({symbol: hint_of(node.meta["example_value"]) for symbol, node in draft.symbols.items()})
    placement = place_slots(draft.slots, sizes)
    names = {-1: "start", **{index: unit.name for index, unit in enumerate(draft.units)}, len(draft.units): "end"}
    slots = tuple(
        PlanSlot(
            name=slot.node.name,
            offset=offset,
            nbytes=aligned(extent_bytes(slot.meta, sizes)),
            first=names[slot.first],
            last=names[slot.last],
        )
        for slot, offset in zip(draft.slots, placement.offsets, strict=True)
    )
    return PlanWorkspace(
        slots=slots,
        planned=placement.planned,
        lower_bound=placement.lower_bound,
        unshared=placement.unshared,
    )


def _uncaptured(draft: Draft) -> Iterator[str]:
    if draft.uncaptured is not None:
        yield f"calls run uncaptured: {draft.uncaptured}"


def _uncalled(draft: Draft, config: Config) -> Iterator[str]:
    called = {op for node in draft.effects for op in ops_of(draft, node)}
    for name in config.split_ops:
        if not any(op == name or op.partition(".")[0] == name for op in called):
            yield f"split_ops names {name}, which this graph never calls"
