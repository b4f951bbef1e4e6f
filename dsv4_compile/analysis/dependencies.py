"""Which node must run before which: data, conflicting accesses to a storage, random draws, barriers.

Two independent derivations live here. `predecessors` builds the edges that a move must respect. `signature` says, for
one order, which version of each storage every node sees; two orders mean the same if and only if their signatures are
equal. The checker uses the second to judge what a pass did with the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from ..graph.traced import Effects

Signature = dict[fx.Node, tuple[object, ...]]


def predecessors(nodes: Sequence[fx.Node], effects: Mapping[fx.Node, Effects]) -> dict[fx.Node, set[fx.Node]]:
    """For each compute node, the earlier ones it must come after (direct edges; their closure is the order)."""
    working = set(nodes)
    edges: dict[fx.Node, set[fx.Node]] = {}
    writer: dict[int, fx.Node] = {}
    readers: dict[int, set[fx.Node]] = {}
    last_random: fx.Node | None = None
    barrier: fx.Node | None = None
    since_barrier: set[fx.Node] = set()
    for node in nodes:
        done = effects[node]
        before = data_sources(node, working)
        before |= {writer[storage] for storage in done.reads | done.writes if storage in writer}
        for storage in done.writes:
            before |= readers.pop(storage, set())
            writer[storage] = node
        for storage in done.reads - done.writes:
            readers.setdefault(storage, set()).add(node)
        if done.random:
            before |= {last_random} if last_random else set()
            last_random = node
        before |= {barrier} if barrier else set()
        if done.barrier:
            before |= since_barrier
            barrier, since_barrier = node, set()
        since_barrier.add(node)
        edges[node] = before - {node}
    return edges


def data_sources(node: fx.Node, working: set[fx.Node]) -> set[fx.Node]:
    """The compute nodes whose results a node takes, through any chain of view nodes."""
    found: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    seen: set[fx.Node] = set()
    while pending:
        arg = pending.pop()
        if arg in seen:
            continue
        seen.add(arg)
        if arg in working:
            found.add(arg)
        else:
            pending.extend(arg.all_input_nodes)
    return found


def signature(order: Sequence[fx.Node], effects: Mapping[fx.Node, Effects]) -> Signature:
    """What each node sees in this order: the version of every storage it touches, and what its place among random
    draws and barriers is.

    A version is the number of writes so far, with the writer; for a write also the set of nodes that read the
    version it replaces.
    """
    version: dict[int, tuple[int, fx.Node | None]] = {}
    readers: dict[int, frozenset[fx.Node]] = {}
    draws = 0
    past: set[fx.Node] = set()
    barriers = 0
    seen: Signature = {}
    for node in order:
        done = effects[node]
        touched = sorted(done.reads | done.writes)
        versions = tuple((storage, version.get(storage, (0, None))) for storage in touched)
        replaced = tuple((storage, readers.get(storage, frozenset())) for storage in sorted(done.writes))
        seen[node] = (
            versions,
            replaced,
            draws if done.random else None,
            barriers,
            frozenset(past) if done.barrier else None,
        )
        for storage in done.writes:
            version[storage] = (version.get(storage, (0, None))[0] + 1, node)
            readers[storage] = frozenset()
        for storage in done.reads - done.writes:
            readers[storage] = readers.get(storage, frozenset()) | {node}
        draws += done.random
        past = set() if done.barrier else past
        past.add(node)
        barriers += done.barrier is not None
    return seen
