"""Why a node runs eagerly: each question is a function that answers None or a phrase, and the phrase is shown as is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .compat import OpOverload, OpOverloadPacket, expr_of, op_name, pytree, wrapped_op
from .draft import Access, Draft, Provenance, TensorMeta
from .op_facts import OWN_NAMESPACES, strided_name
from .ops.registry import Role, find_op


def why_split(draft: Draft, node: fx.Node) -> str | None:
    """The node is a split op, or runs one inside."""
    own = op_name(node.target) if isinstance(node.target, OpOverload) else None
    if own is not None and has_role(draft, own, "split"):
        return "split op"
    inside = sorted(op for op in ops_of(draft, node) if has_role(draft, op, "split"))
    return f"runs the split op {', '.join(inside)} inside" if inside else None


def ops_of(draft: Draft, node: fx.Node) -> set[str]:
    """Names of all ops that a node calls, itself or in the body of a higher-order op."""
    wrapped = wrapped_op(node)
    called = {op_name(wrapped)} if wrapped is not None else set(draft.effects[node].ops)
    return called.union(_ops_in_bodies(draft, node))


def why_reads_step(draft: Draft, node: fx.Node) -> str | None:
    """The node reads step state or the step context."""
    effects = draft.effects[node]
    for access in effects.accesses:
        if access.step_state or draft.storages.get(access.storage) is Provenance.STEP_STATE:
            return f"reads step state {step_state_name(draft, access)}"
    for op in effects.ops:
        registered = find_op(draft.ops, op)
        if registered and registered.reads_context:
            return "reads the step context"
    return None


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What the question whether a node can be captured needs to know of the whole graph.

    Attributes:
        device: where the graph works.
        numbers: nodes that carry a number read off data.
        strided: strided views of inputs that move; a staged copy has no memory outside of what the input shows.
    """

    device: torch.device
    numbers: frozenset[fx.Node]
    strided: frozenset[fx.Node]


def graph_facts(draft: Draft) -> GraphFacts:
    """Gather the facts, with one pass over the graph for each."""
    return GraphFacts(graph_device(draft), frozenset(_numbers_read_off_data(draft)), frozenset(_strided_views(draft)))


def why_not_capturable(draft: Draft, node: fx.Node, facts: GraphFacts) -> str | None:
    """A graph cannot hold the node: it syncs, its size or an argument depends on data, or it works elsewhere."""
    effects = draft.effects[node]
    if effects.uncapturable:
        return effects.uncapturable
    if has_unknown_size(draft, effects.result):
        return "its size depends on data"
    sized = [arg.name for arg in node.all_input_nodes if has_unknown_size(draft, draft.effects[arg].result)]
    if sized:
        return f"takes {sized[0]}, whose size depends on data"
    baked = sorted(arg.name for arg in node.all_input_nodes if arg in facts.numbers)
    if baked:
        return f"takes {baked[0]}, a number read off data"
    strided = sorted(arg.name for arg in node.all_input_nodes if arg in facts.strided)
    if strided:
        return f"takes {strided[0]}, which may show memory around an input that moves"
    return _why_elsewhere(draft, node, facts.device)


def is_preparation(draft: Draft, node: fx.Node) -> bool:
    """A registered preparation op, or any other reader of step state or of the step context."""
    prepares = any(has_role(draft, op, "prepare") for op in draft.effects[node].ops)
    return prepares or why_reads_step(draft, node) is not None


def has_role(draft: Draft, op: str, role: Role) -> bool:
    """Whether "ns::op.overload" is registered with a role."""
    registered = find_op(draft.ops, op)
    return registered is not None and registered.role == role


def _input_name(draft: Draft, storage: int) -> str:
    """The name of the graph input that owns a storage."""
    for graph_input in draft.inputs:
        result = draft.effects[graph_input.node].result
        if isinstance(result, TensorMeta) and result.storage == storage:
            return graph_input.name
    return f"storage {storage}"


def step_state_name(draft: Draft, access: Access) -> str:
    """The graph input that an access to step state reads, or the argument, if the graph computed what it reads."""
    is_input = draft.storages.get(access.storage) is Provenance.STEP_STATE
    return _input_name(draft, access.storage) if is_input else access.argument


