"""The proof behind a promise: what a captured op reads through the step context stays where it was at capture.

The new runner keeps what belongs to a step in persistent buffers, so an op that finds them through a side channel may
be captured. No schema shows these tensors, so the key of a program cannot have their addresses. Where the op is
registered with a function that tells them (`register_op(context=)`), they are read when a program is built, and
compared before it replays. A graph would read the old memory otherwise, and nobody would see an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from ...compat.dispatch import OpOverload, op_name
from ...errors import HazardError
from ...graph.joined_call import op_of
from ...graph.op_properties import bind_arguments
from ...graph.partitioned import PartitionedGraph
from ...graph.source_lines import where
from ...graph.traced import Provenance, Value
from ...ops.registry import RegisteredOp, find_op

Addresses = tuple[Mapping[str, int], ...]

_CURE = 'set runner="mrv1", which runs it eagerly, or let the runner keep it in one buffer from capture on'


@dataclass(frozen=True, slots=True)
class _Reader:
    """A captured call of an op that reads the step context.

    Attributes:
        op: what is registered of it.
        title: the op, and where the user calls it.
        positions: of its arguments that are inputs of the graph and no tensors.
        constants: its arguments that the graph holds.
    """

    op: RegisteredOp
    title: str
    positions: Mapping[str, int]
    constants: Mapping[str, Value]

    def read(self, args: Sequence[Value]) -> dict[str, Tensor]:
        assert self.op.context is not None, "only such ops are readers"
        given = {name: args[position] for name, position in self.positions.items()}
        return dict(self.op.context(**given, **self.constants))


class ContextAddresses:
    """Reads the addresses of what captured ops read through the step context.

    Args:
        graph: whose pieces are captured.
        is_checked: the options ask for it.
    """

    def __init__(self, graph: PartitionedGraph, *, is_checked: bool) -> None:
        self._readers = tuple(_readers(graph)) if is_checked else ()

    def read(self, args: Sequence[Value]) -> Addresses:
        """Those of a call that is about to be captured.

        Raises:
            HazardError: there is no step context, and a graph would keep what the op does without.
        """
        found = []
        for reader in self._readers:
            tensors = reader.read(args)
            if not tensors:
                raise HazardError(
                    f"op {reader.title} is captured, and there is no step context that it could read: {_CURE}"
                )
            found.append({name: tensor.data_ptr() for name, tensor in tensors.items()})
        return tuple(found)

    def check(self, args: Sequence[Value], known: Addresses) -> None:
        """Compare a call with the one that was captured.

        Raises:
            HazardError: a tensor is somewhere else, or there are others.
        """
        for reader, addresses in zip(self._readers, known, strict=True):
            now = {name: tensor.data_ptr() for name, tensor in reader.read(args).items()}
            if now != addresses:
                moved = sorted(name for name in {*now, *addresses} if now.get(name) != addresses.get(name))
                raise HazardError(
                    f"op {reader.title} was captured, and what it reads through the step context has moved since: "
                    f"{', '.join(moved)}: {_CURE}"
                )


def _readers(graph: PartitionedGraph) -> Iterator[_Reader]:
    positions = {i.node: index for index, i in enumerate(graph.traced.inputs) if i.provenance is Provenance.OBJECT}
    for unit in graph.units:
        for node in unit.nodes if unit.kind == "piece" else ():
            op = op_of(node.target)
            registered = find_op(graph.traced.ops, op_name(op)) if isinstance(op, OpOverload) else None
            if registered is not None and registered.context is not None and isinstance(op, OpOverload):
                yield _reader(node, op, registered, positions)


def _reader(node: fx.Node, op: OpOverload, registered: RegisteredOp, positions: Mapping[fx.Node, int]) -> _Reader:
    bound = bind_arguments(op, node.args, node.kwargs)
    inputs = {name: positions[arg] for name, arg in bound.items() if isinstance(arg, fx.Node) and arg in positions}
    constants = {name: arg for name, arg in bound.items() if not isinstance(arg, fx.Node)}
    return _Reader(registered, f"{op_name(op)} ({where(node)})", inputs, constants)
