"""Why a node runs eagerly: each question is a function that answers None or a phrase, and the phrase is shown as is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..compat.dispatch import OpOverload, OpOverloadPacket, op_name, pytree, wrapped_op
from ..graph.joined_call import op_of
from ..graph.op_properties import OWN_NAMESPACES, strided_name
from ..graph.traced import Access, Provenance, TensorMeta, TracedGraph
from ..ops.registry import Role, find_op


def why_split(traced: TracedGraph, node: fx.Node) -> str | None:
    """The node is a split op, or runs one inside."""
    op = op_of(node.target)
    own = op_name(op) if isinstance(op, OpOverload) else None
    if own is not None and has_role(traced, own, "split"):
        return "split op"
    inside = sorted(op for op in ops_of(traced, node) if has_role(traced, op, "split"))
    return f"runs the split op {', '.join(inside)} inside" if inside else None


def ops_of(traced: TracedGraph, node: fx.Node) -> set[str]:
    """Names of all ops that a node calls, itself or in the body of a higher-order op."""
    wrapped = wrapped_op(node)
    called = {op_name(wrapped)} if wrapped is not None else set(traced.effects[node].ops)
    return called.union(_ops_in_bodies(traced, node))


def why_reads_step(traced: TracedGraph, node: fx.Node) -> str | None:
    """The node reads step state or the step context."""
    effects = traced.effects[node]
    for access in effects.accesses:
        if access.step_state or traced.storages.get(access.storage) is Provenance.STEP_STATE:
            return f"reads step state {step_state_name(traced, access)}"
    for op in effects.ops:
        registered = find_op(traced.ops, op)
        if registered and registered.reads_context:
            return "reads the step context"
    return None


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What the question whether a node can be captured needs to know of the whole graph.

    Attributes:
        device: where the graph works.
        numbers: nodes that carry a data-dependent scalar, and views that one chooses.
        sized: nodes whose size depends on data, and views of them, each with the name of the former.
        strided: strided views of inputs that move; a copied in copy has no memory outside of what the input shows.
    """

    device: torch.device
    numbers: frozenset[fx.Node]
    sized: Mapping[fx.Node, str]
    strided: frozenset[fx.Node]


def graph_facts(traced: TracedGraph) -> GraphFacts:
    """Gather the facts, with one pass over the graph for each."""
    return GraphFacts(
        device=traced.device,
        numbers=frozenset(_data_dependent_scalars(traced)),
        sized=_data_dependent_sizes(traced),
        strided=frozenset(_strided_views(traced)),
    )


def why_not_capturable(traced: TracedGraph, node: fx.Node, facts: GraphFacts) -> str | None:
    """A graph cannot hold the node: it syncs, its size or an argument depends on data, or it works elsewhere."""
    effects = traced.effects[node]
    if effects.uncapturable:
        return effects.uncapturable
    if has_unknown_size(traced, effects.result):
        return "its size depends on data"
    sized = [facts.sized[arg] for arg in node.all_input_nodes if arg in facts.sized]
    if sized:
        return f"takes {sized[0]}, whose size depends on data"
    baked = sorted((arg for arg in node.all_input_nodes if arg in facts.numbers), key=lambda arg: arg.name)
    if baked:
        if traced.effects[baked[0]].result is not None:
            return f"takes {baked[0].name}, a view that a data-dependent scalar chooses"
        return f"takes {baked[0].name}, a data-dependent scalar"
    strided = sorted(arg.name for arg in node.all_input_nodes if arg in facts.strided)
    if strided:
        return f"takes {strided[0]}, which may show memory around a non-static input"
    return _why_elsewhere(traced, node, facts.device)


def may_become_eager(traced: TracedGraph, node: fx.Node) -> bool:
    """Whether a node that a capture refused may run eagerly.

    An op with the role "capture" is to be captured; so is a split op that is in a piece, since it is registered so.
    """
    return not any(has_role(traced, op, role) for op in ops_of(traced, node) for role in ("capture", "split"))


