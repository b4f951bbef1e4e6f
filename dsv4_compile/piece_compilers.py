"""What compiles the subgraphs of pieces: one small record per compiler, and the call that makes a subgraph's function.

A compiler takes a graph and its inputs, fakes and SymInts, as a Dynamo backend does, and returns what runs it. The
graph holds nothing but torch's own ops (see `passes/cut_subgraphs.py`); weights are inputs, so equal subgraphs share a
function; float arguments are constants in it.

| compiler | graph it gets | how a captured graph sees what it makes |
|---|---|---|
| inductor | ends in copies of what leaves the piece to its last arguments, the slots: the stores fuse | one launch |
| aot_eager | returns all results | op by op |
| a callable | returns all results | one launch |

Slots have the strides of the plan, so whatever layout a compiler likes inside, what crosses has the planned one. What
only other subgraphs of the piece take is returned, since a bare matrix product would need a kernel more to copy it.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, fx

from .compat.dynamo import fake_like, trace_fakes
from .compat.inductor import compile_with_aot_eager, compile_with_inductor, isolated_tracing
from .config import Config
from .errors import Dsv4Error, PieceCompileError
from .graph.mode_scopes import is_mode_switch
from .graph.partitioned import PartitionedGraph, Subgraph, Unit
from .graph.source_lines import where
from .graph.traced import TensorMeta, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCompiler:
    """A compiler of graphs.

    Attributes:
        name: for plans and errors.
        compile: takes a graph and its inputs, fakes and SymInts; returns a callable.
        fills_slots: its graphs copy what leaves the piece to their last arguments, and return only the rest.
        opaque: what it makes cannot be looked into while an engine records.
    """

    name: str
    compile: Callable[[fx.GraphModule, Sequence[Value]], object]
    fills_slots: bool
    opaque: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSubgraph:
    """A subgraph's function and what it was compiled for.

    Attributes:
        function: takes the inputs but for the numbers, then the constants, then the slots that it fills.
        compiler: who made it.
        constants: tensors of the graph.
        numbers: indices of the inputs that are host scalars; their values are constants of the function.
        filled: for each output, whether the function copies it to a slot; it returns the others.
    """

    function: Callable[..., object]
    compiler: PieceCompiler
    constants: tuple[Tensor, ...]
    numbers: frozenset[int]
    filled: tuple[bool, ...]

    def arguments(self, inputs: Sequence[Value]) -> list[Value]:
        """What `function` takes, without slots."""
        return [*self.without_numbers(inputs), *self.constants]

    def without_numbers(self, inputs: Sequence[Given]) -> list[Given]:
        """Whatever there is for each input, but for those that are constants of the function."""
        return [value for index, value in enumerate(inputs) if index not in self.numbers]


Given = TypeVar("Given")
Functions = Mapping[str, tuple[CompiledSubgraph | None, ...]]


def compile_pieces(graph: PartitionedGraph, config: Config) -> Functions:
    """The functions of the subgraphs of each piece that has subgraphs; None for a subgraph that runs as it is.

    Args:
        graph: the planned graph.
        config: the options.

    Raises:
        PieceCompileError: the compiler failed on a subgraph.
    """
    compiler = piece_compiler_for(config, graph)
    compiled: dict[str, CompiledSubgraph] = {}
    for subgraph in (subgraph for subgraphs in graph.subgraphs.values() for subgraph in subgraphs):
        if compiler is not None and subgraph.uncompiled is None and subgraph.duplicate_of is None:
            compiled[subgraph.unit.name] = compile_subgraph(graph, subgraph, compiler)
    return {
        name: tuple(compiled.get(subgraph.duplicate_of or subgraph.unit.name) for subgraph in subgraphs)
        for name, subgraphs in graph.subgraphs.items()
    }


def piece_compiler_for(config: Config, graph: PartitionedGraph) -> PieceCompiler | None:
    """The compiler that the options ask for on the device of the graph; None where pieces run as they are."""
    choice = config.resolved_piece_compiler(graph.traced.device.type)
    if choice == "eager":
        return None
    if choice == "inductor":
        return PieceCompiler(name="inductor", compile=compile_with_inductor, fills_slots=True, opaque=True)
    if choice == "aot_eager":
        return PieceCompiler(name="aot_eager", compile=compile_with_aot_eager, fills_slots=False, opaque=False)
    name = str(getattr(choice, "__name__", type(choice).__name__))
    return PieceCompiler(name=name, compile=choice, fills_slots=False, opaque=True)


def compile_subgraph(graph: PartitionedGraph, subgraph: Subgraph, compiler: PieceCompiler) -> CompiledSubgraph:
    """Compile one subgraph; only inside of a backend call, whose size symbols it uses.

    Args:
        graph: the graph.
        subgraph: the subgraph.
        compiler: who compiles.

    Raises:
        PieceCompileError: the compiler failed.
    """
    unit, numbers = subgraph.unit, graph.traced.scalars()
    filled = tuple(compiler.fills_slots and leaves for leaves in subgraph.leaving)
    try:
        with isolated_tracing():
            # not before: in a caller's inference mode its fakes would be inference tensors, which no slot is
            source = _GraphForCompiler(graph, unit, numbers, filled)
            function = compiler.compile(source.module(), source.fakes)
    except Dsv4Error:
        raise
    except Exception as error:
        raise PieceCompileError(
            f"{compiler.name} failed to compile {unit.name} (from {where(unit.nodes[0])}): "
            f"{type(error).__name__}: {error}. With piece_compiler='eager' pieces run uncompiled, and are captured all "
            "the same"
        ) from error
    if not callable(function):
        raise PieceCompileError(f"{compiler.name} returned {function!r} for {unit.name}: it must return a callable")
    numbers_at = frozenset(index for index, node in enumerate(unit.inputs) if node in numbers)
    constants = tuple(source.constants)
    return CompiledSubgraph(
        function=function, compiler=compiler, constants=constants, numbers=numbers_at, filled=filled
    )


def same_number(first: float, second: float) -> bool:
    """Bit for bit: NaN equals itself, and 0.0 is not -0.0."""
    if isinstance(first, float) and isinstance(second, float):
        return struct.pack("d", first) == struct.pack("d", second)
    return type(first) is type(second) and first == second


class _GraphForCompiler:
    """A subgraph's graph as its compiler takes it, and fakes of its inputs.

    Inductor edits the graph it is given, so it is always a copy.
    """

    def __init__(
        self, graph: PartitionedGraph, unit: Unit, numbers: Mapping[fx.Node, float], filled: Sequence[bool]
    ) -> None:
        self.fakes: list[Value] = []
        self.constants: list[Tensor] = []
        self._partitioned = graph
        self._unit = unit
        self._mode = trace_fakes()
        self._graph = fx.Graph()
        env: dict[fx.Node, fx.Node | float] = {}
        source = list(unit.gm.graph.nodes)
        placeholders = [node for node in source if node.op == "placeholder"]
        for copy, node in zip(placeholders, unit.inputs, strict=True):
            env[copy] = numbers[node] if node in numbers else self._take(node.name, self._fake_of(node))
        for node in source:
            if node.op == "get_attr":
                env[node] = self._take_constant(node)
        slots = [
            self._take(f"slot_{node.name}", self._fake_of(node)) if is_filled else None
            for node, is_filled in zip(unit.outputs, filled, strict=True)
        ]
        for node in source:
            if node.op not in ("placeholder", "get_attr", "output") and not is_mode_switch(node):
                env[node] = self._graph.node_copy(node, lambda arg: env[arg])
        results = [env[node] for node in unit.gm.graph.output_node().args[0]]  # type: ignore[union-attr, index]
        for slot, result in zip(slots, results, strict=True):
            if slot is not None:
                self._graph.call_method("copy_", (slot, result))
        self._graph.output(tuple(result for slot, result in zip(slots, results, strict=True) if slot is None))

    def module(self) -> fx.GraphModule:
        """The graph as a module."""
        return fx.GraphModule(torch.nn.Module(), self._graph, class_name=self._unit.name.replace(".", "_"))

    def _take(self, name: str, fake: Value) -> fx.Node:
        self.fakes.append(fake)
        node = self._graph.placeholder(name)
        node.meta["example_value"] = fake
        return node

    def _fake_of(self, node: fx.Node) -> Value:
        """Apart from every other, though inputs may share memory in places where that is of no consequence."""
        meta = self._partitioned.traced.effects[node].result
        if isinstance(meta, TensorMeta):
            with self._mode:
                return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
        return next(graph_input.value for graph_input in self._partitioned.traced.inputs if graph_input.node is node)

    def _take_constant(self, node: fx.Node) -> fx.Node:
        value = operator.attrgetter(str(node.target))(self._unit.gm)
        self.constants.append(value)
        return self._take(node.name, fake_like(self._mode, value))
