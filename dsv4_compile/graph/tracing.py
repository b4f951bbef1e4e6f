"""From what Dynamo hands to a backend to a `TracedGraph`: a private copy of the graph and its named inputs.

Dynamo's graph comes before AOTAutograd: method calls, in-place ops, views and setitem, with parameters, buffers
and size symbols as placeholders. Example inputs are the real tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import sympy
import torch
from torch import fx

from ..compat.dispatch import has_address, pytree
from ..compat.dynamo import (
    forget_source,
    inner_tensor_of,
    is_float_argument,
    is_kept_in_module,
    is_module_buffer,
    is_static_input,
    measures_tensor,
    module_of,
    source_of,
)
from ..compat.subclasses import is_opaque, real_object
from ..compat.symbols import expr_of, plausible_value, traced_value
from ..errors import TrainingError
from ..ops.registry import RegisteredOp
from .op_properties import own_name
from .source_lines import where
from .traced import GraphInput, Provenance, TracedGraph, Value


def trace_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Value],
    ops: Mapping[str, RegisteredOp],
    break_reason: str | None = None,
) -> TracedGraph:
    """Copy the graph and describe its inputs.

    Args:
        gm: Dynamo's graph; it is not changed.
        example_inputs: one real tensor or SymInt per placeholder.
        ops: roles of ops by name.
        break_reason: why Dynamo ended the graph before the function did, if so.

    Raises:
        TrainingError: grad is enabled and an input requires grad.
    """
    copy = _copy_graph(gm)
    placeholders = [node for node in copy.graph.nodes if node.op == "placeholder"]
    refuse_training(placeholders, example_inputs)
    inputs = tuple(_input(node, example) for node, example in zip(placeholders, example_inputs, strict=True))
    run_as_traced = _why_no_memory(placeholders, example_inputs) or _why_not_plain(copy)
    original = _copy_graph(gm)
    for node in (*placeholders, *original.graph.find_nodes(op="placeholder")):
        forget_source(node)
    notes = () if break_reason is None else (f"graph break: what follows is not in this plan ({break_reason})",)
    return TracedGraph(
        gm=copy,
        original=original,
        inputs=inputs,
        ops=ops,
        symbols=_symbol_inputs(inputs),
        traced_sizes=_traced_sizes(inputs, example_inputs),
        device=_device(inputs),
        run_as_traced=run_as_traced,
        notes=notes,
    )


def _device(inputs: Sequence[GraphInput]) -> torch.device:
    devices = (i.value.device for i in inputs if isinstance(i.value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _input(node: fx.Node, example: object) -> GraphInput:
    own = _users_own(node, example)
    static = isinstance(own, torch.Tensor) and is_static_input(own)
    owned = isinstance(own, torch.nn.Parameter) or is_module_buffer(node)
    return GraphInput(
        node=node,
        name=_name(node),
        value=real_object(node.meta["example_value"]),
        provenance=_provenance(own),
        static=static,
        declared_static=owned or (static and not is_kept_in_module(node)),
        number=is_float_argument(node),
        scalar=_scalar(example),
        owned=owned,
        measures=measures_tensor(node) or ((inner := inner_tensor_of(node)) is not None and inner.outer is None),
    )


def _users_own(node: fx.Node, example: object) -> object:
    """An input as the user holds it: the tensor that it is, or the wrapper subclass that holds it."""
    inner = inner_tensor_of(node)
    return example if inner is None or inner.outer is None else inner.outer


def _name(node: fx.Node) -> str:
    inner = inner_tensor_of(node)
    if inner is None:
        return readable_name(source_of(node))
    return inner.suffix if inner.outer is None else readable_name(source_of(node)) + inner.suffix


def readable_name(source: str) -> str:
    """How a user would write a Dynamo source: "L['self']._modules['wq']._parameters['weight']" is "wq.weight"."""
    name = re.sub(r"\._(modules|parameters|buffers)\['([^']*)'\]", r".\2", source)
    name = re.sub(r"^[LG]\['([^']*)'\]", r"\1", name)
    name = re.sub(r"\['([^']*)'\]", r".\1", name)
    return name.removeprefix("self.")


def _copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, {})
    graph.output(output)
    return module_of(gm, graph)


def _provenance(example: object) -> Provenance:
    if not isinstance(example, torch.Tensor):
        return Provenance.OBJECT if is_opaque(example) else Provenance.SIZE
    if isinstance(example, torch.nn.Parameter):
        return Provenance.WEIGHT
    return Provenance.BUFFER if is_static_input(example) else Provenance.USER_INPUT


def _scalar(example: object) -> float | None:
    if isinstance(example, torch.Tensor) and example.numel() == 1 and example.device.type == "cpu":
        value: float = example.item()
        return value
    return None


def _symbol_inputs(inputs: Sequence[GraphInput]) -> dict[sympy.Symbol, fx.Node]:
    symbols: dict[sympy.Symbol, fx.Node] = {}
    for graph_input in inputs:
        if isinstance(graph_input.value, torch.SymInt) and (expr := expr_of(graph_input.value)).is_Symbol:
            symbols.setdefault(expr, graph_input.node)
    return symbols


def _traced_sizes(inputs: Sequence[GraphInput], example_inputs: Sequence[Value]) -> dict[sympy.Symbol, sympy.Integer]:
    """What each size symbol was in the trace."""
    measured: dict[sympy.Symbol, int] = {}
    for graph_input, example in zip(inputs, example_inputs, strict=True):
        if isinstance(example, torch.Tensor):
            pairs = zip(
                (*graph_input.value.shape, *graph_input.value.stride()),
                (*example.shape, *example.stride()),
                strict=True,
            )
            measured |= {expr_of(size): value for size, value in pairs if isinstance(size, torch.SymInt)}
    found: dict[sympy.Symbol, sympy.Integer] = {}
    for symbol, node in _symbol_inputs(inputs).items():
        size = node.meta["example_value"]
        value = traced_value(size)
        if value is None:
            value = measured.get(symbol) or plausible_value(size)
        found[symbol] = sympy.Integer(value)
    return found


def refuse_training(placeholders: Sequence[fx.Node], example_inputs: Sequence[object]) -> None:
    """Refuse inputs that require grad while grad is enabled.

    Raises:
        TrainingError: there is one.
    """
    for node, example in zip(placeholders, example_inputs, strict=True):
        own = _users_own(node, example)
        if torch.is_grad_enabled() and isinstance(own, torch.Tensor) and own.requires_grad:
            raise TrainingError(
                f"dsv4_piecewise is for inference, but grad is enabled and {_name(node)} requires grad: "
                "call the compiled model under torch.no_grad() or torch.inference_mode()"
            )


def _why_no_memory(placeholders: Sequence[fx.Node], example_inputs: Sequence[Value]) -> str | None:
    """Inside of `torch.func.functionalize` tensors stand for others, and zeros may be made without memory."""
    for node, example in zip(placeholders, example_inputs, strict=True):
        if isinstance(example, torch.Tensor) and not has_address(example):
            return f"{_name(node)} has no memory of its own, which a graph could read"
    return None


def _why_not_plain(gm: fx.GraphModule) -> str | None:
    """Some value has more to it than strided memory: a slot would hold a part of it."""
    for node in gm.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("example_value")):
            kind = _other_kind(value) if isinstance(value, torch.Tensor) else None
            if own_name(node).startswith("quantize_per_"):
                kind = "quantized"  # its fake is not
            if kind is not None:
                return f"{node.name} is {kind} and not plain memory ({where(node)})"
    return None


def _other_kind(value: torch.Tensor) -> str | None:
    if value.layout is not torch.strided:
        return f"of layout {value.layout}"
    return "quantized" if value.is_quantized else None
