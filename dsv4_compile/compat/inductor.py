"""What compiles subgraphs: Inductor and AOTAutograd, in a tracing context of their own.

Nothing here may import Dynamo or Inductor at module level: `dsv4_compile` is imported before they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .dispatch import Tree
from .dynamo import trace_fakes
from .thread_state import OutsideInferenceMode

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def isolated_tracing() -> Iterator[None]:
    """A tracing context of the same fake mode, so that compiling a part leaves nothing in that of the whole graph.

    Grad mode and inference mode are off: what is compiled serves calls in any of them.
    """
    mode = trace_fakes()
    context = torch._guards.TracingContext(mode)
    with torch._guards.tracing(context), OutsideInferenceMode(), torch.no_grad(), _floats_are_settled(mode):
        yield


@contextmanager
def _floats_are_settled(mode: FakeTensorMode) -> Iterator[None]:
    """Parts hold host scalars as constants, so AOTAutograd need not restart the trace to make them so."""
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    assert mode.shape_env is not None, "Dynamo's fake mode has size symbols"
    added = {str(symbol) for symbol in mode.shape_env.backed_var_to_val if symbol_is_type(symbol, SymT.FLOAT)}
    added -= TensorifyState.force_specializations
    TensorifyState.force_specializations |= added
    try:
        yield
    finally:
        TensorifyState.force_specializations -= added


def compile_with_inductor(gm: fx.GraphModule, fakes: Sequence[Tree]) -> Callable[..., object]:
    """Compile a graph for the size symbols of the current trace."""
    import torch._inductor.config

    # Random kernels draw what eager ones do. An engine of ours captures, so Inductor must not. Layouts are checked
    # where they come from: Dynamo guards those of inputs, `check_layout` looks at those of ops, slots are as planned.
    choices = {"fallback_random": True, "triton.cudagraphs": False, "size_asserts": False}
    caching: Any = torch.compiler.config
    with torch._inductor.config.patch(choices), caching.patch(cache_key_tag=_cache_key_tag(fakes)):
        return torch._inductor.standalone_compile(gm, list(fakes), dynamic_shapes="from_tracing_context")


def _cache_key_tag(fakes: Sequence[Tree]) -> str:
    """The user's own tag of what Inductor keeps on disk, and which vector instructions the code is for.

    Torch keeps C++ by its graph, without them: another machine, or ATEN_CPU_CAPABILITY, then builds code that steps by
    vectors of 16 floats with vectors of 8 or none.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    tag = str(torch.compiler.config.cache_key_tag)
    on_cpu = any(isinstance(fake, torch.Tensor) and fake.device.type == "cpu" for fake in fakes)
    return f"{tag} for {pick_vec_isa()}" if on_cpu else tag


def compile_with_aot_eager(gm: fx.GraphModule, fakes: Sequence[Tree]) -> Callable[..., object]:
    """AOTAutograd's graph of ops, run as it is."""
    from torch._dynamo.backends.registry import lookup_backend

    compiled: Callable[..., object] = lookup_backend("aot_eager")(gm, list(fakes))
    return compiled
