"""Take mode switches out of the graph and note on each node which modes it ran under.

    enter = _enter_autocast("cpu", bfloat16, True, None)
    y = linear(x, w)                                          ->    y = linear(x, w)   # meta: autocast ("cpu", ...)
    _exit_autocast(enter)

A piece that holds one half of a pair would leave the mode switched for whatever runs next. The scopes are entered again
around exactly these nodes wherever they run (`graph/mode_scopes.py`). What a function leaves switched when it returns
is set again at the end of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from ..compat.dynamo import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE_MODE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE_MODE,
    SET_GRAD_ENABLED,
)
from ..errors import TrainingError
from ..graph.mode_scopes import ModeScope, autocast, grad_mode, inference_mode, set_scopes
from ..graph.source_lines import where
from ..graph.traced import TracedGraph


def scope_modes(traced: TracedGraph) -> TracedGraph:
    """Remove mode nodes; `mode_scopes.scopes_of` then tells the scopes of a node.

    Dynamo guards on the grad mode, so the one of this moment is the one of every call of this graph.
    """
    graph = traced.gm.graph
    outer = grad_enabled = torch.is_grad_enabled()
    active: dict[fx.Node, ModeScope] = {}
    grad_before: dict[fx.Node, bool] = {}  # an inference mode block, and the grad mode around it
    removed: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is ENTER_AUTOCAST:
            active[node] = autocast(*node.args)
        elif node.target is ENTER_INFERENCE_MODE:
            active[node] = inference_mode(bool(node.args[0]))
            grad_before[node], grad_enabled = grad_enabled, not node.args[0]
        elif node.target is EXIT_AUTOCAST:
            del active[node.args[0]]
        elif node.target is EXIT_INFERENCE_MODE:
            del active[node.args[0]]
            grad_enabled = grad_before.pop(node.args[0])
        elif node.target is SET_GRAD_ENABLED:
            grad_enabled = bool(node.args[0])
            if grad_enabled:
                _refuse_training(traced, node)
        else:
            set_scopes(node, _with_grad_mode(tuple(active.values()), outer, grad_enabled))
            continue
        removed.append(node)
    for node in reversed(removed):
        graph.erase_node(node)
    return replace(traced, leaves_grad=None if grad_enabled == outer else grad_enabled)


def _with_grad_mode(scopes: Sequence[ModeScope], outer: bool, grad_enabled: bool) -> Sequence[ModeScope]:
    """The scopes, and one more if they leave grad mode other than it was at a node."""
    inherited = outer
    for scope in scopes:
        if scope.enter is ENTER_INFERENCE_MODE:
            inherited = not scope.args[0]  # entering inference mode turns grad off, leaving it inside turns it on
    return scopes if grad_enabled == inherited else (*scopes, grad_mode(grad_enabled))


def _refuse_training(traced: TracedGraph, node: fx.Node) -> None:
    for graph_input in traced.inputs:
        if isinstance(graph_input.value, torch.Tensor) and graph_input.value.requires_grad:
            raise TrainingError(
                f"dsv4_piecewise is for inference, but grad is switched on at {where(node)} while "
                f"{graph_input.name} requires grad: take torch.enable_grad() out of what is compiled"
            )
