"""The graph up to its partition: Dynamo's graph as a private copy, and what is known of it.

A pass before `partition_graph` takes a `TracedGraph` and returns one, with the graph rewritten or a field filled in.
Nodes are compared by identity; the graph is a private copy, never the one that Dynamo handed over.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
import torch
from torch import fx

from ..compat.symbols import Size, expr_of, value_of
from ..ops.registry import RegisteredOp

if TYPE_CHECKING:
    from ..compat.dynamo import FakeTensorMode

SizeValues = Mapping[sympy.Symbol, sympy.Integer]
Value: TypeAlias = Any  # a fake tensor, a SymInt, an int, a float, None, or a tuple or list of them


class Provenance(enum.Enum):
    """Where a storage comes from; decides whether a captured kernel may read it in place."""

    WEIGHT = "weight"
    BUFFER = "buffer"
    CACHE = "cache"  # a buffer or static input that the graph writes
    STEP_STATE = "step state"
    USER_INPUT = "user input"
    CONSTANT = "constant"
    SIZE = "size"
    OBJECT = "object"  # opaque to torch, such as the name of a layer: no memory, and ops take it as it is
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """One placeholder of the traced graph.

    Attributes:
        node: the placeholder.
        name: how the user reaches it, e.g. "step.swa_slot_mapping" or "layers.0.wq_b.weight".
        value: its fake tensor in the trace, a SymInt, or the object itself; only to be looked at, since each may belong
            to another mode.
        provenance: of its storage; a size or an object has none and says so.
        static: its address may be relied on (parameters, buffers, `mark_static_address`).
        declared_static: static, and by the user's own doing: a parameter, a buffer, or marked. Dynamo takes any other
            tensor that is kept in a module for static too.
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
    declared_static: bool
    owned: bool
    number: bool
    scalar: float | None
    measures: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeInputs:
    """Fakes of a graph's inputs, one per placeholder, and the mode they belong to.

    Attributes:
        mode: the fake tensor mode.
        values: fake tensors, and SymInts or, if concrete, ints.
        concrete: sizes are those of the trace and not symbols.
    """

    mode: FakeTensorMode
    values: tuple[Value, ...]
    concrete: bool


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Layout of a value as it was when its node ran, its storage's number, and its lazy bits.

    Memory of a tensor with such a bit holds what it did before; whoever reads it conjugates or negates.
    """

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size
    dtype: torch.dtype
    device: torch.device
    storage: int
    conj: bool = False
    neg: bool = False


# Of a value: that of a tensor, one for each item of a container, None for what is no tensor.
Layouts: TypeAlias = "TensorMeta | tuple[Layouts, ...] | None"


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
        unknown_reach: ops of a library that take an object opaque to torch, and have no role: "op (argument)" each.
        bucket_scalar: it reads a host scalar among the graph's inputs, which nobody writes: part of the bucket.
        result: `TensorMeta` of its result, a tuple of them for a container, None for no tensor.
        same_as: the first node whose value is the very tensor object that this one returns, if there is another; a
            second tensor with the same memory is not that object.
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
    unknown_reach: tuple[str, ...] = ()
    bucket_scalar: bool = False
    result: Layouts = None
    same_as: fx.Node | None = None

    @property
    def is_view(self) -> bool:
        """A view, a getitem, size arithmetic or an allocation: it goes with whoever needs it.

        So is a bucket scalar, which is read before anything runs.
        """
        if self.bucket_scalar:
            return True
        idle = not (self.reads or self.writes or self.random or self.pinned or self.barrier or self.uncapturable)
        return idle and (self.only_allocates or not self.makes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """A graph on its way to its partition; each field is set once.

    Attributes:
        gm: the graph, a private copy.
        original: another copy, which no pass touches: program order, mode switches and asserts in it. What runs a call
            that breaks an assumption of the plan.
        inputs: its placeholders in order. Their provenance is that of `storages` once effects are inferred.
        ops: roles of ops by name, with the `split_ops` of the options put in.
        symbols: the placeholder that carries each size symbol.
        traced_sizes: the value that each of them had in the trace. A size that was marked as unbacked has none there;
            it is taken from the example inputs.
        device: where the graph works: that of its first tensor input that is not on the CPU, else the CPU.
        size_checks: raises where the sizes of a call, given in the order of `symbols`, are not what the graph checks
            them to be; None without checks.
        ones: sets of unbacked sizes that may be 1 together: the effects are then the same.
        leaves_grad: the grad mode the function leaves behind, if it differs from the one it was called in.
        run_as_traced: why every call runs `original`, and nothing of this graph is captured; None if it need not.
        refused: what nodes do that no graph can hold, where only their capture showed it; they are eager since then.
        effects: by node.
        storages: provenance by storage number.
        eager: why a node is eager, for the eager ones.
        notes: remarks for the reader of the plan; any pass may add one.

    | set by | fields |
    |---|---|
    | `trace_graph` | gm, original, inputs, ops, symbols, traced_sizes, device, run_as_traced |
    | `scope_modes` | leaves_grad |
    | `lift_size_checks` | size_checks |
    | `infer_effects` | effects, storages; `relate_offsets` and `rebase_results` add those of the nodes they make |
    | `settle_rebindings` | run_as_traced, if `trace_graph` has not |
    | `try_ones` | ones |
    | `plan_again` | refused |
    | `choose_regions` | eager |
    """

    gm: fx.GraphModule
    original: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    ops: Mapping[str, RegisteredOp]
    symbols: Mapping[sympy.Symbol, fx.Node]
    traced_sizes: SizeValues
    device: torch.device
    size_checks: fx.GraphModule | None = None
    ones: frozenset[frozenset[sympy.Symbol]] = frozenset()
    leaves_grad: bool | None = None
    run_as_traced: str | None = None
    refused: Mapping[fx.Node, str] = field(default_factory=dict)
    effects: Mapping[fx.Node, Effects] = field(default_factory=dict)
    storages: Mapping[int, Provenance] = field(default_factory=dict)
    eager: Mapping[fx.Node, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def scalars(self) -> dict[fx.Node, float]:
        """The host scalars that are part of the bucket, with their values when the graph was traced."""
        traced = {graph_input.node: graph_input.scalar for graph_input in self.inputs}
        nodes = (node for node, effects in self.effects.items() if effects.bucket_scalar)
        return {node: value for node in nodes if (value := traced[node.all_input_nodes[0]]) is not None}

    def knows(self, size: Size) -> bool:
        """Whether an int or a SymInt follows from the sizes of the inputs, and does not depend on data."""
        return not isinstance(size, torch.SymInt) or expr_of(size).free_symbols <= self.symbols.keys()

    def size_in_trace(self, size: Size) -> int:
        """What a known size was in the trace."""
        value = value_of(size, self.traced_sizes)
        assert value is not None, f"{size} depends on data"
        return value

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
        return self.written_by(self.effects)

    def written_by(self, nodes: Iterable[fx.Node]) -> frozenset[int]:
        """Numbers of the storages that these nodes write."""
        return frozenset(storage for node in nodes for storage in self.effects[node].writes)

    def compute_nodes(self) -> list[fx.Node]:
        """The nodes that do something, in program order: all but inputs, constants, view nodes and the output."""
        skip = ("placeholder", "get_attr", "output")
        return [n for n in self.gm.graph.nodes if n.op not in skip and not self.effects[n].is_view]
