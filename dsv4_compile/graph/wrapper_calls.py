"""Higher-order ops that do nothing but call their body, in inference: where each has the operands of the body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ..compat.dispatch import HigherOrderOperator

# Where each has the operands of its body, which comes first.
_FIRST_OPERAND = {"invoke_subgraph": 2, "wrap": 1, "tag_activation_checkpoint": 1, "wrap_activation_checkpoint": 1}
_OPERANDS_IN_A_TUPLE = frozenset(["strict_mode", "hints_wrapper"])


def calls_body(node: fx.Node) -> bool:
    """Whether a node calls such an op."""
    name = node.target.name() if isinstance(node.target, HigherOrderOperator) else ""
    return name in _OPERANDS_IN_A_TUPLE or name in _FIRST_OPERAND


def operands_of(node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    """What the body is called with, of the arguments that the op is called with."""
    assert isinstance(node.target, HigherOrderOperator), "only a wrapper has operands"
    first = _FIRST_OPERAND.get(node.target.name())
    given = args[1] if first is None else args[first:]
    return list(given) if isinstance(given, (tuple, list)) else [given]
