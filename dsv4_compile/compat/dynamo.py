"""What Dynamo leaves in a graph and how it is asked: sources, fake inputs, mode nodes, the trace's fake mode.

Nothing here may import Dynamo at module level: `dsv4_compile` is imported before it is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from .subclasses import is_opaque, real_object
from .symbols import value_of

if TYPE_CHECKING:
    import sympy
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

Function = TypeVar("Function", bound=Callable[..., object])
Input: TypeAlias = Any  # what Dynamo passes for a placeholder: a tensor, a size, or an object opaque to it
Fakes: TypeAlias = "tuple[FakeTensorMode, tuple[Input, ...]]"  # a mode and what it has for each placeholder

# Dynamo's mode nodes come in an enter and an exit; they are told by their functions.
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast


EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast


SET_GRAD_ENABLED = torch._C._set_grad_enabled


ENTER_INFERENCE_MODE = torch.autograd.grad_mode._enter_inference_mode
EXIT_INFERENCE_MODE = torch.autograd.grad_mode._exit_inference_mode


MODE_SWITCHES = (ENTER_AUTOCAST, EXIT_AUTOCAST, ENTER_INFERENCE_MODE, EXIT_INFERENCE_MODE, SET_GRAD_ENABLED)


# Whether Dynamo compiles anew for a parameter with other strides at the same address. That of 2.11 does not.
GUARDS_STRIDES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


_writing = threading.RLock()


_INNER = "dsv4_inner_tensor"


# Whether any thread has a torch profiler on; asked once a call. `torch.autograd._profiler_enabled` asks for
# the calling thread alone, and says no to a profiler that was told to watch all threads.
is_profiling: Callable[[], bool] = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")


def is_static_input(tensor: torch.Tensor) -> bool:
    """Parameters, buffers and what `torch._dynamo.mark_static_address` marked."""
    return isinstance(tensor, torch.nn.Parameter) or hasattr(tensor, "_dynamo_static_input_type")


def source_of(placeholder: fx.Node) -> str:
    """Dynamo's source of a graph input, such as "L['step'].seq_lens"; the node's name if it has none."""
    grapharg = placeholder.meta.get("grapharg")
    if grapharg is None:
        return placeholder.name
    return str(grapharg.source.name)


def is_module_buffer(placeholder: fx.Node) -> bool:
    """Whether Dynamo reached a graph input as a registered buffer (or parameter) of a module."""
    from torch._dynamo.source import UnspecializedParamBufferSource

    # Dynamo looks an entry up in the module's `_buffers`: the source of that dict is what has a class of its own.
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return isinstance(getattr(source, "base", None), UnspecializedParamBufferSource)


def is_kept_in_module(placeholder: fx.Node) -> bool:
    """Whether Dynamo reached a graph input through a module, by an attribute, a list, a dict of it."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    kind = getattr(source, "guard_source", None)
    return kind is not None and bool(kind.is_unspecialized_nn_module() or kind.is_specialized_nn_module())


def measures_tensor(placeholder: fx.Node) -> bool:
    """Whether a graph input is a size, stride or offset of a tensor, which Dynamo passes beside it."""
    from torch._dynamo.source import TensorPropertySource

    return isinstance(getattr(placeholder.meta.get("grapharg"), "source", None), TensorPropertySource)


def is_float_argument(placeholder: fx.Node) -> bool:
    """A float of the user that Dynamo turned into a 0-dim tensor and an `.item()`."""
    return bool(getattr(placeholder.meta.get("grapharg"), "pass_arg_as_tensor", False))


def forget_source(placeholder: fx.Node) -> None:
    """Let go of Dynamo's record of a graph input: torch swaps no tensor that it refers to weakly."""
    placeholder.meta.pop("grapharg", None)
    placeholder.meta.pop(_INNER, None)


@dataclass(frozen=True, slots=True)
class InnerTensor:
    """What an input is in a graph that takes the tensors which wrapper subclasses hold, and no such subclass.

    Attributes:
        outer: what the user holds, of which Dynamo's record of the input speaks; None for a size of it, of which there
            is no record.
        suffix: what comes after the name of `outer`; of a size, its whole name.
    """

    outer: torch.Tensor | None
    suffix: str


def note_inner_tensor(placeholder: fx.Node, inner: InnerTensor) -> None:
    """Note what a graph input is."""
    placeholder.meta[_INNER] = inner


def inner_tensor_of(placeholder: fx.Node) -> InnerTensor | None:
    """What was noted of a graph input; None for one that Dynamo handed over."""
    inner: InnerTensor | None = placeholder.meta.get(_INNER)
    return inner


def graph_break_reason(gm: fx.GraphModule) -> str | None:
    """Why Dynamo ended this graph before the function did, or None if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return str(reason.reason).partition("\n")[0] if reason is not None and reason.graph_break else None


def keep_break_reason(gm: fx.GraphModule, original: fx.GraphModule) -> None:
    """Let a graph that takes the place of Dynamo's tell what `graph_break_reason` asks."""
    vars(gm)["compile_subgraph_reason"] = getattr(original, "compile_subgraph_reason", None)


