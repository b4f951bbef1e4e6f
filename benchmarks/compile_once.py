"""One compilation, timed, in a process that has done nothing else; `compile_time` starts it and chooses its cache.

    python -m benchmarks.compile_once stack 61 "dsv4_piecewise"

Prints one line of JSON, seconds of processor time each, the C++ compiler's included: other work on the machine moves
them less than time on the wall. "tracing" is Dynamo's: from the call to the first line that the compiled function runs,
less the time inside of the backend. "backend" is that time; "plan" and "pieces" are shares of it that `dsv4_piecewise`
spends on its passes and on its piece compiler. "second" is the second call, in which it captures.

A small function is compiled first: what Inductor does once a process (imports, looking at the C++ compiler) and once a
cache (a precompiled header, many seconds) is left out.
"""

from __future__ import annotations

import json
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import fx

from dsv4_compile import backend as ours
from dsv4_compile import counters

from .attention_stack import stack_and_inputs
from .toy import SPLIT_OP, WIDTH, Toy

# the package of the passes has a function of that name
unit_key = import_module("dsv4_compile.graph.unit_key")

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
OURS, APART, PLAIN = "dsv4_piecewise", "dsv4_piecewise, no reuse", "torch.compile"
METHODS = (OURS, APART, PLAIN)
MODELS: dict[str, Callable[[int], tuple[torch.nn.Module, tuple[Any, ...]]]] = {
    "stack": stack_and_inputs,
    "toy": lambda layers: (Toy(layers), (torch.randn(4, WIDTH),)),
}


class TimedBackend:
    """A Dynamo backend around another one, which notes when the first call of what it made begins.

    Attributes:
        seconds: inside of the other backend, over all graphs.
        called: when a compiled function was first entered.
    """

    def __init__(self, compile_graph: Compiler) -> None:
        self._compile = compile_graph
        self.seconds = 0.0
        self.called: float | None = None

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo calls."""
        started = processor_seconds()
        compiled = self._compile(gm, example_inputs)
        self.seconds += processor_seconds() - started

        def call(*args: Any) -> Any:
            self.called = self.called or processor_seconds()
            return compiled(*args)

        return call


def compiler_of(method: str) -> Compiler:
    """The backend of a method, Inductor inside of each."""
    if method == PLAIN:
        inductor: Any = torch._dynamo.lookup_backend("inductor")
        return cast(Compiler, inductor)
    options = {"piece_compiler": "inductor", "split_ops": [SPLIT_OP]}
    return lambda gm, example_inputs: ours.dsv4_piecewise(gm, example_inputs, options=options)


def compile_once(model: str, layers: int, method: str) -> dict[str, float]:
    """Compile, call twice, compare with eager.

    Args:
        model: one of `MODELS`.
        layers: of the model.
        method: one of `METHODS`.

    Returns:
        Seconds by stage, as in the module's docstring.

    Raises:
        AssertionError: the compiled model gives other numbers than the eager one.
    """
    module, inputs = MODELS[model](layers)
    backend = TimedBackend(compiler_of(method))
    compiled = torch.compile(module, backend=backend, dynamic=True)
    seconds: dict[str, float] = defaultdict(float)
    with ExitStack() as stack, torch.no_grad():
        for name in ("plan_graph", "compile_pieces") if method != PLAIN else ():
            stack.enter_context(patch.object(ours, name, _timed(getattr(ours, name), name, seconds)))
        if method == APART:
            stack.enter_context(patch.object(unit_key, "_step_key", _never_equal))
        started = processor_seconds()
        compiled(*inputs)
        assert backend.called is not None
        captures = processor_seconds()
        result = compiled(*inputs)
        finished = processor_seconds()
        torch.testing.assert_close(result, module(*inputs), rtol=1e-4, atol=1e-4)
    assert (method == APART) <= (counters.pieces_reused == 0), "pieces were reused"
    return {
        "tracing": backend.called - started - backend.seconds,
        "backend": backend.seconds,
        "plan": seconds["plan_graph"],
        "pieces": seconds["compile_pieces"],
        "second": finished - captures,
    }


def processor_seconds() -> float:
    """Processor time of this process and of those that it started and that have ended."""
    used = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def start_toolchain() -> None:
    """Let Inductor do what it does once a process and once a cache."""
    torch.compile(lambda x: x.sin() + 1)(torch.randn(64))


def _timed(function: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        started = processor_seconds()
        try:
            return function(*args)
        finally:
            seconds[name] += processor_seconds() - started

    return timed


def _never_equal(*_: Any) -> object:
    return object()


def main(arguments: Sequence[str]) -> None:
    """Without arguments only the toolchain is started."""
    torch.set_num_threads(1)
    start_toolchain()
    if arguments:
        model, layers, method = arguments
        print(json.dumps(compile_once(model, int(layers), method)))


if __name__ == "__main__":
    main(sys.argv[1:])
