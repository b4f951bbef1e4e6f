"""Runs a piece node by node while it is recorded, and looks at what each custom op gives.

A plan rests on what schemas and fakes promise, inside of a piece as at its edges: a result that is really memory of an
argument shows a later write to it, and one of another dtype shows only in what torch's own ops make of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from ...analysis.eager_reasons import custom_ops
from ...analysis.sizes import Sizes, SizesOfCalls
from ...compat.dispatch import pytree
from ...graph.partitioned import Unit
from ...graph.traced import TensorMeta, TracedGraph
from .interpreter import UnitInterpreter
from .result_checks import check_fresh, check_layout


class CheckedRun:
    """A unit whose custom ops are checked.

    Args:
        traced: the graph.
        unit: a piece or a subgraph of one.
    """

    def __init__(self, traced: TracedGraph, unit: Unit) -> None:
        self._traced = traced
        self._unit = unit
        self._custom = frozenset(node for node in unit.nodes if custom_ops(traced, node))
        self._sizes = SizesOfCalls({symbol: node for symbol, node in traced.symbols.items() if node in unit.inputs})

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        """Run it.

        Raises:
            AliasingOpError: a custom op returns memory of an argument, and its schema says that it does not.
            LayoutMismatchError: a result has another shape or dtype than the op's fake promised.
        """
        return tuple(self._run(inputs) if self._custom else self._unit.gm.forward(*inputs))

    def _run(self, inputs: Sequence[Any]) -> list[Tensor]:
        values = dict(zip(self._unit.inputs, inputs, strict=True))
        run = _CheckingInterpreter(self._traced, self._custom, self._sizes.of(values))
        run.values.update(values)
        run.run_nodes(self._unit.body, kept=self._unit.outputs)
        return [run.values[node] for node in self._unit.outputs]


class _CheckingInterpreter(UnitInterpreter):
    """One run, with the sizes of its inputs."""

    def __init__(self, traced: TracedGraph, custom: frozenset[fx.Node], sizes: Sizes) -> None:
        super().__init__(traced.gm)
        self._traced = traced
        self._custom = custom
        self._sizes = sizes

    def look_at(self, node: fx.Node, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check the result of a custom op."""
        if node not in self._custom:
            return
        check_fresh(self._traced, node, value, (args, kwargs))
        promised = pytree.tree_leaves(self._traced.effects[node].result)
        for meta, tensor in zip(promised, pytree.tree_leaves(value), strict=False):
            if isinstance(meta, TensorMeta) and isinstance(tensor, Tensor):
                check_layout(self._traced, node, tensor, self._sizes.meta_tensor(meta))
