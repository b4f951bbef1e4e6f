"""Let every collective be waited for where it is started.

    t = all_reduce(x)                   t = all_reduce(x)
    c = a @ b                   ->      w = wait_tensor(t)
    w = wait_tensor(t)                  c = a @ b

What a collective returns holds nothing of use before the wait, but a value that crosses a boundary is copied where it
is made. Collectives run on the host, one after another, so nothing would run beside them anyway.
"""

from __future__ import annotations

import operator

from torch import fx

from ..graph.op_properties import is_collective, is_wait
from ..graph.traced import TracedGraph


def place_waits(traced: TracedGraph) -> TracedGraph:
    """Move every wait for a collective of this graph."""
    last: dict[fx.Node, fx.Node] = {}  # by collective, what stands behind it for its sake
    for wait in [node for node in traced.gm.graph.nodes if is_wait(node.target)]:
        if (collective := awaited(wait)) is not None:
            if collective not in last:
                last[collective] = max((collective, *(u for u in collective.users if u.target is operator.getitem)))
            last[collective].append(wait)
            last[collective] = wait
    return traced


def awaited(wait: fx.Node) -> fx.Node | None:
    """The collective whose result, or whose argument if it works in place, is waited for; None for one from outside."""
    (tensor,) = wait.all_input_nodes
    makers = {tensor, *(tensor.all_input_nodes if tensor.target is operator.getitem else ()), *tensor.users}
    started = [node for node in makers if is_collective(node.target) and not is_wait(node.target) and node < wait]
    return max(started, default=None)