def symbolic_fake_inputs(example_inputs: Sequence[Input], gm: fx.GraphModule) -> Fakes:
    """The fake mode of the current trace, and one fake or SymInt per graph input, all of that mode.

    The `example_value` of a parameter belongs to another mode, so tensors are made fake again, with the symbolic
    context and the source that Dynamo used: without the source a dynamic size would get a new symbol.
    """
    context = torch._guards.TracingContext.get()
    mode = context.fake_mode
    assert mode is not None, "a Dynamo backend always runs under a fake mode"
    fakes: list[Input] = []
    for example, placeholder in zip(example_inputs, gm.graph.find_nodes(op="placeholder"), strict=True):
        if isinstance(example, torch.Tensor) and inner_tensor_of(placeholder) is None:
            symbolic = context.tensor_to_context.get(example)
            source = getattr(symbolic, "tensor_source", None)
            fakes.append(mode.from_tensor(example, symbolic_context=symbolic, source=source))
        else:
            fakes.append(real_object(placeholder.meta["example_value"]))
    return mode, tuple(fakes)


def concrete_fake_inputs(example_inputs: Sequence[Input], sizes: Mapping[sympy.Symbol, sympy.Integer]) -> Fakes:
    """A fake mode without symbols, and one fake or int per graph input, with these sizes for its size symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def concrete(example: Input) -> Input:
        if not isinstance(example, torch.Tensor):
            return _object_or_value(example, sizes)
        return mode.from_tensor(_unknown(example), static_shapes=True)

    return mode, tuple(map(concrete, example_inputs))


def _object_or_value(value: Input, sizes: Mapping[sympy.Symbol, sympy.Integer]) -> Input:
    """An object that torch does not look into stands for itself; of a size, its value."""
    return real_object(value) if is_opaque(value) else value_of(value, sizes)


def _unknown(example: torch.Tensor) -> torch.Tensor:
    """The tensor, or an alias of what may be the offsets of a nested tensor: of those torch would make a symbol."""
    return example.detach() if example.dtype in (torch.int32, torch.int64) and example.dim() == 1 else example


def resized_fake_inputs(values: Sequence[Input], sizes: Mapping[sympy.Symbol, sympy.Integer]) -> Fakes:
    """A fake mode without symbols, and one fake or int per graph input, with other sizes than those of the trace."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def resized(value: Input) -> Input:
        if not isinstance(value, torch.Tensor):
            return _object_or_value(value, sizes)
        shape: list[Any] = [value_of(size, sizes) for size in value.shape]
        stride: list[Any] = [value_of(size, sizes) for size in value.stride()]
        with mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)

    return mode, tuple(map(resized, values))


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace, if one is being written; `text` is only called then."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Device type, whether autocast is on for it, and its dtype, for the devices this package runs on."""
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def restore_autocast(state: tuple[tuple[str, bool, torch.dtype], ...]) -> None:
    """Set what `autocast_state` returned; the weight cache is dropped, as leaving the outermost scope does."""
    for kind, enabled, dtype in state:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.clear_autocast_cache()


class _Module(_LazyGraphModule):
    """Its Python is written by one thread at a time: torch renames nodes meanwhile, which a second one would read."""

    def real_recompile(self) -> None:
        with _writing:
            super().real_recompile()


def module_of(root: torch.nn.Module | dict[str, Any], graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A graph as a module whose Python is written when it is first called, by any thread; most of ours never are."""
    return _Module(root, graph, class_name=name)


def is_tracing() -> bool:
    """Whether this thread traces a function, or compiles what it has traced."""
    return torch._guards.TracingContext.try_get() is not None


def run_while_tracing(function: Function) -> Function:
    """A function that Dynamo runs where it meets a call of it, instead of tracing it; what it raises leaves Dynamo."""
    vars(function)["_dynamo_marked_constant"] = True  # `torch.compiler.assume_constant_result` would import Dynamo
    return function


def resumable_trace() -> Callable[[], AbstractContextManager[object]]:
    """What makes blocks in which the current trace's fake mode is that of the current trace, after it has ended."""
    context = torch._guards.TracingContext(trace_fakes())
    return lambda: torch._guards.tracing(context)


def trace_fakes() -> FakeTensorMode:
    """The fake mode of the current trace."""
    mode = torch._guards.TracingContext.get().fake_mode
    assert mode is not None, "a Dynamo backend always runs under a fake mode"
    return mode


def new_fake_mode() -> FakeTensorMode:
    """A fake mode in which models are made that need no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """A fake of a mode, with the sizes of a tensor as constants."""
    return mode.from_tensor(tensor, static_shapes=True)


def is_fake(value: object) -> bool:
    """Whether a value is a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def fake_of(mode: FakeTensorMode, fake: torch.Tensor) -> torch.Tensor:
    """A new fake tensor of a mode, with the sizes of another one."""
    with mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def fake_strided(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A fake tensor of a mode of its own, to be looked at."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What a fake tensor raises where an op would need its data."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return DataDependentOutputException, DynamicOutputShapeException
