"""Which modes a node was traced under, and how a run of nodes enters and leaves them again.

Dynamo records switches of autocast, inference mode and grad mode as nodes of the graph. A piece that held one half of
such a pair would leave the mode switched for whatever runs next, so `scope_modes` takes them out and notes the scopes
on each node. Whoever runs nodes goes through `run_steps`, which says between which nodes a scope begins and ends.

    with torch.autocast("cpu"):                  steps of (a, b, c):   enter autocast, a
        a = x @ w                                                      leave it, b
    b = a + 1                                                          enter autocast, c, leave it
    with torch.autocast("cpu"):
        c = b @ w
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import fx

from ..compat.dynamo import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE_MODE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE_MODE,
    SET_GRAD_ENABLED,
)

_SCOPES = "dsv4_mode_scopes"


@dataclass(frozen=True, slots=True)
class ModeScope:
    """A mode that is in force for a run of nodes.

    Attributes:
        enter: called with `args` where it begins.
        args: constants.
        leave: called where it ends.
        leave_args: with these constants; None: with what `enter` returned.
    """

    enter: Callable[..., object]
    args: tuple[object, ...]
    leave: Callable[..., object]
    leave_args: tuple[object, ...] | None


def autocast(*args: object) -> ModeScope:
    """An autocast block with these arguments."""
    return ModeScope(ENTER_AUTOCAST, args, EXIT_AUTOCAST, None)


def inference_mode(enabled: bool) -> ModeScope:
    """An inference mode block."""
    return ModeScope(ENTER_INFERENCE_MODE, (enabled,), EXIT_INFERENCE_MODE, None)


def grad_mode(enabled: bool) -> ModeScope:
    """A block with grad on or off, within one with the opposite."""
    return ModeScope(SET_GRAD_ENABLED, (enabled,), SET_GRAD_ENABLED, (not enabled,))


def set_scopes(node: fx.Node, scopes: Sequence[ModeScope]) -> None:
    """Note the scopes that a node runs in, outermost first."""
    node.meta[_SCOPES] = tuple(scopes)


def scopes_of(node: fx.Node) -> tuple[ModeScope, ...]:
    """The scopes that a node runs in, outermost first."""
    scopes: tuple[ModeScope, ...] = node.meta.get(_SCOPES, ())
    return scopes


def is_mode_switch(node: fx.Node) -> bool:
    """Whether a node of a unit's graph enters or leaves grad or inference mode, which no compiler has to know of."""
    return node.target in (ENTER_INFERENCE_MODE, EXIT_INFERENCE_MODE, SET_GRAD_ENABLED)


def inference_scope(node: fx.Node) -> tuple[ModeScope, ...]:
    """The innermost inference mode block that a node runs in, if there is one: it tells what the node's memory is."""
    return tuple(scope for scope in scopes_of(node) if scope.enter is ENTER_INFERENCE_MODE)[-1:]


@contextmanager
def autocast_scopes(node: fx.Node) -> Iterator[None]:
    """Run the block under the autocast scopes of a node."""
    with ExitStack() as stack:
        for scope in scopes_of(node):
            if scope.enter is ENTER_AUTOCAST:
                stack.enter_context(torch.autocast(*scope.args))  # type: ignore[arg-type]
        yield


@dataclass(frozen=True, slots=True)
class RunStep:
    """A node, and what comes before and after it in a run of nodes.

    Attributes:
        leave: how many scopes end before it, innermost first.
        enter: the scopes that begin before it, after those have ended, outermost first.
        node: the node.
        dead: what no later node of the run uses, nor whoever takes its results.
    """

    leave: int
    enter: tuple[ModeScope, ...]
    node: fx.Node
    dead: tuple[fx.Node, ...]


def run_steps(nodes: Sequence[fx.Node], kept: Sequence[fx.Node] = ()) -> tuple[tuple[RunStep, ...], int]:
    """The steps of a run of nodes.

    Args:
        nodes: in order.
        kept: those whose results are of use after the run.

    Returns:
        The steps, and how many scopes end after the last.
    """
    last_user = {arg: node for node in nodes for arg in node.all_input_nodes}
    temporary = set(nodes).difference(kept)
    active: tuple[ModeScope, ...] = ()
    steps = []
    for node in nodes:
        wanted = active if node.op == "get_attr" else scopes_of(node)
        common = _common(active, wanted)
        dead = tuple(arg for arg in node.all_input_nodes if last_user[arg] is node and arg in temporary)
        steps.append(RunStep(len(active) - common, wanted[common:], node, dead))
        active = wanted
    return tuple(steps), len(active)


def _common(first: Sequence[ModeScope], second: Sequence[ModeScope]) -> int:
    """How many outer scopes two nodes share."""
    pairs = zip(first, second, strict=False)
    return next((depth for depth, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
