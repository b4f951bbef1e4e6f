"""Time of one prefill step of a stack of attention layers, under each configuration.

    python -m benchmarks.ttft [--layers 61] [--tokens 32] [--device cpu]

A step has new input tensors, as a server has; under mrv1 its step state is new too, under mrv2 it stays where it is.
The table has the eager launches per step beside the time: every one of them is launched by hand. On a CPU the kernels
are plain torch and dominate, so the ratios there say little about a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

import dsv4_compile
from dsv4_compile.models.deepseek_v4 import StepState

from .attention_stack import mark_request_dims, stack_and_inputs
from .dispatch import measure

CONFIGURATIONS = {
    "mrv1 wide": {"runner": "mrv1", "region": "wide"},
    "mrv1 minimal": {"runner": "mrv1", "region": "minimal"},
    "mrv2 narrow": {"runner": "mrv2", "region": "narrow"},
}


def steps(layers: int, tokens: int, device: str) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """What is compared, and the eager op launches that a step of each makes."""
    stack, (ids, positions, step) = stack_and_inputs(layers, tokens, device)
    rows: dict[str, Callable[[], object]] = {"eager": lambda: stack(ids.clone(), positions.clone(), step)}
    launches: dict[str, int] = {}
    for name, options in CONFIGURATIONS.items():
        torch._dynamo.reset()
        compiled = torch.compile(stack, backend="dsv4_piecewise", dynamic=True, options=dict[str, Any](options))
        rows[name] = one_step(compiled, ids, positions, step, renews=options["runner"] == "mrv1")
        with torch.no_grad():
            for _ in range(2):  # warm-up, capture
                rows[name]()
            before = dsv4_compile.counters.eager_op_calls
            rows[name]()
            launches[name] = dsv4_compile.counters.eager_op_calls - before
    return rows, launches


def one_step(
    compiled: Callable[..., Any], ids: torch.Tensor, positions: torch.Tensor, step: StepState, *, renews: bool
) -> Callable[[], object]:
    """A call with new inputs; with new step state too if the runner renews it."""
    fields = [field.name for field in dataclasses.fields(step)]
    if not renews:
        for field in fields:
            torch._dynamo.mark_static_address(getattr(step, field))

    def run() -> object:
        state = step
        if renews:
            state = mark_request_dims(StepState(**{field: getattr(step, field).clone() for field in fields}))
        return compiled(ids.clone(), positions.clone(), state)

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4.0, help="measuring time of each row")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    rows, launches = steps(options.layers, options.tokens, options.device)
    medians = measure(rows, options.seconds)
    print(f"{options.layers} layers, prefill of {options.tokens} tokens, {options.device}, torch {torch.__version__}")
    print(f"{'':<14}{'ms a step':>10}{'of eager':>10}{'eager op calls':>16}")
    for name, seconds in medians.items():
        calls = launches.get(name, "all")
        print(f"{name:<14}{seconds * 1e3:>10.2f}{seconds / medians['eager']:>10.2f}{calls:>16}")


if __name__ == "__main__":
    main()
