"""How long a node takes, roughly: only to tell which branches are worth a stream of their own.

The unit is about a microsecond of a current accelerator. A kernel takes its launch, and then what its bytes take at 4
TB/s; sizes are those of the trace. A matrix product and a custom op count as a kernel worth placing, everything else as
a fraction of one. Multiply-adds are left out: at the token counts for which streams are used (`aux_stream_max_tokens`)
they changed the choice in no layer. Nothing here was fitted: a wrong cost costs time on the device and changes no
result.

Bytes are those of results and activations, and of weights for a matrix product alone: another op may look at a few rows
of a weight, as an op on a cache does with the cache. Where an op is far off, `register_op(..., cost=)` corrects it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from ..compat.dispatch import pytree
from ..graph.op_properties import OWN_NAMESPACES
from ..graph.traced import Provenance, TensorMeta, TracedGraph
from ..ops.registry import find_op

BYTES = 4_000_000
KERNEL = 4  # a matrix product or a custom op that has next to nothing to do
SMALL_KERNEL = 1  # any other op, which a compiler may fuse besides

_PRODUCTS = frozenset(
    ["mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "matmul", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"]
)
_STREAMED = (Provenance.ACTIVATION, Provenance.USER_INPUT)


def cost_of(traced: TracedGraph, node: fx.Node) -> int:
    """The estimated time of a compute node, at least 1."""
    ops = traced.effects[node].ops
    registered = [op for name in ops if (op := find_op(traced.ops, name)) is not None]
    factor = max((op.cost for op in registered), default=1.0)
    if any(_bare(name) in _PRODUCTS for name in ops):
        return _scaled(KERNEL + _bytes(traced, node, tuple(Provenance)) // BYTES, factor)
    is_custom = any(name.partition("::")[0] not in OWN_NAMESPACES for name in ops)
    return _scaled((KERNEL if is_custom else SMALL_KERNEL) + _bytes(traced, node, _STREAMED) // BYTES, factor)


def _bare(name: str) -> str:
    """ "mm" of "aten::mm.default"; of another namespace an empty string, it may be anything."""
    namespace, _, rest = name.partition("::")
    return rest.partition(".")[0] if namespace in OWN_NAMESPACES else ""


def _scaled(cost: int, factor: float) -> int:
    return max(1, round(cost * factor))


def _bytes(traced: TracedGraph, node: fx.Node, counted: tuple[Provenance, ...]) -> int:
    """Of the result, and of the arguments whose storage has one of these origins."""
    metas = [
        *_tensors(traced, node),
        *(
            meta
            for arg in node.all_input_nodes
            for meta in _tensors(traced, arg)
            if traced.storages.get(meta.storage, Provenance.ACTIVATION) in counted
        ),
    ]
    return sum(_numel(traced, meta) * meta.dtype.itemsize for meta in metas)


def _tensors(traced: TracedGraph, node: fx.Node) -> Iterator[TensorMeta]:
    return (meta for meta in pytree.tree_leaves(traced.effects[node].result) if isinstance(meta, TensorMeta))


def _numel(traced: TracedGraph, meta: TensorMeta) -> int:
    return math.prod(map(traced.size_in_trace, meta.shape))
