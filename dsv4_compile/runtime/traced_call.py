"""Runs the traced graph itself: what serves a call that breaks an assumption of the plan.

A plan moves nodes, shares code between pieces and compiles subgraphs because of what held when the graph was traced.
Dynamo guards most of it; what it does not guard is asked here, before a call runs the plan. Where the answer is no, the
graph runs as Dynamo handed it over: in program order, nothing moved, shared, compiled, captured or put on a stream.

| assumption | asked |
|---|---|
| inputs, one of them written, overlap where they did in the trace and nowhere else | `Aliasing` |
| nothing gives a tensor other memory in place, and inputs have memory; else all calls run so | `run_as_traced` |
| tensors carry no tangents of forward-mode derivatives (Dynamo has no guard) | `functorch.has_tangents` |
| sizes are what the graph checks them to be (Dynamo does not guard unbacked ones) | `size_checks` |
| unbacked sizes are not 0, nor 1 where that makes other views (Dynamo gives backed ones another graph) | `ones` |
| weights have the strides of the trace (Dynamo of torch 2.11 does not guard them) | `_other_strides` |
| kernels of torch's own give the layouts that their fakes promised | in warm-ups: `CheckedRun`, `Engine.warm_up` |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ..compat import functorch
from ..compat.dynamo import GUARDS_STRIDES
from ..compat.symbols import is_unbacked
from ..counting import counters
from ..graph.traced import TracedGraph, Value
from ..log import log
from .engines.capture_state import offering, restoring
from .memory.overlap import Aliasing
from .program.profiler_ranges import profiler_range


class TracedCall:
    """Any thread may call it at any time.

    Args:
        traced: the graph.
        example_inputs: with which it was traced.
    """

    def __init__(self, traced: TracedGraph, example_inputs: Sequence[Value]) -> None:
        self._traced = traced
        self._num_ops = sum(node.op in ("call_function", "call_method") for node in traced.original.graph.nodes)
        self._enters_dual = functorch.enters_dual_level(traced.original)
        self._aliasing = Aliasing(traced, example_inputs)
        weights = [] if GUARDS_STRIDES else [index for index, i in enumerate(traced.inputs) if i.owned]
        self._strides = {index: example_inputs[index].stride() for index in weights}
        positions = {graph_input.node: position for position, graph_input in enumerate(traced.inputs)}
        self._sizes = [positions[node] for node in traced.symbols.values()]
        self._unbacked = {s: positions[node] for s, node in traced.symbols.items() if is_unbacked(s)}
        self._warned = {traced.run_as_traced}  # that was said when it was compiled

    def why_needed(self, args: Sequence[Value]) -> str | None:
        """Which assumption of the plan a call breaks, or None."""
        if self._traced.run_as_traced is not None:
            return self._traced.run_as_traced
        if functorch.has_tangents():
            return "tensors may carry tangents, inside of torch.autograd.forward_ad.dual_level"
        if self._fails_size_check(args):
            return "sizes are not what the graph checks them to be"
        if self._has_special_size(args):
            return "a size that was marked as unbacked is 0 or 1, and the graph does something else to memory then"
        if self._aliasing.differs(args):
            return "inputs share memory in another way than when the graph was traced, and one of them is written"
        if any(args[index].stride() != stride for index, stride in self._strides.items()):
            return "a weight has other strides than when the graph was traced"
        return None

    def _fails_size_check(self, args: Sequence[Value]) -> bool:
        checks = self._traced.size_checks
        if checks is None:
            return False
        try:
            fx.Interpreter(checks).run(*[args[position] for position in self._sizes])
        except Exception:  # the traced graph will raise it, once it has come as far
            return True
        return False

    def _has_special_size(self, args: Sequence[Value]) -> bool:
        small = {symbol: args[position] for symbol, position in self._unbacked.items() if args[position] < 2}
        return bool(small) and (0 in small.values() or frozenset(small) not in self._traced.ones)

    def run(self, args: Sequence[Value], reason: str) -> Value:
        """Serve a call; counted, and said once for each reason."""
        counters.add(traced_graph_calls=1, uncaptured_calls=1, eager_op_calls=self._num_ops)
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("calls run the traced graph itself, op by op, where %s", reason)
        # the graph has its mode switches in it; one that raises between two of them must not leave one behind
        result = restoring(self._run, args)
        if self._traced.leaves_grad is not None:
            torch.set_grad_enabled(self._traced.leaves_grad)
        return result

    def _run(self, args: Sequence[Value]) -> Value:
        levels = functorch.Levels.before(self._enters_dual)
        try:
            with offering(None), profiler_range("traced graph"):
                return self._traced.original(*args)
        except BaseException:
            levels.put_back()
            raise
