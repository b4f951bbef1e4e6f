"""A piece compiler that notes what it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx


class NotingCompiler:
    """A piece compiler of the user's own: runs the graph as it is, and notes what it was given."""

    def __init__(self, returned: Callable[[Sequence[Tensor]], Any] = tuple) -> None:
        self.graphs: list[fx.GraphModule] = []
        self._returned = returned

    def __call__(self, gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        assert len(fakes) == len(gm.graph.find_nodes(op="placeholder"))
        self.graphs.append(gm)
        return lambda *args: self._returned(gm(*args))
