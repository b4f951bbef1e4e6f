"""What captured pieces are compared with: one graph of a whole step, and torch's own graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsv4_compile.runtime.engines.select import engine_for

from .bench import Bench
from .timing import Step


def full_graph(bench: Bench, run: Callable[[], Any]) -> Step:
    """One graph of everything that a step does, by torch alone on a GPU; a replay gives what the capture gave.

    Args:
        bench: where to run.
        run: it must be safe to capture, and read inputs that stay where they are.
    """
    if bench.device == "cuda":
        return _graph_of_torch(run)
    engine, results = engine_for("auto", torch.device(bench.device)), []
    engine.warm_up(run)
    graph = engine.capture(lambda: results.append(run()), engine.make_pool(), name="one full graph")

    def replay() -> object:
        graph.replay()
        return results[0]

    return replay


def _graph_of_torch(run: Callable[[], Any]) -> Step:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> object:
        graph.replay()
        return result

    return replay


def compiled_plainly(bench: Bench, model: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` as it comes; in a dry run without a C++ compiler."""
    made: Callable[..., Any] = torch.compile(model, dynamic=True, backend=bench.pick("inductor", "aot_eager"))
    return made


def with_graphs_of_torch(bench: Bench, model: Callable[..., Any], split_ops: Sequence[str] = ()) -> Callable[..., Any]:
    """`mode="reduce-overhead"`; with split ops, Inductor cuts its graphs at them.

    Raises:
        NotImplementedError: this Inductor cannot cut at ops.
    """
    options: dict[str, Any] = {"triton.cudagraphs": True}
    if split_ops:
        from torch._inductor import config

        if not hasattr(config, "custom_should_partition_ops") or not hasattr(config, "graph_partition"):
            raise NotImplementedError(f"Inductor of torch {torch.__version__} has no custom_should_partition_ops")
        # both spellings: which one is asked for has changed
        names = [name for op in split_ops for name in (op, f"{op}.default")]
        options |= {"graph_partition": True, "custom_should_partition_ops": names}
    # not dynamic: its graphs are of one size each, so this is where it is at its best
    keywords: dict[str, Any] = {"backend": "aot_eager"} if bench.dry else {"options": options}
    compiled = torch.compile(model, dynamic=False, **keywords)

    def call(*inputs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*inputs)

    return call


def cudagraph_skips() -> int:
    """How often Inductor has decided to make no graph, in this process."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def quietly() -> None:
    """Warnings of compilers are not what the output is for."""
    warnings.simplefilter("ignore")
