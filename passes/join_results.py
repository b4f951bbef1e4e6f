"""Let an op whose results are parts of one buffer give that buffer too, and its users take views of it.

    q, k, v = project(x)  # chunks       ->   *_, buffer = project(x); q = as_strided(buffer, ...); k = ...
    attend(q, k, v)                           attend(q, k, v)

Only what owns its memory crosses a boundary, and a slot holds no more than its value spans: of three chunks none spans
the others. Where one result spans the rest it is their base already, which `rebase_results` sees to.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from ..compat.dispatch import HigherOrderOperator
from ..graph.joined_call import JoinedCall, end_of
from ..graph.source_lines import where
from ..graph.traced import Effects, TensorMeta, TracedGraph
from .rebase_results import can_be_computed, spans, view_of


def join_results(traced: TracedGraph) -> TracedGraph:
    """Replace every node with such results."""
    effects = dict(traced.effects)
    nodes = traced.compute_nodes()
    traced = replace(traced, effects=effects)
    for node in nodes:
        groups = list(_scattered(traced, node))
        if groups:
            _join(traced, node, groups, effects)
    return traced


def _scattered(traced: TracedGraph, node: fx.Node) -> Iterator[list[fx.Node]]:
    """Results that share memory which the node made, where none of them spans the others."""
    if isinstance(node.target, HigherOrderOperator):
        return  # what it runs is written down in the graph, and looked for there
    by_storage: defaultdict[tuple[int, torch.dtype], list[fx.Node]] = defaultdict(list)
    for item in traced.items(node):
        result = traced.effects[item].result
        if isinstance(result, TensorMeta) and item.args[0] is node and result.storage in traced.effects[node].makes:
            by_storage[result.storage, result.dtype].append(item)
    for items in by_storage.values():
        metas = [meta for item in items if isinstance(meta := traced.effects[item].result, TensorMeta)]
        are_known = all(can_be_computed(traced, meta, meta) for meta in metas)
        if are_known and not any(all(spans(traced, meta, other) for other in metas) for meta in metas):
            yield items


def _join(
    traced: TracedGraph, node: fx.Node, groups: Sequence[Sequence[fx.Node]], effects: dict[fx.Node, Effects]
) -> None:
    """Let the node give the memory of each group too, of which the results are views then."""
    graph = traced.gm.graph
    results = effects[node].result
    assert isinstance(results, tuple), "a container has items"
    target = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    indices = tuple(tuple(int(str(item.args[1])) for item in group) for group in groups)
    call = JoinedCall(target, indices, where(node))
    with graph.inserting_after(node):
        joined = graph.call_function(call, node.args, node.kwargs)
    joined.meta.update(node.meta)
    node.replace_all_uses_with(joined)
    metas = tuple(_span_of([effects[item].result for item in group]) for group in groups)
    effects[joined] = replace(effects.pop(node), result=(*results, *metas))
    graph.erase_node(node)
    for index, (group, meta) in enumerate(zip(groups, metas, strict=True)):
        with graph.inserting_after(joined):
            memory = graph.call_function(operator.getitem, (joined, len(results) + index))
        memory.meta.update(group[0].meta)
        effects[memory] = Effects(result=meta)
        for item in group:
            result = effects.pop(item).result
            assert isinstance(result, TensorMeta), "it shares memory"
            item.replace_all_uses_with(view_of(traced, memory, item, result, effects))
            graph.erase_node(item)


def _span_of(metas: Sequence[object]) -> TensorMeta:
    layouts = [meta for meta in metas if isinstance(meta, TensorMeta)]
    end = end_of([(meta.shape, meta.stride, meta.offset) for meta in layouts])
    return replace(layouts[0], shape=(end,), stride=(1,), offset=0)
