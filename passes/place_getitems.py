"""Put each getitem of a tuple or list right after the node that makes it, and drop those nobody reads.

    t = tup(q)                    t = tup(q)
    c = fresh(h)          ->      a = t[0]
    a = t[0]                      c = fresh(h)

What crosses a boundary is a tensor or a number, never the container: a captured piece could not refresh it.
"""

from __future__ import annotations

import operator

from torch import fx

from ..graph.traced import TracedGraph


def place_getitems(traced: TracedGraph) -> TracedGraph:
    """Move or erase the getitem nodes of every container-valued node."""
    for node in list(traced.gm.graph.nodes):
        if isinstance(node.meta.get("example_value"), (tuple, list)) and node.op != "placeholder":
            _gather(node)
    return traced


def _gather(producer: fx.Node) -> None:
    last = producer
    for user in sorted(producer.users):
        if user.target is not operator.getitem:
            continue
        if not user.users:
            producer.graph.erase_node(user)
            continue
        last.append(user)
        last = user
