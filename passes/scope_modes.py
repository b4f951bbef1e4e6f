"""Take mode switches out of the graph and note on each node which modes it ran under.

    enter = _enter_autocast("cpu", bfloat16, True, None)
    y = linear(x, w)                                          ->    y = linear(x, w)   # meta: autocast ("cpu", ...)
    _exit_autocast(enter)

A piece that holds one half of a pair would leave the mode switched for whatever runs next. Autocast is entered again
around each run of nodes when units are made. Grad and inference mode are dropped: the backend refuses whatever
requires grad, so they cannot change a value. What a function leaves switched when it returns is set again at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..compat import ENTER_AUTOCAST, EXIT_AUTOCAST, INFERENCE_MODE_FUNCTIONS, SET_GRAD_ENABLED
from ..draft import Draft
from ..errors import TrainingError
from ..userlines import where

AUTOCAST = "dsv4_autocast"


def scope_modes(draft: Draft) -> Draft:
    """Remove mode nodes; `autocast_of` then tells the autocast scopes of a node, outermost first.

    Dynamo guards on the grad mode, so the one of this moment is the one of every call of this graph.
    """
    graph = draft.gm.graph
    active: dict[fx.Node, tuple[Any, ...]] = {}
    removed: list[fx.Node] = []
    grad_enabled = torch.is_grad_enabled()
    for node in graph.nodes:
        if node.target is ENTER_AUTOCAST:
            active[node] = tuple(node.args)
        elif node.target is EXIT_AUTOCAST:
            del active[node.args[0]]
        elif node.target is SET_GRAD_ENABLED:
            grad_enabled = bool(node.args[0])
            if grad_enabled:
                _refuse_training(draft, node)
        elif node.target in INFERENCE_MODE_FUNCTIONS:
            pass
        else:
            node.meta[AUTOCAST] = tuple(active.values())
            continue
        removed.append(node)
    for node in reversed(removed):
        graph.erase_node(node)
    return replace(draft, leaves_grad=None if grad_enabled == torch.is_grad_enabled() else grad_enabled)


def _refuse_training(draft: Draft, node: fx.Node) -> None:
    for graph_input in draft.inputs:
        if isinstance(graph_input.value, torch.Tensor) and graph_input.value.requires_grad:
            raise TrainingError(
                f"dsv4_piecewise is for inference, but grad is switched on at {where(node)} while "
                f"{graph_input.name} requires grad: take torch.enable_grad() out of what is compiled"
            )


def autocast_of(node: fx.Node) -> tuple[tuple[Any, ...], ...]:
    """Arguments of the autocast scopes a node runs in, outermost first."""
    scopes: tuple[tuple[Any, ...], ...] = node.meta.get(AUTOCAST, ())
    return scopes


@contextmanager
def autocast_scopes(node: fx.Node) -> Iterator[None]:
    """Run the block under the autocast scopes of a node."""
    with ExitStack() as stack:
        for device_type, dtype, enabled, cache_enabled in autocast_of(node):
            stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled))
        yield
