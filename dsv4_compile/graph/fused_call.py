"""A run of nodes that are one node: they share something that no boundary may cut.

The levels of a `torch.func` transform are such a thing. What a level wraps means nothing outside of it, so the nodes
from entering to leaving it stay together, wherever they run.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable

from torch import fx

from ..compat import functorch
from ..compat.dispatch import Tree


class FusedCall:
    """Calls a graph; leaves the levels that an exception leaves entered.

    Equal to another one if both run the same code, so that pieces with such nodes can be duplicates.

    Args:
        name: of what it is, for plans: "vmap".
        gm: the graph; returns a bare value or a tuple.
    """

    def __init__(self, name: str, gm: fx.GraphModule) -> None:
        self.__name__ = self.__qualname__ = name
        self.gm = gm
        self._key = _key(gm)
        self._enters_dual = functorch.enters_dual_level(gm)

    def __call__(self, *args: Tree) -> Tree:
        """Run the graph."""
        levels = functorch.Levels.before(self._enters_dual)
        try:
            return self.gm.forward(*args)
        except BaseException:
            levels.put_back()
            raise

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FusedCall) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _key(gm: fx.GraphModule) -> Hashable:
    numbers = {node: index for index, node in enumerate(gm.graph.nodes)}

    def step(node: fx.Node) -> Hashable:
        if node.op == "get_attr":
            return node.op, id(operator.attrgetter(str(node.target))(gm))
        args = fx.map_arg((node.args, node.kwargs), lambda arg: f"\0{numbers[arg]}")
        return node.op, "" if node.op == "placeholder" else node.target, repr(args)

    return tuple(map(step, gm.graph.nodes))
