"""The graph once it is partitioned: pieces, regions, and what becomes of every value.

A pass from `partition_graph` on takes a `PartitionedGraph` and returns one. It is all that the runtime is handed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import sympy
from torch import fx

from .traced import TensorMeta, TracedGraph

UnitKind = Literal["piece", "region", "output assembly"]


class InputRole(enum.Enum):
    """How a captured call gets at an input of the graph."""

    NUMBER = "number"  # part of the bucket, baked
    STATIC = "static"  # at its own address, which is subgraph of the key
    BOUND = "bound"  # not static, but written: at its own address as long as that does not change
    COPIED_IN = "copied in"  # copied into a slot at the start of each call
    COPIED_OUT = "copied out"  # written and non-static: copied in, and copied out at the end
    DIRECT = "direct"  # only regions and the caller see it: whatever tensor the call brings


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A maximal run of nodes with one fate: a piece (captured) or a region (eager); or the output assembly.

    Attributes:
        kind: "piece", "region", or "output assembly" for the views that only the caller sees.
        name: "piece_0", "region_0", ... in program order; "whole_step" of a full graph.
        nodes: its compute nodes in the traced graph.
        body: those and the view nodes they need, in order.
        gm: its own graph, which always returns a tuple (the output assembly: what Dynamo's graph returns).
        inputs: nodes of the traced graph that it is given, sizes first.
        outputs: nodes of the traced graph it returns.
    """

    kind: UnitKind
    name: str
    nodes: tuple[fx.Node, ...]
    body: tuple[fx.Node, ...]
    gm: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgraph:
    """A run of a piece's nodes on one stream that the piece compiler gets as one graph, or that runs as it is.

    Attributes:
        unit: its nodes; values that only other subgraphs of the piece need are outputs of it too.
        uncompiled: why it runs as it is, or None.
        stream: where it runs.
        leaving: for each of its outputs, whether it leaves the piece, and so has a slot.
        duplicate_of: name of the first subgraph that is the same up to its weights, or None.
        waits: indices of the subgraphs of other streams that its stream waits for before it; `START` for the start of
            the piece.
        joins: stream 0 waits for it at the end of the piece.
    """

    unit: Unit
    uncompiled: str | None
    leaving: tuple[bool, ...]
    duplicate_of: str | None
    stream: int
    waits: tuple[int, ...]
    joins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A value that lives in the workspace of a captured call.

    Attributes:
        node: the value.
        meta: its layout; sizes may be expressions.
        first: index of the unit that makes it; -1 for an input that is copied in, which is there from the start.
        last: index of the last unit that needs it; the number of units if the caller's outputs do.
    """

    node: fx.Node
    meta: TensorMeta
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedGraph:
    """A partitioned graph; each field is set once.

    Attributes:
        traced: the graph that was partitioned, with its effects.
        units: pieces and regions in program order.
        output_assembly: the unit that makes the caller's outputs of what the others gave.
        allocations: allocations that several units touch, made outside of all of them.
        token_count: which size counts the tokens, as an expression of the size symbols; None if none does.
        last_use: for each value that crosses, the index of the last unit that uses it; `len(units)` for the output
            assembly.
        duplicates: for a piece that is the same as an earlier one up to its weights, the name of that one.
        streams: captured compute nodes that run on a side stream, with its number from 1; all others run on stream 0.
        roles: how a captured call gets at each input.
        slots: the values that live in the workspace.
        uncaptured: why no call of this graph may be captured, or None.
        subgraphs: of each piece that is compiled or uses streams, and is no duplicate of another, in order.
        full: the same graph planned as one piece, for calls of uniform decode; None if these run as all others do.
        no_full: why there is none, where a split op is registered as capturable or the options ask for it.
        notes: remarks for the reader of the plan, those of `traced` first; any pass may add one.

    | set by | fields |
    |---|---|
    | `partition_graph` | traced, units, output_assembly, allocations, token_count, last_use |
    | `find_duplicates` | duplicates |
    | `assign_streams` | streams; `cut_subgraphs` takes a piece off them that cannot be cut |
    | `plan_workspace` | roles, slots, uncaptured |
    | `cut_subgraphs` | subgraphs |
    | `add_full_graph` | full, no_full |
    """

    traced: TracedGraph
    units: tuple[Unit, ...]
    output_assembly: Unit
    allocations: tuple[fx.Node, ...]
    token_count: sympy.Expr | None
    last_use: Mapping[fx.Node, int]
    duplicates: Mapping[str, str] = field(default_factory=dict)
    streams: Mapping[fx.Node, int] = field(default_factory=dict)
    roles: Mapping[fx.Node, InputRole] = field(default_factory=dict)
    slots: tuple[Slot, ...] = ()
    uncaptured: str | None = None
    subgraphs: Mapping[str, tuple[Subgraph, ...]] = field(default_factory=dict)
    full: PartitionedGraph | None = None
    no_full: str | None = None
    notes: tuple[str, ...] = ()

    def last_used_in(self, index: int) -> list[fx.Node]:
        """Inputs and outputs of a unit that no later unit uses."""
        unit = self.units[index]
        return [node for node in (*unit.inputs, *unit.outputs) if self.last_use.get(node, index) <= index]
