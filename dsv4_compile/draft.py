"""The record that goes through the passes: a graph and what is known of it so far.

A pass takes a `Draft` and returns one, with the graph rewritten or a field filled in. Nodes are compared by
identity; the graph is a private copy, never the one Dynamo handed over.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch
from torch import fx

from .ops.registry import RegisteredOp

Value = Any  # a fake tensor, a SymInt, an int, a float, None, or a tuple or list of them


class Provenance(enum.Enum):
    """Where a storage comes from; decides whether a captured kernel may read it in place."""

    WEIGHT = "weight"
    BUFFER = "buffer"
    CACHE = "cache"  # a buffer or static input that the graph writes
    STEP_STATE = "step state"
    USER_INPUT = "user input"
    CONSTANT = "constant"
    SIZE = "size"
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """One placeholder of the traced graph.

    Attributes:
        node: the placeholder.
        name: how the user reaches it, e.g. "step.swa_slot_mapping" or "layers.0.wq_b.weight".
        value: its fake tensor in the trace, or a SymInt; only to be looked at, since each may belong to another mode.
        provenance: of its storage; a size has none and says so.
        static: its address may be relied on (parameters, buffers, `mark_static_address`).
        promised: static, and by the user's own doing: a parameter, a buffer, or marked. Dynamo takes any other tensor
            that is kept in a module for static too.
        owned: a parameter, or a buffer of a module; what was captured with it goes when it dies.
        number: a Python float that Dynamo passes as a 0-dim tensor; nothing else can share its memory.
        scalar: what a tensor of one element on the host held when the graph was traced; None for any other input.
        measures: a size, stride or offset of a tensor, and no number that the user gave.
    """

    node: fx.Node
    name: str
    value: Value
    provenance: Provenance
    static: bool
    promised: bool
    owned: bool
    number: bool
    scalar: float | None
    measures: bool


class InputRole(enum.Enum):
    """How a captured call gets at an input of the graph."""

    NUMBER = "number"  # part of the bucket, baked
    STATIC = "static"  # at its own address, which is part of the key
    BOUND = "bound"  # not static, but written: at its own address as long as it stays put
    STAGED = "staged"  # copied into a slot at the start of each call
    WRITTEN_BACK = "written back"  # written and moving: copied in, and copied back at the end
    DIRECT = "direct"  # only regions and the caller see it: whatever tensor the call brings


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIns:
    """Fakes of a graph's inputs, one per placeholder, and the mode they belong to.

    Attributes:
        mode: the fake tensor mode.
        values: fake tensors, and SymInts or, if concrete, ints.
        concrete: sizes are those of the trace and not symbols.
    """

    mode: Any
    values: tuple[Value, ...]
    concrete: bool


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, strides, offset, dtype and device of a value as it was when its node ran, and its storage's number."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    storage: int


@dataclass(frozen=True, slots=True)
class Access:
    """One op reading or writing the data of one storage through one argument.

    Attributes:
        op: "ns::op.overload".
        argument: its name in the schema.
        storage: number of the storage.
        write: whether the op writes it (it may read it too).
        step_state: the op is registered as reading step state through this argument.
    """

    op: str
    argument: str
    storage: int
    write: bool
    step_state: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What one node does, from the schemas of every op it dispatched on fake tensors.

    Attributes:
        accesses: every read and write of a storage, in order.
        reads, writes: numbers of the storages it reads, and of those it writes.
        makes: numbers of the storages it allocates.
        ops: the ops it dispatched, as "ns::op.overload".
        only_allocates: all it did was to allocate; somebody else fills it.
        random: it draws random numbers.
        pinned: it calls an op whose role says that it runs once and where it stands, whatever its schema tells.
        barrier: why nothing with an effect may be moved across it, or None.
        uncapturable: why it cannot be captured, as far as its own ops tell, or None.
        bucket_scalar: it reads a host scalar among the graph's inputs, which nobody writes: part of the bucket.
        result: `TensorMeta` of its result, a tuple of them for a container, None for no tensor.
    """

    accesses: tuple[Access, ...] = ()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    makes: frozenset[int] = frozenset()
    ops: tuple[str, ...] = ()
    only_allocates: bool = False
    random: bool = False
    pinned: bool = False
    barrier: str | None = None
    uncapturable: str | None = None
    bucket_scalar: bool = False
    result: TensorMeta | tuple[Any, ...] | None = None

    @property
    def is_free(self) -> bool:
        """A view, a getitem, size arithmetic or an allocation: it goes with whoever needs it.

        So is a bucket scalar, which is read before anything runs.
        """
        if self.bucket_scalar:
            return True
        idle = not (self.reads or self.writes or self.random or self.pinned or self.barrier or self.uncapturable)
        return idle and (self.only_allocates or not self.makes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A maximal run of nodes with one fate: a piece (captured) or a region (eager); or the epilogue.

    Attributes:
        kind: "piece", "region", or "epilogue" for the views that only the caller sees.
        name: "piece_0", "region_0", ... in program order.
        nodes: its nodes in the traced graph, free ones left out.
        body: those and the free nodes they need, in order.
        gm: its own graph, which always returns a tuple (the epilogue: what Dynamo's graph returns).
        inputs: nodes of the traced graph it takes, sizes first.
        outputs: nodes of the traced graph it returns.
    """

    kind: Literal["piece", "region", "epilogue"]
    name: str
    nodes: tuple[fx.Node, ...]
    body: tuple[fx.Node, ...]
    gm: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A run of a piece's nodes on one lane that the piece compiler gets as one graph, or that runs as it is.

    Attributes:
        unit: its nodes; values that only other parts of the piece take are outputs of it too.
        uncompiled: why it runs as it is, or None.
        lane: where it runs.
        leaving: for each of its outputs, whether it leaves the piece, and so has a slot.
        copy_of: name of the first part that is the same up to its weights, or None.
        waits: places of the parts of other lanes that its lane waits for before it; `START` for the start of the piece.
        joins: lane 0 waits for it at the end of the piece.
    """

    unit: Unit
    uncompiled: str | None
    leaving: tuple[bool, ...]
    copy_of: str | None
    lane: int
    waits: tuple[int, ...]
    joins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A value that lives in the workspace of a captured call.

    Attributes:
        node: the value.
        meta: its layout; sizes may be expressions.
        first: index of the unit that makes it; -1 for a staged input, which is there from the start.
        last: index of the last unit that takes it; the number of units if the caller's outputs do.
    """

    node: fx.Node
    meta: TensorMeta
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A graph on its way to a plan.

    Attributes:
        gm: the graph, a private copy.
        inputs: its placeholders in order.
        ops: roles of ops by name, with the `split_ops` of the options put in.
        symbols: the placeholder that carries each size symbol.
        leaves_grad: the grad mode the function leaves behind, if it differs from the one it was called in.
        effects: by node, once inferred.
        storages: provenance by storage number, once inferred.
        eager: why a node is eager, for the eager ones, once chosen.
        units: pieces and regions in program order, once partitioned.
        allocations: allocations that several units touch, made outside of all of them.
        epilogue: the unit that makes the caller's outputs of what the others gave.
        copies: for a piece that is the same as an earlier one up to its weights, the name of that one.
        parts: of each piece that is compiled or uses lanes, and is no copy of another, in order.
        lanes: captured working nodes that run on a side lane, with its number from 1; all others run on lane 0.
        roles: how a captured call gets at each input, once planned.
        slots: the values that live in the workspace, once planned.
        uncaptured: why no call of this graph may be captured, or None.
        notes: remarks for the reader of the plan.
    """

    gm: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    ops: Mapping[str, RegisteredOp]
    symbols: Mapping[sympy.Symbol, fx.Node]
    leaves_grad: bool | None = None
    effects: Mapping[fx.Node, Effects] = field(default_factory=dict)
    storages: Mapping[int, Provenance] = field(default_factory=dict)
    eager: Mapping[fx.Node, str] = field(default_factory=dict)
    units: tuple[Unit, ...] = ()
    allocations: tuple[fx.Node, ...] = ()
    epilogue: Unit | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    lanes: Mapping[fx.Node, int] = field(default_factory=dict)
    roles: Mapping[fx.Node, InputRole] = field(default_factory=dict)
    slots: tuple[Slot, ...] = ()
    uncaptured: str | None = None
    notes: tuple[str, ...] = ()

    def scalars(self) -> dict[fx.Node, float]:
        """The host scalars that are part of the bucket, with their values when the graph was traced."""
        traced = {graph_input.node: graph_input.scalar for graph_input in self.inputs}
        nodes = (node for node, effects in self.effects.items() if effects.bucket_scalar)
        return {node: value for node in nodes if (value := traced[node.all_input_nodes[0]]) is not None}

    def producer(self, node: fx.Node) -> fx.Node:
        """The node that computes a value: itself, or the one whose container it was taken out of, at any depth."""
        while (container := self._container_of(node)) is not None:
            node = container
        return node

    def items(self, node: fx.Node) -> list[fx.Node]:
        """What is taken out of the container that a node gives, at any depth; nothing for any other node."""
        taken = [user for user in sorted(node.users) if self._container_of(user) is node]
        return [item for user in taken for item in (user, *self.items(user))]

    def _container_of(self, node: fx.Node) -> fx.Node | None:
        if node.target is not operator.getitem or not isinstance(container := node.args[0], fx.Node):
            return None
        return container if isinstance(self.effects[container].result, tuple) else None

    def storage_of(self, node: fx.Node) -> int | None:
        """The number of a value's storage; None for a container, a number, or no value."""
        meta = self.effects[node].result
        return meta.storage if isinstance(meta, TensorMeta) else None

    def written(self) -> frozenset[int]:
        """Numbers of the storages that the graph writes."""
        return self._written_by(self.effects)

    def written_by(self, unit: Unit) -> frozenset[int]:
        """Numbers of the storages that the nodes of a unit write."""
        return self._written_by(unit.nodes)

    def _written_by(self, nodes: Iterable[fx.Node]) -> frozenset[int]:
        return frozenset(storage for node in nodes for storage in self.effects[node].writes)

    def working_nodes(self) -> list[fx.Node]:
        """The nodes that do something, in program order: all but inputs, constants, free nodes and the output."""
        skip = ("placeholder", "get_attr", "output")
        return [n for n in self.gm.graph.nodes if n.op not in skip and not self.effects[n].is_free]
