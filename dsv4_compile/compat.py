"""Every private torch name this package relies on, in one place (torch 2.11 to 2.14).

Nothing here may import Dynamo, Inductor or sympy at module level: `dsv4_compile` is imported before they are needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._C import Argument as Argument
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

if TYPE_CHECKING:
    import sympy

pytree = _pytree
# Functions whose ops look at their arguments on the host, if these are on a CPU, where no fake shows it.
READERS_ON_CPU = frozenset(
    [torch._C._nn.one_hot, torch.ops.aten.one_hot.default, torch.istft, torch.ops.aten.istft.default, "istft"]
)
# Dynamo's mode nodes come in an enter and an exit; they are told by their functions.
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
SET_GRAD_ENABLED = torch._C._set_grad_enabled
INFERENCE_MODE_FUNCTIONS = (
    torch.autograd.grad_mode._enter_inference_mode,
    torch.autograd.grad_mode._exit_inference_mode,
)
# Python functions and tensor attributes do not call function modes inside.
NoFunctionModes = torch._C.DisableTorchFunction
# Calls of torch do not reach the dispatch modes of this thread inside.
no_dispatch_modes = _disable_current_modes
# Where the public function of an aten op is, if there is one; `torch.nn.functional` calls those of the second.
PUBLIC_HOMES = (torch, torch._C._nn)
_CPU = DispatchKeySet(DispatchKey.CPU)
# Where the dispatcher looks for the CPU kernel of an op, in this order.
_KERNEL_KEYS = (
    "CPU",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
)
# Whether Dynamo compiles anew for a parameter with other strides at the same address. That of 2.11 does not.
GUARDS_STRIDES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
_writing = threading.RLock()
# Whether any thread has a torch profiler on; asked once a call. `torch.autograd._profiler_enabled` asks for
# the calling thread alone, and says no to a profiler that was told to watch all threads.
is_profiling: Callable[[], bool] = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")


def all_op_names() -> list[str]:
    """Every op torch knows, as "ns::op" or "ns::op.overload"."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


def schemas_of(name: str) -> list[torch._C.FunctionSchema]:
    """The schemas of all overloads of "ns::op", or of the one overload "ns::op.overload"; empty if unknown."""
    packet, _, overload = name.partition(".")
    schemas = torch._C._jit_get_schemas_for_operator(packet)
    if not overload:
        return list(schemas)
    wanted = "" if overload == "default" else overload
    return [schema for schema in schemas if schema.overload_name == wanted]


def has_composite_kernel(name: str) -> bool:
    """Whether torch takes "ns::op", or the overload "ns::op.overload", apart before dispatch modes see it."""
    packet = name.partition(".")[0]
    overloads = [f"{packet}.{schema.overload_name}".removesuffix(".") for schema in schemas_of(name)]
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op, "CompositeImplicitAutograd") for op in overloads)


