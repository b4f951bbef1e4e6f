"""Runs a piece node by node while it is recorded, and looks at what each custom op gives.

A plan rests on what schemas and fakes promise, inside of a piece as at its edges: a result that is really memory of an
argument shows a later write to it, and one of another dtype shows only in what torch's own ops make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from ..compat import pytree
from ..draft import Draft, TensorMeta, Unit
from ..reasons import custom_ops
from .check_results import check_fresh, check_layout
from .sizes import Sizes, SizesOfCalls


class CheckedRun:
    """A unit whose custom ops are checked.

    Args:
        draft: the partitioned graph.
        unit: a piece or a part of one.
    """

    def __init__(self, draft: Draft, unit: Unit) -> None:
        self._draft = draft
        self._unit = unit
        # nodes of a unit keep the names of their originals
        self._custom = {node.name: node for node in unit.nodes if custom_ops(draft, node)}
        self._sizes = SizesOfCalls({symbol: node for symbol, node in draft.symbols.items() if node in unit.inputs})

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        """Run it.

        Raises:
            AliasingOpError: a custom op returns memory of an argument, and its schema says that it does not.
            LayoutMismatchError: a result has another shape or dtype than the op's fake promised.
        """
        return tuple(self._run(inputs) if self._custom else self._unit.gm.forward(*inputs))

    def _run(self, inputs: Sequence[Any]) -> Sequence[Tensor]:
        values = dict(zip(self._unit.inputs, inputs, strict=True))
        sizes = self._sizes.of(values)
        results: Sequence[Tensor] = _Interpreter(self._draft, self._unit, self._custom, sizes).run(*inputs)
        return results


class _Interpreter(fx.Interpreter):
    """One run, with the sizes of its inputs."""

    def __init__(self, draft: Draft, unit: Unit, custom: dict[str, fx.Node], sizes: Sizes) -> None:
        super().__init__(unit.gm)
        self.extra_traceback = False  # errors of ops pass as they are
        self._draft = draft
        self._custom = custom
        self._sizes = sizes

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        original = self._custom.get(n.name)
        if original is not None:
            check_fresh(self._draft, original, value, self.fetch_args_kwargs_from_env(n))
            self._check_layout(original, value)
        return value

    def _check_layout(self, node: fx.Node, value: Any) -> None:
        promised = pytree.tree_leaves(self._draft.effects[node].result)
        for meta, tensor in zip(promised, pytree.tree_leaves(value), strict=False):
            if isinstance(meta, TensorMeta) and isinstance(tensor, Tensor):
                check_layout(self._draft, node, tensor, self._sizes.promised(meta))
