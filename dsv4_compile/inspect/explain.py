"""`dsv4_compile.explain`: the plan of a model for given arguments, without running, compiling or capturing anything.

Dynamo only knows a graph by tracing it, so the model is compiled with a backend whose callable stops the call as soon
as the plan is there. Nothing of the model's code runs on real data, and no cache or buffer changes. The trace works on
a copy of the function's code object, since Dynamo keeps what it compiled, and counts it, by code object: explaining a
model any number of times takes nothing from its own recompile limit.

What imports Dynamo is imported inside of functions: this module is part of `import dsv4_compile`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

if TYPE_CHECKING:
    from torch import fx

    from ..config import Config
    from ..graph.partitioned import PartitionedGraph
    from ..graph.traced import Value
    from .plan import Plan

Answer = TypeVar("Answer")


class _PlanReadyError(Exception):
    """Carries out of the call what is said of its plan."""

    def __init__(self, answer: Any) -> None:
        super().__init__("the plan is ready")
        self.answer = answer


def explain(
    model_or_fn: Callable[..., object], *args: object, options: Mapping[str, object] | None = None, **kwargs: object
) -> Plan:
    """The plan of the first graph that Dynamo traces for a call of `model_or_fn(*args, **kwargs)`.

    Grad is off for the trace, as it is when a model is served, and sizes are dynamic. If a graph break ends the graph
    early, a note of the plan says so and why.

    Args:
        model_or_fn: a module or a function; if compiled, the original is explained.
        args: arguments of the call; no tensor among them changes.
        options: as for the backend. A keyword of the model that is called `options` too cannot be given by name: pass
            it by position, or explain a function that calls the model.
        kwargs: keyword arguments of the call.

    Raises:
        ExplainError: this is nothing to call, or the call traces no graph at all.
        Dsv4Error: what compiling would raise.
    """
    from ..config import Config
    from .make_plan import make_plan

    return read_plan(model_or_fn, args, kwargs, Config.from_options(options), make_plan)


def read_plan(
    model_or_fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    config: Config,
    read: Callable[[PartitionedGraph, Config], Answer],
) -> Answer:
    """What `read` says of the first graph that Dynamo traces for a call, once it is planned; see `explain`.

    Args:
        model_or_fn, args, kwargs: the call; nothing of it runs.
        config: the options.
        read: takes the planned graph and the options, while the trace goes on.

    Raises:
        ExplainError: this is nothing to call, or the call traces no graph at all.
        Dsv4Error: what compiling would raise.
    """
    from ..errors import ExplainError

    if not callable(model_or_fn):
        raise ExplainError(f"{model_or_fn!r} cannot be called: give a module or a function, and then its arguments")
    traced = torch.compile(_fresh(_original(model_or_fn)), backend=_stop_with_plan(config, read), dynamic=True)
    try:
        with torch.no_grad():
            traced(*args, **kwargs)
    except _PlanReadyError as ready:
        answer: Answer = ready.answer
        return answer
    name = getattr(model_or_fn, "__name__", type(model_or_fn).__name__)
    raise ExplainError(f"calling {name} traced no graph: it computes nothing with tensors, or Dynamo skips it")


def _stop_with_plan(
    config: Config, read: Callable[[PartitionedGraph, Config], object]
) -> Callable[[fx.GraphModule, Sequence[Value]], Callable[..., object]]:
    from ..graph.desugar import in_plain_tensors
    from ..plan_graph import plan_graph

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Value]) -> Callable[..., object]:
        plain = in_plain_tensors(gm, example_inputs)
        answer = read(plan_graph(plain.gm, plain.example_inputs, config, lambda stage, graph: None), config)

        def stop(*_: object) -> NoReturn:
            raise _PlanReadyError(answer)

        return stop

    return backend


def _original(model_or_fn: Callable[..., object]) -> Callable[..., object]:
    """What `torch.compile` was called with, if this came from it."""
    inner: Callable[..., object] = getattr(model_or_fn, "_torchdynamo_orig_callable", model_or_fn)
    original: Callable[..., object] = getattr(inner, "_orig_mod", inner)
    return original


def _fresh(target: Callable[..., object]) -> Callable[..., object]:
    """A callable that does the same with a code object of its own."""
    if isinstance(target, torch.nn.Module) and not _has_hooks(target):
        return _fresh(target.forward)
    if isinstance(target, types.MethodType):
        return types.MethodType(_with_own_code(target.__func__), target.__self__)
    if isinstance(target, types.FunctionType):
        return _with_own_code(target)

    def call(*args: object, **kwargs: object) -> object:
        return target(*args, **kwargs)

    return _with_own_code(call)


def _with_own_code(function: Any) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