def alike(traced: TracedGraph, refused: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Refused nodes, and all others that call a custom op which one of them calls, with the reason."""
    ops = {node: op_of(node.target) for node in traced.gm.graph.nodes}
    by_op = {
        op: reason
        for node, reason in refused.items()
        if isinstance(op := ops.get(node), OpOverload) and op.namespace not in OWN_NAMESPACES
    }
    return {**{node: by_op[op] for node, op in ops.items() if op in by_op}, **refused}


def is_preparation(traced: TracedGraph, node: fx.Node) -> bool:
    """A registered preparation op, or any other reader of step state or of the step context."""
    prepares = any(has_role(traced, op, "prepare") for op in traced.effects[node].ops)
    return prepares or why_reads_step(traced, node) is not None


def has_role(traced: TracedGraph, op: str, role: Role) -> bool:
    """Whether "ns::op.overload" is registered with a role."""
    registered = find_op(traced.ops, op)
    return registered is not None and registered.role == role


def _input_name(traced: TracedGraph, storage: int) -> str:
    """The name of the graph input that owns a storage."""
    for graph_input in traced.inputs:
        result = traced.effects[graph_input.node].result
        if isinstance(result, TensorMeta) and result.storage == storage:
            return graph_input.name
    return f"storage {storage}"


def step_state_name(traced: TracedGraph, access: Access) -> str:
    """The graph input that an access to step state reads, or the argument, if the graph computed what it reads."""
    is_input = traced.storages.get(access.storage) is Provenance.STEP_STATE
    return _input_name(traced, access.storage) if is_input else access.argument


def _strided_views(traced: TracedGraph) -> set[fx.Node]:
    non_static = _non_static_storages(traced)
    found: set[fx.Node] = set()
    for node in traced.gm.graph.nodes:
        effects = traced.effects[node]
        if not effects.is_view or node.op == "placeholder" or not isinstance(effects.result, TensorMeta):
            continue
        if effects.result.storage in non_static and (strided_name(node) or found & set(node.all_input_nodes)):
            found.add(node)
    return found


def _non_static_storages(traced: TracedGraph) -> set[int]:
    nodes = (graph_input.node for graph_input in traced.inputs if not graph_input.static)
    return {storage for node in nodes if (storage := traced.storage_of(node)) is not None}


def inputs_shown_around(traced: TracedGraph) -> frozenset[fx.Node]:
    """Non-static inputs, of whose storage the graph takes strided views: who takes these needs the caller's tensor.

    A copied in copy has no memory outside of what the input shows, and lies at another offset.
    """
    shown = {
        traced.storage_of(arg) for node in traced.gm.graph.nodes if strided_name(node) for arg in node.all_input_nodes
    }
    shown &= _non_static_storages(traced)
    return frozenset(i.node for i in traced.inputs if traced.storage_of(i.node) in shown)


def _data_dependent_scalars(traced: TracedGraph) -> set[fx.Node]:
    """Nodes that carry a data-dependent scalar, directly or through arithmetic, and views that take one.

    A piece computes the views it needs itself, so it would be given the scalar.
    Host scalars of the graph's inputs are not among them: they are part of the bucket, so a graph may bake them.
    """
    found: set[fx.Node] = set()
    for node in traced.gm.graph.nodes:
        effects = traced.effects[node]
        if node.op in ("placeholder", "get_attr", "output") or (effects.result is not None and not effects.is_view):
            continue
        reads = effects.result is None and effects.reads and not effects.bucket_scalar
        if reads or found & set(node.all_input_nodes):
            found.add(node)
    return found


def _data_dependent_sizes(traced: TracedGraph) -> dict[fx.Node, str]:
    """Nodes whose size depends on data, and views of them: a piece that takes the view would be given the base."""
    found: dict[fx.Node, str] = {}
    for node in traced.gm.graph.nodes:
        effects = traced.effects[node]
        if has_unknown_size(traced, effects.result):
            found[node] = node.name
        elif effects.is_view and node.op not in ("placeholder", "output"):
            base = next((arg for arg in node.all_input_nodes if arg in found), None)
            if base is not None:
                found[node] = found[base]
    return found


def has_unknown_size(traced: TracedGraph, result: object) -> bool:
    """Whether the layout of a result, or of an item of it, depends on more than the sizes of the graph's inputs."""
    metas = (meta for meta in pytree.tree_leaves(result) if isinstance(meta, TensorMeta))
    return not all(traced.knows(size) for meta in metas for size in (*meta.shape, *meta.stride))


def _why_elsewhere(traced: TracedGraph, node: fx.Node, device: torch.device) -> str | None:
    """In a graph on an accelerator: the node touches memory of the host or of another one, which no kernel follows."""
    if device.type == "cpu":
        return None
    for touched in (node, *node.all_input_nodes):
        for meta in pytree.tree_leaves(traced.effects[touched].result):
            if not isinstance(meta, TensorMeta) or not _are_disjoint(meta.device, device):
                continue
            if meta.device.type == "cpu":
                return f"touches {touched.name} in host memory, the graph runs on {device}"
            return f"touches {touched.name} on {meta.device}, the graph runs on {device}"
    return None


def _are_disjoint(one: torch.device, other: torch.device) -> bool:
    """Two devices; one without an index may be any of its type."""
    return one.type != other.type or (None not in (one.index, other.index) and one.index != other.index)


def custom_ops(traced: TracedGraph, node: fx.Node) -> list[str]:
    """Names of the ops a node calls that are not torch's own, whose schemas and kernels no compiler knows."""
    return sorted({op for op in traced.effects[node].ops if op.partition("::")[0] not in OWN_NAMESPACES})


def is_custom(traced: TracedGraph, node: fx.Node) -> bool:
    """Whether a value comes from an op that is not one of torch's own."""
    return bool(custom_ops(traced, traced.producer(node)))


def _ops_in_bodies(traced: TracedGraph, node: fx.Node) -> Iterator[str]:
    """Names of the ops that the sub-graphs of a higher-order op call, at any depth."""
    for arg in node.all_input_nodes:
        body = traced.gm.get_submodule(str(arg.target)) if is_body(traced, arg) else None
        for module in body.modules() if body is not None else ():
            if isinstance(module, fx.GraphModule):
                yield from (name for inner in module.graph.nodes for name in _named_ops(inner))


def is_body(traced: TracedGraph, arg: fx.Node) -> bool:
    """Whether an argument is a sub-graph that a higher-order op runs."""
    return arg.op == "get_attr" and traced.effects[arg].result is None


def _named_ops(node: fx.Node) -> list[str]:
    """The op that a node of a body names; every overload of one that Dynamo did not resolve."""
    if isinstance(node.target, OpOverloadPacket):
        return [f"{node.target._qualified_op_name}.{overload}" for overload in node.target.overloads()]
    return [op_name(node.target)] if isinstance(node.target, OpOverload) else []