def _strided_views(draft: Draft) -> set[fx.Node]:
    moving = {
        result.storage
        for graph_input in draft.inputs
        if not graph_input.static and isinstance(result := draft.effects[graph_input.node].result, TensorMeta)
    }
    found: set[fx.Node] = set()
    for node in draft.gm.graph.nodes:
        effects = draft.effects[node]
        if not effects.is_free or node.op == "placeholder" or not isinstance(effects.result, TensorMeta):
            continue
        if effects.result.storage in moving and (strided_name(node) or found & set(node.all_input_nodes)):
            found.add(node)
    return found


def _numbers_read_off_data(draft: Draft) -> set[fx.Node]:
    """Nodes that carry a number read off data, directly or through arithmetic.

    Host scalars of the graph's inputs are not among them: they are part of the bucket, so a graph may bake them.
    """
    found: set[fx.Node] = set()
    for node in draft.gm.graph.nodes:
        effects = draft.effects[node]
        if node.op in ("placeholder", "get_attr", "output") or effects.result is not None:
            continue
        if (effects.reads and not effects.bucket_scalar) or found & set(node.all_input_nodes):
            found.add(node)
    return found


def has_unknown_size(draft: Draft, result: Any) -> bool:
    """Whether the shape of a result, or of an item of it, depends on more than the sizes of the graph's inputs."""
    sizes = (size for meta in pytree.tree_leaves(result) if isinstance(meta, TensorMeta) for size in meta.shape)
    return any(not expr_of(size).free_symbols <= draft.symbols.keys() for size in sizes)


def _why_elsewhere(draft: Draft, node: fx.Node, device: torch.device) -> str | None:
    """In a graph on an accelerator: the node touches memory of the host or of another one, which no kernel follows."""
    if device.type == "cpu":
        return None
    for touched in (node, *node.all_input_nodes):
        for meta in pytree.tree_leaves(draft.effects[touched].result):
            if not isinstance(meta, TensorMeta) or not _are_apart(meta.device, device):
                continue
            if meta.device.type == "cpu":
                return f"touches {touched.name} in host memory, the graph runs on {device}"
            return f"touches {touched.name} on {meta.device}, the graph runs on {device}"
    return None


def _are_apart(one: torch.device, other: torch.device) -> bool:
    """Two devices; one without an index may be any of its type."""
    return one.type != other.type or (None not in (one.index, other.index) and one.index != other.index)


def custom_ops(draft: Draft, node: fx.Node) -> list[str]:
    """Names of the ops a node calls that are not torch's own, whose schemas and kernels no compiler knows."""
    return sorted({op for op in draft.effects[node].ops if op.partition("::")[0] not in OWN_NAMESPACES})


def is_custom(draft: Draft, node: fx.Node) -> bool:
    """Whether a value comes from an op that is not one of torch's own."""
    return bool(custom_ops(draft, draft.producer(node)))


def graph_device(draft: Draft) -> torch.device:
    """The device of the first tensor input that is not on the CPU, else the CPU."""
    devices = (i.value.device for i in draft.inputs if isinstance(i.value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _ops_in_bodies(draft: Draft, node: fx.Node) -> Iterator[str]:
    """Names of the ops that the sub-graphs of a higher-order op call, at any depth."""
    for arg in node.all_input_nodes:
        body = draft.gm.get_submodule(str(arg.target)) if is_body(draft, arg) else None
        for module in body.modules() if body is not None else ():
            if isinstance(module, fx.GraphModule):
                yield from (name for inner in module.graph.nodes for name in _named_ops(inner))


def is_body(draft: Draft, arg: fx.Node) -> bool:
    """Whether an argument is a sub-graph that a higher-order op runs."""
    return arg.op == "get_attr" and draft.effects[arg].result is None


def _named_ops(node: fx.Node) -> list[str]:
    """The op that a node of a body names; every overload of one that Dynamo did not resolve."""
    if isinstance(node.target, OpOverloadPacket):
        return [f"{node.target._qualified_op_name}.{overload}" for overload in node.target.overloads()]
    return [op_name(node.target)] if isinstance(node.target, OpOverload) else []
