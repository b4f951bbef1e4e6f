"""Whether the whole step may be one captured graph in uniform decode, and how the graph looks then.

A split op is eager since its launches depend on the lengths of a batch. One that is registered as capturable promises
that in uniform decode they do not. With that promise for each of them, and no other node that has to be eager, nothing
is left that cuts the step into pieces. An op may know that some calls do not keep it (`RegisteredOp.why_not_kept`): it
is asked with fakes of their arguments, as large as they were in the trace. A call in the body of a higher-order op is
not asked, since its arguments are not known; its capture tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, fx

from ..compat.dispatch import OpOverload, op_name
from ..compat.dynamo import fake_strided
from ..graph.source_lines import where
from ..graph.traced import Effects, TensorMeta, TracedGraph
from ..ops.registry import Capturable, find_op
from .eager_reasons import graph_facts, has_role, ops_of, why_not_capturable, why_split
from .effects import HOST_EFFECT


def splits_of(traced: TracedGraph) -> dict[fx.Node, dict[str, Capturable]]:
    """The nodes that are split ops, or run some inside: each op with what it promises on the device of the graph."""
    device = traced.device.type
    return {
        node: {op: promised(traced, op, device) for op in sorted(ops_of(traced, node)) if has_role(traced, op, "split")}
        for node in traced.compute_nodes()
        if why_split(traced, node)
    }


def promised(traced: TracedGraph, op: str, device_type: str) -> Capturable:
    """In which batches "ns::op.overload" may be captured, as it was registered."""
    registered = find_op(traced.ops, op)
    return "never" if registered is None else registered.capturable_on(device_type)


def promise_of(traced: TracedGraph, node: fx.Node) -> Capturable:
    """What a node that is a split op promises; "never" for any other node."""
    if not isinstance(node.target, OpOverload) or not has_role(traced, op_name(node.target), "split"):
        return "never"
    return promised(traced, op_name(node.target), traced.device.type)


def why_not_kept(traced: TracedGraph, node: fx.Node) -> str | None:
    """Why a call of a split op does not keep what the op promises, if the op itself can tell."""
    if not isinstance(node.target, OpOverload) or promise_of(traced, node) == "never":
        return None
    registered = find_op(traced.ops, op_name(node.target))
    if registered is None or registered.why_not_kept is None:
        return None
    metas = {arg: traced.effects[arg].result for arg in node.all_input_nodes}
    if not all(isinstance(meta, TensorMeta) and _is_known(traced, meta) for meta in metas.values()):
        return None
    fakes = {arg: _fake(traced, meta) for arg, meta in metas.items() if isinstance(meta, TensorMeta)}
    arguments, named = fx.node.map_arg((node.args, node.kwargs), fakes.__getitem__)
    return registered.why_not_kept(*arguments, **named)


def _is_known(traced: TracedGraph, meta: TensorMeta) -> bool:
    return all(traced.knows(size) for size in (*meta.shape, *meta.stride))


def _fake(traced: TracedGraph, meta: TensorMeta) -> Tensor:
    shape, stride = ([traced.size_in_trace(size) for size in sizes] for sizes in (meta.shape, meta.stride))
    return fake_strided(shape, stride, meta.dtype, meta.device)


def whole_step(traced: TracedGraph) -> TracedGraph:
    """The graph with nothing eager in it.

    A split op may keep state that no schema shows, and as an eager op it found all work before it joined and ran before
    all after it. So nothing runs beside it on another stream. A promise outweighs that its schema declares no effect.
    """
    effects = dict(traced.effects)
    for node, ops in splits_of(traced).items():
        effects[node] = _of_split_op(effects[node], is_promised="never" not in ops.values())
    return replace(traced, effects=effects, eager={}, notes=())


def _of_split_op(effects: Effects, *, is_promised: bool) -> Effects:
    uncapturable = None if is_promised and effects.uncapturable == HOST_EFFECT else effects.uncapturable
    return replace(effects, barrier=effects.barrier or "split op", uncapturable=uncapturable)


def why_not_whole(whole: TracedGraph) -> Iterator[str]:
    """What a graph of the whole step cannot hold, each thing once, with the first line that does it."""
    if whole.run_as_traced is not None:
        yield whole.run_as_traced
        return
    splits, facts = splits_of(whole), graph_facts(whole)
    never = {op: node for node, ops in splits.items() for op, promise in ops.items() if promise == "never"}
    if never:
        ops = ", ".join(op.removesuffix(".default") for op in never)
        yield f"not registered as capturable: {ops} (such as {where(next(iter(never.values())))})"
    first: dict[str, fx.Node] = {}
    for node in splits:
        if (reason := why_not_kept(whole, node)) is not None:
            first.setdefault(reason, node)
    for node in whole.compute_nodes():
        reason = whole.refused.get(node) or why_not_capturable(whole, node, facts)
        if reason is not None:
            has_subject = not reason.startswith(("takes ", "touches ", "its "))
            first.setdefault(reason if has_subject else f"{node.name} {reason}", node)
    for reason, node in first.items():
        yield f"{reason} ({where(node)})"
