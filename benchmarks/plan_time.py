"""What the passes cost beside Dynamo's own tracing, on stacks of attention layers.

    python -m benchmarks.plan_time [--layers 61]

Dynamo's time is what passes from the call to the first line that the compiled function runs, less the time inside the
backend; each pass is timed in the same compilation, so both shares come from one run. Medians over the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dsv4_compile.backend import plan_graph
from dsv4_compile.config import Config
from dsv4_compile.draft import Draft

from .attention_stack import stack_and_inputs


def timed_compile(layers: int) -> dict[str, float]:
    """Seconds of one compilation: "tracing" is Dynamo without the backend, the rest the backend's stages in order."""
    stack, inputs = stack_and_inputs(layers)
    seconds: dict[str, float] = defaultdict(float)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        started = last = time.perf_counter()

        def observe(stage: str, draft: Draft) -> None:
            nonlocal last
            now = time.perf_counter()
            seconds[stage] += now - last
            last = now

        plan_graph(gm, example_inputs, Config(), observe)
        seconds["backend"] = time.perf_counter() - started

        def compiled(*args: Any) -> Any:
            seconds["called"] = time.perf_counter()
            return gm.forward(*args)

        return compiled

    torch._dynamo.reset()
    started = time.perf_counter()
    with torch.no_grad():
        torch.compile(stack, backend=backend, dynamic=True)(*inputs)
    return {"tracing": seconds.pop("called") - started - seconds["backend"], **seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    runs = [timed_compile(options.layers) for _ in range(options.repeats)]
    medians = {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}
    traced = medians["tracing"]
    print(f"{options.layers} layers, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'stage':<20}{'seconds':>10}{'of tracing':>12}")
    for stage, seconds in medians.items():
        print(f"{stage:<20}{seconds:>10.3f}{seconds / traced:>11.1%}")
    both = medians["infer_effects"] + medians["choose_regions"]
    print(f"infer_effects + choose_regions: {both / traced:.1%} of tracing")


if __name__ == "__main__":
    main()
