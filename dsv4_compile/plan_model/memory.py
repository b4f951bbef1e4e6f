"""Bytes of a captured token count: the workspace, temporaries inside of pieces, and what eager ops allocate.

Scratch: on a GPU the split ops are handed memory where Triton kernels serve them (`ops/kernels/scratch.py`). A region
allocates it in each step, as all that nobody outside of the region takes. A plan on fakes of the CPU has no scratch, so
it is added here while its op runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import fx

from ..analysis.sizes import Sizes
from ..analysis.slot_placement import aligned, extent_bytes, place_slots
from ..compat.dispatch import pytree
from ..errors import PlanError
from ..graph.partitioned import PartitionedGraph, Unit
from ..graph.traced import TensorMeta
from ..models.deepseek_v4 import DeepseekV4Config
from ..ops.kernels.scratch import MOST_HEADS, SCORES, partials_size
from ..ops.kernels.serve import KERNELS_SERVE
from ..ops.kernels.table import PROGRAMS
from .figures import BucketMemory


def bucket_memory(graph: PartitionedGraph, config: DeepseekV4Config, tokens: int) -> BucketMemory:
    """What a token count takes.

    Raises:
        PlanError: the plan does not say how many tokens there are.
    """
    sizes = sizes_for(graph, tokens)
    placement = place_slots(graph.slots, sizes)
    slots = {slot.node: slot for slot in graph.slots}
    outputs = [slots[node] for node in dict.fromkeys(graph.output_assembly.inputs) if node in slots]
    return BucketMemory(
        tokens=tokens,
        workspace=placement.planned,
        lower_bound=placement.lower_bound,
        unshared=placement.unshared,
        outputs=sum(aligned(extent_bytes(slot.meta, sizes)) for slot in outputs),
        eager=most_in_region(graph, config, sizes),
        temporaries=most_temporaries(graph, sizes, leaving=True),
        inside=most_temporaries(graph, sizes, leaving=False),
    )


def sizes_for(graph: PartitionedGraph, tokens: int) -> Sizes:
    """The sizes of a call of so many tokens."""
    symbol = graph.token_count
    if symbol not in graph.traced.symbols:
        raise PlanError(f"the token count is {symbol}, and no size of its own: it cannot be set to {tokens}")
    return Sizes(graph.traced.traced_sizes).with_values({symbol: tokens})


def most_in_region(graph: PartitionedGraph, config: DeepseekV4Config, sizes: Sizes) -> int:
    """The most that the eager ops of one region allocate at once, scratch included; it is free again after the step."""
    scratch = scratch_of(graph, config)
    regions = [unit for unit in graph.units if unit.kind == "region"]
    return max((temporary_bytes(graph, one, sizes, leaving=True, scratch=scratch) for one in regions), default=0)


def scratch_of(graph: PartitionedGraph, config: DeepseekV4Config) -> dict[fx.Node, int]:
    """Bytes of scratch that split ops are handed where kernels serve them; none where the plan has it already."""
    if graph.traced.device.type == "cuda" and KERNELS_SERVE:
        return {}
    partials = partials_size(1, PROGRAMS * MOST_HEADS, config.head_dim) * torch.float32.itemsize
    needed = {"dsv4::forward_mqa.default": partials, "dsv4::sparse_indexer.default": SCORES * torch.int32.itemsize}
    effects = graph.traced.effects
    return {node: needed[op] for node in effects for op in effects[node].ops if op in needed}


def most_temporaries(graph: PartitionedGraph, sizes: Sizes, *, leaving: bool) -> int:
    """The most that results of one piece take at once; pieces run one after another, in one pool."""
    pieces = [unit for unit in graph.units if unit.kind == "piece" and unit.name not in graph.duplicates]
    return max((temporary_bytes(graph, piece, sizes, leaving=leaving) for piece in pieces), default=0)


def temporary_bytes(
    graph: PartitionedGraph,
    unit: Unit,
    sizes: Sizes,
    *,
    leaving: bool,
    scratch: Mapping[fx.Node, int] = MappingProxyType({}),
) -> int:
    """The most that results of a unit's nodes take at once while it runs as it is.

    What an op allocates and frees inside of itself is not known to a plan.

    Args:
        graph, unit: whose.
        sizes: of the call.
        leaving: with results that leave the unit, until its end: a matrix product is made outside of its slot, and
            copied. Without them: what an engine needs that makes them all in their slots.
        scratch: bytes that a node needs beside its results while it runs.
    """
    extents = _storage_extents(graph, unit, sizes)
    last_use = {
        meta.storage: index
        for index, node in enumerate(unit.body)
        for used in (node, *node.all_input_nodes)
        for meta in _metas(graph, used)
    }
    given = {meta.storage for node in unit.outputs for meta in _metas(graph, node)}
    last_use.update(dict.fromkeys(given, len(unit.body)))
    counted = extents.keys() if leaving else extents.keys() - given
    alive: set[int] = set()
    most = 0
    for index, node in enumerate(unit.body):
        alive |= graph.traced.effects[node].makes & counted
        most = max(most, sum(extents[storage] for storage in alive) + scratch.get(node, 0))
        alive = {storage for storage in alive if last_use[storage] > index}
    return most


def _storage_extents(graph: PartitionedGraph, unit: Unit, sizes: Sizes) -> dict[int, int]:
    """Bytes of each storage that a value of a unit is in, as far as values reach."""
    extents: dict[int, int] = {}
    for node in unit.body:
        for meta in _metas(graph, node):
            end = sizes.of(meta.offset) * meta.dtype.itemsize + extent_bytes(meta, sizes)
            extents[meta.storage] = max(extents.get(meta.storage, 0), aligned(end))
    return extents


def _metas(graph: PartitionedGraph, node: fx.Node) -> Iterator[TensorMeta]:
    for leaf in pytree.tree_leaves(graph.traced.effects[node].result):
        if isinstance(leaf, TensorMeta):
            yield leaf
