"""Takes the arguments of a call apart into plain tensors, and makes its results of those that the graph gives.

It stands around what runs a graph that `graph/desugar.py` has rewritten. All below sees plain tensors only: a weight
that is replaced or moved is found by the address of the tensor that it holds, as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ..compat.subclasses import reach
from ..compat.symbols import expr_of
from ..counting import counters
from ..graph.plain_graph import MadeResult, Numbers, OwnArgument, PlainGraph, PlainResult, Result, WholeLayout
from ..graph.traced import Value
from ..log import log
from .engines.capture_state import offering, restoring


def on_plain_tensors(graph: PlainGraph, call: Callable[..., Value]) -> Callable[..., Value]:
    """What Dynamo calls: `call` itself, or something around it if the graph was rewritten.

    Args:
        graph: the graph, for which all is planned: what has become of its sizes is known.
        call: takes what the graph takes, and returns what it gives.
    """
    return call if graph.inputs is None else _PlainTensorsCallable(graph, call)


class _PlainTensorsCallable:
    def __init__(self, graph: PlainGraph, call: Callable[..., Value]) -> None:
        assert graph.inputs is not None, "it was rewritten"
        self._call = call
        self._positions = [plain.position for plain in graph.inputs]
        self._paths = [(index, plain.path) for index, plain in enumerate(graph.inputs) if plain.path]
        self._measures = [(index, *plain.measure) for index, plain in enumerate(graph.inputs) if plain.measure]
        self._results = graph.results
        layouts = [_Layout(whole) for whole in graph.unguarded]
        self._layouts = [layout for layout in layouts if layout.has_constants]
        self._original = graph.original
        self._has_warned = False

    def __call__(self, *args: Value) -> Value:
        """Serve a call."""
        if any(layout.differs(args) for layout in self._layouts):
            return restoring(self._run_original, args)
        plain = [args[position] for position in self._positions]
        for index, path in self._paths:
            plain[index] = reach(plain[index], path)
        for index, measure, dim in self._measures:
            plain[index] = getattr(plain[index], measure)(dim)
        given: Sequence[Value] = self._call(*plain)
        made: dict[int, Value] = {}
        return tuple([_result(result, args, given, made) for result in self._results])

    def _run_original(self, args: Sequence[Value]) -> Value:
        """Run Dynamo's own graph, with the wrapper subclasses in it; counted, and said once."""
        assert self._original is not None, "it was rewritten"
        num_ops = sum(node.op in ("call_function", "call_method") for node in self._original.graph.nodes)
        counters.add(traced_graph_calls=1, uncaptured_calls=1, eager_op_calls=num_ops)
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "calls run the traced graph itself, op by op, where a wrapper subclass has other sizes than when the "
                "graph was traced, though the tensors that it holds have not"
            )
        with offering(None):
            return self._original(*args)


class _Layout:
    """What is constant of the size and the stride of a wrapper subclass.

    Args:
        whole: as traced.

    Attributes:
        has_constants: whether anything is.
    """

    def __init__(self, whole: WholeLayout) -> None:
        self._position, self._path = whole.position, whole.path
        self._size, self._stride = tuple(map(_constant, whole.size)), tuple(map(_constant, whole.stride))
        numbers = (*self._size, *self._stride)
        self._is_constant = None not in numbers
        self.has_constants = any(number is not None for number in numbers)

    def differs(self, args: Sequence[Value]) -> bool:
        """Whether a constant is another one in a call."""
        tensor = reach(args[self._position], self._path) if self._path else args[self._position]
        size, stride = tensor.size(), tensor.stride()
        if self._is_constant:
            return bool(size != self._size or stride != self._stride)
        given, known = (*size, *stride), (*self._size, *self._stride)
        return any(number is not None and other != number for other, number in zip(given, known, strict=True))


def _constant(number: int | torch.SymInt) -> int | None:
    if not isinstance(number, torch.SymInt):
        return number
    expr = expr_of(number)
    return int(expr) if expr.is_number else None


def _result(result: Result, args: Sequence[Value], given: Sequence[Value], made: dict[int, Value]) -> Value:
    if isinstance(result, OwnArgument):
        return args[result.position]
    if isinstance(result, PlainResult):
        return given[result.index]
    if id(result) not in made:
        made[id(result)] = result.recipe.make(iter([given[index] for index in result.tensors]), _layouts(result, given))
    return made[id(result)]


def _layouts(result: MadeResult, given: Sequence[Value]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    def present(numbers: Numbers) -> tuple[int, ...]:
        return tuple([given[number.index] if isinstance(number, PlainResult) else number for number in numbers])

    return ((present(size), present(stride)) for size, stride in result.layouts)
