"""Runs the nodes of a unit one after another: what every path that looks at single nodes goes through.

    path                          how it runs a unit
    an uncaptured call            the unit's own graph, code that fx writes from the same steps
    a warm-up or a capture        `CheckedRun`, which looks at what each op gives (pieces/checked.py)
    the call that builds          the builder, which writes the program of later calls (program/builder.py)

A value goes with its last use. Modes that nodes were traced under are in force for exactly these nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ...graph.collective_call import callee
from ...graph.mode_scopes import ModeScope, run_steps
from ...graph.traced import Value


class UnitInterpreter:
    """Values of nodes, and how a node is run; subclasses see every step.

    Args:
        root: has the constants of the graph.

    Attributes:
        values: by node, as long as they are of use.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self.values: dict[fx.Node, Value] = {}
        self._root = root
        self._entered: list[tuple[ModeScope, object]] = []

    def run_nodes(self, nodes: Sequence[fx.Node], kept: Sequence[fx.Node]) -> None:
        """Run nodes in order.

        Args:
            nodes: what they need is in `values`, or among them.
            kept: those whose values stay in `values`.
        """
        steps, left_over = run_steps(nodes, kept)
        depth = len(self._entered)
        try:
            for step in steps:
                for _ in range(step.leave):
                    self.leave()
                for scope in step.enter:
                    self.enter(scope)
                self.run_node(step.node)
                for node in step.dead:
                    self.forget(node)
            for _ in range(left_over):
                self.leave()
        finally:
            while len(self._entered) > depth:  # an exception came between
                UnitInterpreter.leave(self)

    def run_node(self, node: fx.Node) -> None:
        """Run one node and keep its value."""
        self.values[node] = attribute(self._root, str(node.target)) if node.op == "get_attr" else self.call(node)

    def call(self, node: fx.Node) -> Value:
        """The value of a node that calls something."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: self.values[arg])
        target = callee(node)
        value = target(*args, **kwargs) if callable(target) else getattr(args[0], target)(*args[1:], **kwargs)
        self.look_at(node, value, args, kwargs)
        return value

    def look_at(self, node: fx.Node, value: Value, args: Sequence[Value], kwargs: Mapping[str, Value]) -> None:
        """Called with each value and what it was made from; raises if it is not as planned."""

    def enter(self, scope: ModeScope) -> None:
        """Enter a mode."""
        self._entered.append((scope, scope.enter(*scope.args)))

    def leave(self) -> None:
        """Leave the innermost mode that was entered."""
        scope, token = self._entered.pop()
        scope.leave(*((token,) if scope.leave_args is None else scope.leave_args))

    def forget(self, node: fx.Node) -> None:
        """Let go of a value that is not used again."""
        del self.values[node]


def attribute(root: torch.nn.Module, path: str) -> Value:
    """A constant of a graph, by its dotted name."""
    value: Value = root
    for name in path.split("."):
        value = getattr(value, name)
    return value
