"""Runs a unit node by node while it warms up or is recorded, and looks at what each op gives.

A plan rests on what schemas and fakes promise, inside of a piece as at its edges: a result that is really memory of an
argument shows a later write to it, and one of another dtype shows only in what torch's own ops make of it. Custom ops
are looked at in every warm-up and capture. Torch's own are looked at where kernels run, in warm-ups: a recorder would
show what meta kernels say. Where one is not as promised, that is noted, and the run goes on with what is real.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, fx

from ...analysis.eager_reasons import custom_ops, is_custom
from ...analysis.sizes import Sizes, SizesOfCalls
from ...compat.dispatch import pytree
from ...compat.symbols import expr_of
from ...graph.partitioned import Unit
from ...graph.traced import TensorMeta, TracedGraph, Value
from ..engines.user_line import name_in_code
from .interpreter import UnitInterpreter
from .result_checks import check_fresh, check_layout, why_other_memory, why_unlike

Notes = dict[str, None]  # what is not as promised, each once, in order


def note_node(error: RuntimeError, node: fx.Node | None) -> None:
    """Say at which node of a graph an error came, unless it says so."""
    if node is not None and vars(error).get("node") is None:
        error.node = node  # type: ignore[attr-defined]


class CheckedRun:
    """A unit whose ops are checked.

    Args:
        traced: the graph.
        unit: a piece, a subgraph of one, or a region.
    """

    def __init__(self, traced: TracedGraph, unit: Unit) -> None:
        self._traced = traced
        self._unit = unit
        is_piece = unit.kind == "piece"  # what custom ops of a region give is checked where it leaves the region
        self._custom = frozenset(node for node in unit.nodes if is_piece and custom_ops(traced, node))
        self._own = frozenset(node for node in unit.body if _is_checkable(traced, node))
        self._sizes = SizesOfCalls({symbol: node for symbol, node in traced.symbols.items() if node in unit.inputs})

    def __call__(self, *inputs: Value, notes: Notes | None = None) -> Sequence[Tensor]:
        """Run it.

        Args:
            inputs: of the unit.
            notes: takes what ops of torch's own do not give as promised; None: do not look at them.

        Raises:
            AliasingOpError: a custom op returns memory of an argument, and its schema says that it does not.
            LayoutMismatchError: a result of a custom op has another shape or dtype than its fake promised.
        """
        is_plain = notes is None and not self._custom
        try:
            return tuple(self._unit.gm.forward(*inputs) if is_plain else self._run(inputs, notes))
        except RuntimeError as error:
            if is_plain:
                self._note_node(error)
            raise

    def _note_node(self, error: RuntimeError) -> None:
        """Say at which node an error came; a capture that was refused goes by it."""
        name = name_in_code(error, self._unit.gm)
        note_node(error, next((node for node in self._unit.body if node.name == name), None))

    def _run(self, inputs: Sequence[Value], notes: Notes | None) -> list[Tensor]:
        values = dict(zip(self._unit.inputs, inputs, strict=True))
        own = frozenset() if notes is None else self._own
        run = _CheckingInterpreter(self._traced, self._custom, own, self._sizes.of(values), notes)
        run.values.update(values)
        run.run_nodes(self._unit.body, kept=self._unit.outputs)
        return [run.values[node] for node in self._unit.outputs]


def _is_checkable(traced: TracedGraph, node: fx.Node) -> bool:
    """A call of torch's own whose layout follows from the sizes of the graph's inputs."""
    metas = [meta for meta in pytree.tree_leaves(traced.effects[node].result) if isinstance(meta, TensorMeta)]
    sizes = (size for meta in metas for size in (*meta.shape, *meta.stride))
    is_known = all(expr_of(size).free_symbols <= traced.symbols.keys() for size in sizes)
    return bool(metas) and is_known and not is_custom(traced, node) and traced.producer(node) is node


class _CheckingInterpreter(UnitInterpreter):
    """One run, with the sizes of its inputs."""

    def __init__(
        self,
        traced: TracedGraph,
        custom: frozenset[fx.Node],
        own: frozenset[fx.Node],
        sizes: Sizes,
        notes: Notes | None,
    ) -> None:
        super().__init__(traced.gm)
        self._traced = traced
        self._custom = custom
        self._own = own
        self._sizes = sizes
        self._notes = notes

    def run_node(self, node: fx.Node) -> None:
        """See `UnitInterpreter`; an error says at which node it came, and a capture that was refused goes by it."""
        try:
            super().run_node(node)
        except RuntimeError as error:
            note_node(error, node)
            raise

    def look_at(self, node: fx.Node, value: Value, args: Sequence[Value], kwargs: Mapping[str, Value]) -> None:
        """Check the result of an op."""
        if node in self._custom:
            check_fresh(self._traced, node, value, (args, kwargs))
            for tensor, promised in self._results(node, value):
                check_layout(self._traced, node, tensor, promised)
        elif node in self._own:
            self._note(why_other_memory(self._traced, node, value, (args, kwargs)))
            for tensor, promised in self._results(node, value):
                self._note(why_unlike(self._traced, node, tensor, promised))

    def _results(self, node: fx.Node, value: Value) -> Iterator[tuple[Tensor, Tensor]]:
        promised = pytree.tree_leaves(self._traced.effects[node].result)
        for meta, tensor in zip(promised, pytree.tree_leaves(value), strict=False):
            if isinstance(meta, TensorMeta) and isinstance(tensor, Tensor):
                yield tensor, self._sizes.meta_tensor(meta)

    def _note(self, reason: str | None) -> None:
        if reason is not None and self._notes is not None:
            self._notes[reason] = None
