"""What a node that calls a collective runs: the op itself, and an error that says where it was and what to look at.

A rank that fails, or that takes another way through the model, shows in the *other* ranks: their next collective ends
with a closed connection, or with a timeout after the time that the process group was made with. What the backend says
then names neither the op nor the line, and the fault is not in this process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ..compat.dispatch import OpOverload, Tree, op_name, pytree
from ..compat.distributed import rank_in, timeout_of
from ..errors import CollectiveError, Dsv4Error
from .op_properties import bind_arguments, group_of
from .source_lines import where

_CALL = "dsv4_collective_call"


class CollectiveCall:
    """Calls a collective, or a wait for one.

    Equal to another one of the same op, so that pieces with such nodes can be duplicates.

    Args:
        op: what it calls.
        group: of which processes; None if that is not known.
        line: the user's.
    """

    def __init__(self, op: OpOverload, group: object, line: str) -> None:
        self.__name__ = self.__qualname__ = str(op._opname)
        self.op = op
        self._group = group
        self._line = line

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Call it.

        Raises:
            CollectiveError: the op has raised.
        """
        try:
            return self.op(*args, **kwargs)
        except Dsv4Error:
            raise
        except Exception as error:
            devices = [leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            raise self._error(error, devices[0] if devices else torch.device("cpu")) from error

    def _error(self, error: Exception, device: torch.device) -> CollectiveError:
        rank, timeout = rank_in(self._group), timeout_of(self._group, device)
        group = "" if self._group is None else f" of group {self._group}"
        of = "" if rank is None else f" on rank {rank[0]} of {rank[1]}"
        waits = "" if timeout is None else f", {timeout:g} s here"
        first = str(error).partition("\n")[0]
        return CollectiveError(
            f"{op_name(self.op)}{group} failed{of} ({self._line}): {type(error).__name__}: {first}. Another rank has "
            "failed, has ended, or calls other collectives than this one: look at what the others say first. A rank "
            f"waits for the others as long as its process group does (init_process_group(timeout=...){waits})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CollectiveCall) and self.op is other.op

    def __hash__(self) -> int:
        return hash(self.op)


def note_collective_call(node: fx.Node, group: object) -> CollectiveCall:
    """Let whoever runs a node that calls a collective call it through a `CollectiveCall`."""
    assert isinstance(node.target, OpOverload), "a collective is an op"
    call = node.meta[_CALL] = CollectiveCall(node.target, group, where(node))
    return call


def callee(node: fx.Node) -> Callable[..., Tree] | str:
    """What a node runs: its target, or what was noted."""
    found: Callable[..., Tree] | str = node.meta.get(_CALL, node.target)
    return found


def named_group(node: fx.Node) -> object:
    """The group that a node which calls a collective names; None if an input does."""
    assert isinstance(node.target, OpOverload), "a collective is an op"
    group = group_of(bind_arguments(node.target, node.args, node.kwargs))
    return None if isinstance(group, fx.Node) else group
