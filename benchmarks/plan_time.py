"""What each pass costs beside Dynamo's own tracing, on a stack of attention layers.

Dynamo's time is what passes from the call to the first line that the compiled function runs, less the time inside the
backend; each pass is timed in the same compilation, so all shares come from one run.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dsv4_compile.config import Config
from dsv4_compile.graph.partitioned import PartitionedGraph
from dsv4_compile.graph.traced import TracedGraph
from dsv4_compile.inspect.make_plan import make_plan
from dsv4_compile.plan_graph import plan_graph

from .attention_stack import stack_and_inputs
from .compile_once import TimedBackend, processor_seconds
from .sections import Section, Setting, Table

INTRO = """
The passes on a stack of {layers} attention layers beside Dynamo's tracing of it ({traced:.2f} s): {share:.1%} of that
for all passes and the plan together. Processor time, medians of {repeats} compilations in one process.
"""


def timed_compile(layers: int) -> dict[str, float]:
    """Seconds of one compilation: "tracing" is Dynamo without the backend, the rest the stages in order."""
    stack, inputs = stack_and_inputs(layers)
    seconds: dict[str, float] = defaultdict(float)

    def plan(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        last = processor_seconds()

        def observe(stage: str, graph: TracedGraph | PartitionedGraph) -> None:
            nonlocal last
            now = processor_seconds()
            seconds[stage] += now - last
            last = now

        config = Config()
        make_plan(plan_graph(gm, example_inputs, config, observe), config)
        seconds["make_plan"] = processor_seconds() - last
        return gm.forward

    backend = TimedBackend(plan)
    torch._dynamo.reset()
    started = processor_seconds()
    with torch.no_grad():
        torch.compile(stack, backend=backend, dynamic=True)(*inputs)
    assert backend.called is not None
    return {"tracing": backend.called - started - backend.seconds, **seconds}


def run(setting: Setting) -> Section:
    """Time every stage."""
    layers, repeats = (2, 1) if setting.quick else (61, 3)
    runs = [timed_compile(layers) for _ in range(repeats)]
    medians = {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}
    traced = medians.pop("tracing")
    rows = tuple((stage, f"{seconds * 1e3:.0f}", f"{seconds / traced:.1%}") for stage, seconds in medians.items())
    share = sum(medians.values()) / traced
    intro = INTRO.format(layers=layers, traced=traced, share=share, repeats=repeats)
    return Section(title="Passes", parts=(intro, Table(("stage", "ms", "of tracing"), rows)))
