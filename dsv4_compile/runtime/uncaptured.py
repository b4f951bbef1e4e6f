"""Runs pieces and regions one after another, nothing captured, every value in memory of its own.

This is `engine="off"`, and every call of the other engines that no captured program serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, fx

from ..analysis.eager_reasons import has_unknown_size, is_custom
from ..analysis.sizes import Sizes, SizesOfCalls
from ..compat.dynamo import is_profiling
from ..counting import counters
from ..graph.partitioned import PartitionedGraph, Unit
from ..graph.traced import TensorMeta, Value
from .engines.capture_state import offering, restoring
from .memory.arena import copier
from .pieces.checked import CheckedRun, Notes
from .pieces.pieces import PieceFunction, Pieces
from .pieces.result_checks import check_layout, has_strides_of, why_unlike
from .pieces.warm import other_layout
from .program.profiler_ranges import in_range
from .restore_inputs import call_restoring, is_restoring
from .traced_call import TracedCall

# calls a piece before it is captured: its function, the inputs, and what calls it with them and returns the results;
# gives what `Engine.warm_up` does
WarmUp = Callable[[PieceFunction, Sequence[Value], Callable[[], object]], str | None]
# an output, its layout if sizes alone decide it, and whether its strides have to be those
_Promise = tuple[fx.Node, TensorMeta | None, bool]


class UncapturedCallable:
    """Takes and returns what Dynamo's graph does; holds no state of a call, so any thread may call it at any time.

    Args:
        graph: the partitioned graph.
        pieces: their functions.
        traced_call: serves calls that break an assumption of the plan.
    """

    def __init__(self, graph: PartitionedGraph, pieces: Pieces, traced_call: TracedCall) -> None:
        self._traced_call = traced_call
        self._graph = graph
        self._output_assembly = graph.output_assembly
        self._placeholders = [graph_input.node for graph_input in graph.traced.inputs]
        self._scalars = [node for node, effects in graph.traced.effects.items() if effects.bucket_scalar]
        self._eager_ops = sum(len(unit.nodes) for unit in graph.units if unit.kind == "region")
        self._pieces = pieces
        self._promises = {unit.name: tuple(self._promises_of(unit)) for unit in graph.units}
        self._sizes = SizesOfCalls(graph.traced.symbols)
        self._steps = [(unit, graph.last_used_in(index)) for index, unit in enumerate(graph.units)]
        self._regions = {unit.name: CheckedRun(graph.traced, unit) for unit in graph.units if unit.kind == "region"}
        self._mistrust: str | None = None

    def _promises_of(self, unit: Unit) -> Iterator[_Promise]:
        for node in unit.outputs:
            result = self._graph.traced.effects[node].result
            meta = (
                result if isinstance(result, TensorMeta) and not has_unknown_size(self._graph.traced, result) else None
            )
            yield node, meta, self._pieces.are_compiled and is_custom(self._graph.traced, node)

    def __call__(self, *args: Value) -> Value:
        """Run every unit, as what Dynamo calls."""
        return call_restoring(self.run, self._graph.traced, args) if is_restoring() else self.run(args)

    def run(self, args: Sequence[Value]) -> Value:
        """Run every unit, or the traced graph; for a caller that sees to what `RestoringCalls` asks."""
        reason = self._mistrust or self._traced_call.why_needed(args)
        if reason is not None:
            return self._traced_call.run(args, reason)
        result, self._mistrust = self._run(args, None)
        return result

    def warm_up(self, args: Sequence[Value], run_piece: WarmUp) -> tuple[Value, str | None]:
        """Run every unit before a capture of these sizes, for a caller that knows that the plan's assumptions hold.

        Args:
            args: of the call.
            run_piece: calls a piece where the engine will record it.

        Returns:
            The result, and why the plan does not hold for these sizes: a kernel of torch's own is not as its fake
            promised. None if it holds. This call has used what is real.

        Raises:
            LayoutMismatchError: a custom op's result differs from what its fake promised, on which the plan relies.
        """
        return self._run(args, run_piece)

    def _run(self, args: Sequence[Value], run_piece: WarmUp | None) -> tuple[Value, str | None]:
        counters.add(uncaptured_calls=1, eager_op_calls=self._eager_ops)
        notes: Notes | None = {} if run_piece is not None or self._pieces.are_compiled else None
        result = restoring(self._run_alone, args, run_piece, notes)
        if self._graph.traced.leaves_grad is not None:
            torch.set_grad_enabled(self._graph.traced.leaves_grad)
        return result, next(iter(notes), None) if notes else None

    def _run_alone(self, args: Sequence[Value], run_piece: WarmUp | None, notes: Notes | None) -> Value:
        # streams are those of a piece that is recorded around this call, of whose stream 0 this call knows nothing
        with offering(None):
            return self._run_units(args, run_piece, notes)

    def _run_units(self, args: Sequence[Value], run_piece: WarmUp | None, notes: Notes | None) -> Value:
        profiled = is_profiling()
        values: dict[fx.Node, Value] = dict(zip(self._placeholders, args, strict=True))
        sizes = self._prepare(values)
        pieces = self._pieces.for_call(args)
        for unit, last_used in self._steps:
            best = self._pieces.uncompiled() if notes else pieces
            function = self._function(unit, best, notes)
            if profiled:
                function = in_range(unit.name, function)
            inputs = [values[node] for node in unit.inputs]
            if run_piece is None or unit.kind == "region":
                results = function(*inputs)
            else:
                results, other_op = _through(run_piece, best[unit.name], function, inputs)
                self._note_other_op(unit, other_op, notes)
            if notes is not None:
                results = self._checked(unit, results, sizes, notes)
            values.update(zip(unit.outputs, results, strict=True))
            for node in last_used:
                del values[node]
        return self._output_assembly.gm(*[values[node] for node in self._output_assembly.inputs])

    def _function(self, unit: Unit, pieces: Mapping[str, PieceFunction], notes: Notes | None) -> Callable[..., Value]:
        if notes is None:
            return unit.gm.forward if unit.kind == "region" else pieces[unit.name]
        return partial(self._regions[unit.name] if unit.kind == "region" else pieces[unit.name].checked, notes=notes)

    def _note_other_op(self, unit: Unit, op: str | None, notes: Notes | None) -> None:
        """Note what an engine says of an op in a piece, unless the piece has told it already."""
        if op is not None and notes is not None and not notes:
            notes[other_layout(self._graph.traced, unit, op)] = None

    def _checked(self, unit: Unit, results: Sequence[Value], sizes: Sizes, notes: Notes) -> list[Value]:
        """The results, if they are as promised; what goes to compiled pieces gets the strides they were made for."""
        checked = []
        for (node, meta, strict), result in zip(self._promises[unit.name], results, strict=True):
            if meta is not None:
                promised = sizes.meta_tensor(meta)
                self._check(node, result, promised, strict, notes)
                if self._pieces.are_compiled and not notes and not has_strides_of(result, promised):
                    result = _laid_out_as(sizes.allocate(meta), result)
            checked.append(result)
        return checked

    def _check(self, node: fx.Node, result: Tensor, promised: Tensor, strict: bool, notes: Notes) -> None:
        if is_custom(self._graph.traced, node):
            check_layout(self._graph.traced, node, result, promised, strides=strict)
        elif reason := why_unlike(self._graph.traced, node, result, promised):
            notes[reason] = None

    def _prepare(self, values: dict[fx.Node, Value]) -> Sizes:
        """Read the host scalars and make the allocations that several units touch."""
        for node in self._scalars:
            values[node] = values[node.all_input_nodes[0]].item()
        sizes = self._sizes.of(values)
        for node in self._graph.allocations:
            meta = self._graph.traced.effects[node].result
            assert isinstance(meta, TensorMeta), "an allocation makes a tensor"
            values[node] = sizes.allocate(meta)
        return sizes


def _laid_out_as(made: Tensor, value: Tensor) -> Tensor:
    copier(made)(value)
    return made


def _through(
    run_piece: WarmUp, piece: PieceFunction, function: Callable[..., Value], inputs: Sequence[Value]
) -> tuple[Value, str | None]:
    """What `function`, a way to call a piece, returns, and what the engine that calls it says of its ops."""
    results: list[Value] = []

    def call() -> Value:
        results.append(function(*inputs))
        return results[0]

    other_op = run_piece(piece, inputs, call)
    return results[0], other_op