def resolve_overload(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The `OpOverload` that calling an op packet, an overload or a `custom_op` object with these values reaches."""
    target = getattr(target, "_opoverload", target)
    if not isinstance(target, OpOverloadPacket):
        return target
    overloads = target.overloads()
    if len(overloads) == 1:
        return getattr(target, overloads[0])
    name = torch._C._jit_resolve_packet(target._qualified_op_name, *args, **kwargs)
    return getattr(target, name)


def op_name(overload: Any) -> str:
    """ "ns::op.overload" of an `OpOverload`, with ".default" spelled out."""
    return f"{overload.namespace}::{overload._opname}.{overload._overloadname}"


def wrapped_op(node: fx.Node) -> Any:
    """The op that a functionalised call (`auto_functionalized` and its second version) stands for, or None."""
    name = getattr(node.target, "_name", "")
    return node.args[0] if node.op == "call_function" and str(name).startswith("auto_functionalized") else None


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


def graph_break_reason(gm: fx.GraphModule) -> str | None:
    """Why Dynamo ended this graph before the function did, or None if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return str(reason.reason).partition("\n")[0] if reason is not None and reason.graph_break else None


def symbolic_stand_ins(example_inputs: Sequence[Any], gm: fx.GraphModule) -> tuple[Any, tuple[Any, ...]]:
    """The fake mode of the current trace, and one fake or SymInt per graph input, all of that mode.

    The `example_value` of a parameter belongs to another mode, so tensors are made fake again, with the symbolic
    context and the source that Dynamo used: without the source a dynamic size would get a new symbol.
    """
    context = torch._guards.TracingContext.get()
    mode = context.fake_mode
    assert mode is not None, "a Dynamo backend always runs under a fake mode"
    fakes: list[Any] = []
    for example, placeholder in zip(example_inputs, gm.graph.find_nodes(op="placeholder"), strict=True):
        if isinstance(example, torch.Tensor):
            symbolic = context.tensor_to_context.get(example)
            source = getattr(symbolic, "tensor_source", None)
            fakes.append(mode.from_tensor(example, symbolic_context=symbolic, source=source))
        else:
            fakes.append(placeholder.meta["example_value"])
    return mode, tuple(fakes)


def concrete_stand_ins(example_inputs: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """A fake mode without symbols, and one fake or int per graph input, with the sizes of the trace."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [
        mode.from_tensor(example, static_shapes=True) if isinstance(example, torch.Tensor) else hint_of(example)
        for example in example_inputs
    ]
    return mode, tuple(fakes)


def expr_of(size: Any) -> sympy.Expr:
    """The sympy expression of an int or a SymInt."""
    if isinstance(size, torch.SymInt):
        return size.node.expr
    import sympy

    return sympy.Integer(size)


def size_text(size: Any) -> str:
    """The expression of an int or a SymInt as text; most are ints, of which sympy takes its time to make a text."""
    return str(size.node.expr if isinstance(size, torch.SymInt) else size)


def hint_of(size: Any) -> int:
    """The value an int or a SymInt had when the graph was traced."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def is_unbacked(symbol: sympy.Symbol) -> bool:
    """A symbol whose value is only known once data is there."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def build_expr(expr: sympy.Expr, symbols: Mapping[sympy.Symbol, fx.Node], graph: fx.Graph) -> Any:
    """Nodes that compute a size expression from size symbols, appended at the graph's insertion point.

    Returns an int for a constant, else a node.
    """
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    if expr.is_Integer:
        return int(expr)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    environment = {symbol: fx.Proxy(symbols[symbol], tracer) for symbol in expr.free_symbols}
    return sympy_interp(PythonReferenceAnalysis, environment, expr).node


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


def upper_bound(expr: sympy.Expr) -> int | None:
    """The largest value that the current trace's shape environment allows for an expression, if it is finite."""
    mode = torch._guards.TracingContext.get().fake_mode
    shape_env = None if mode is None else mode.shape_env
    if shape_env is None:
        return None
    upper = shape_env.bound_sympy(expr).upper
    # an unbounded size has the largest index, or a symbol for infinity, as its bound
    return int(upper) if upper.is_Integer and upper < torch.iinfo(torch.int32).max else None


class _Module(_LazyGraphModule):
    """Its Python is written by one thread at a time: torch renames nodes meanwhile, which a second one would read."""

    def real_recompile(self) -> None:
        with _writing:
            super().real_recompile()


def module_of(root: torch.nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A graph as a module whose Python is written when it is first called, by any thread; most of ours never are."""
    return _Module(root, graph, class_name=name)


def trace_fakes() -> Any:
    """The fake mode of the current trace."""
    mode = torch._guards.TracingContext.get().fake_mode
    assert mode is not None, "a Dynamo backend always runs under a fake mode"
    return mode


def fake_like(mode: Any, tensor: torch.Tensor) -> Any:
    """A fake of a mode, with the sizes of a tensor as constants."""
    return mode.from_tensor(tensor, static_shapes=True)


@contextmanager
def tracing_apart() -> Iterator[None]:
    """A tracing context of the same fake mode, so that compiling a part leaves nothing in that of the whole graph.

    Grad mode and inference mode are off: what is compiled serves calls in any of them.
    """
    mode = trace_fakes()
    context = torch._guards.TracingContext(mode)
    with torch._guards.tracing(context), torch.inference_mode(False), torch.no_grad(), _floats_are_settled(mode):
        yield


@contextmanager
def _floats_are_settled(mode: Any) -> Iterator[None]:
    """Parts hold host scalars as constants, so AOTAutograd need not restart the trace to make them so."""
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    added = {str(symbol) for symbol in mode.shape_env.backed_var_to_val if symbol_is_type(symbol, SymT.FLOAT)}
    added -= TensorifyState.force_specializations
    TensorifyState.force_specializations |= added
    try:
        yield
    finally:
        TensorifyState.force_specializations -= added


def compile_with_inductor(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph for the size symbols of the current trace."""
    import torch._inductor.config

    # Random kernels draw what eager ones do. An engine of ours captures, so Inductor must not. Layouts are checked
    # where they come from: Dynamo guards those of inputs, `check_layout` looks at those of ops, slots are as planned.
    choices = {"fallback_random": True, "triton.cudagraphs": False, "size_asserts": False}
    with torch._inductor.config.patch(choices):
        return torch._inductor.standalone_compile(gm, list(fakes), dynamic_shapes="from_tracing_context")


def compile_with_aot_eager(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
    """AOTAutograd's graph of ops, run as it is."""
    from torch._dynamo.backends.registry import lookup_backend

    compiled: Callable[..., Any] = lookup_backend("aot_eager")(gm, list(fakes))
    return compiled


def python_kernels() -> AbstractContextManager[None]:
    """Composite ops run in their Python form, where they have one; so Dynamo and AOTAutograd run them on fakes."""
    from torch._dispatch.python import enable_python_dispatcher

    context: AbstractContextManager[None] = enable_python_dispatcher()
    return context


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What a fake tensor raises where an op would need its data."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return DataDependentOutputException, DynamicOutputShapeException


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may lie at one address."""
    return torch._debug_has_internal_overlap(tensor) != 0


def stop_recording_to_pool(device_index: int, handle: Any) -> None:
    """Undo what the begin of a capture did to a graph memory pool, for a capture that torch cannot end."""
    try:
        torch._C._cuda_endAllocateToPool(device_index, handle)
    except RuntimeError:
        return  # it was ended; in torch 2.13 its use of the pool is never given back, later the graph does that
    torch._C._cuda_releasePool(device_index, handle)


def kernel_of(func: OpOverload) -> tuple[str | None, bool]:
    """The dispatch key that an op's CPU kernel is registered for, None without one, and whether it is Python."""
    name = func.name()
    for key in _KERNEL_KEYS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            # torch.library keeps a note of every kernel that Python registered
            return key, f"{name.replace('::', '/')}/{key}" in torch.library._impls
    return None, False


def bind_cpu_kernel(func: OpOverload, args: Any, kwargs: Any) -> Callable[[], Any]:
    """An op's CPU kernel with its arguments bound, past autograd and modes; no numbers where it wants tensors."""
    return partial(func._handle.redispatch_boxed, _CPU, *args, **kwargs)


def call_composite_kernel(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Call the kernel of a composite op, numbers for tensors allowed; a function mode on top would call the op."""
    return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def with_lazy_bits_of(tensor: Tensor, alias: Tensor) -> Tensor:
    """`alias`, conjugated and negated lazily if `tensor` is."""
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias
