"""S4: what it costs to launch a step, on a toy whose kernels hardly count, beside one graph, eager and torch's graphs.

A layer is four kernels, one of them the split op, so a step of n layers is n + 1 pieces. From the depths follows what
one more piece and its split op cost the host. torch's own graphs clear the workspaces of cuBLAS, so they are measured
in a process of their own, beside eager and one graph again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dsv4_compile.compat.cuda import bound_replay

from ...dispatch import TOKENS, bound_kernels, run_all
from ...toy import SPLIT_OP, WIDTH, Toy
from ..bench import Bench
from ..graphs import compiled_plainly, cudagraph_skips, full_graph, with_graphs_of_torch
from ..models import compiled, inductor_of, many_recompiles
from ..timing import Medians, Step, build, host_us, measure

DEPTHS, DRY_DEPTHS = (1, 11, 61), (1, 3)
TOLERANCE = 1e-4


def run(bench: Bench) -> None:
    """All depths, then what follows from them."""
    found: dict[int, Medians] = {}
    with many_recompiles():
        for layers in bench.pick(DEPTHS, DRY_DEPTHS):
            case: dict[str, Any] = {"layers": layers, "tokens": TOKENS, "hole": "attend"}
            steps = build(bench, builders(bench, layers), TOLERANCE, **case)
            found[layers] = measure(bench, steps, bench.remaining() / 8, **case)
            _write_slopes(bench, found)
    with bench.attempt(what="one kernel"):
        _replay_of_one_kernel(bench)
    bench.apart(f"{__name__}:graphs_of_torch", bench.remaining() - 3)


def builders(bench: Bench, layers: int) -> dict[str, Callable[[], Step]]:
    """What is compared, by name."""
    model, x = _toy(bench, layers)

    def ours(**options: Any) -> Callable[[], Step]:
        return lambda: partial(compiled(model, split_ops=[SPLIT_OP], **options), x)

    return {
        "eager": lambda: partial(model, x),
        "bound launches": lambda: partial(run_all, bound_kernels(model, x)),
        "one full graph": lambda: full_graph(bench, partial(model, x)),
        "torch.compile": lambda: partial(compiled_plainly(bench, model), x),
        "captured, eager": ours(piece_compiler="eager"),
        "captured, inductor": ours(piece_compiler=inductor_of(bench)),
        "captured, inductor, check=off": ours(piece_compiler=inductor_of(bench), check="off"),
        "captured, inductor, static outputs": ours(piece_compiler=inductor_of(bench), static_outputs=True),
        "not captured": ours(piece_compiler="eager", engine="off"),
    }


def graphs_of_torch(bench: Bench) -> None:
    """In a process of its own."""
    with many_recompiles():
        for layers in bench.pick(DEPTHS, DRY_DEPTHS[:1]):
            case: dict[str, Any] = {"layers": layers, "tokens": TOKENS, "hole": "attend"}
            steps = build(bench, builders_of_torch(bench, layers), TOLERANCE, **case)
            measure(bench, steps, bench.remaining() / 4, **case)
    bench.row("cudagraph_skips", cudagraph_skips(), expected=0)


def builders_of_torch(bench: Bench, layers: int) -> dict[str, Callable[[], Step]]:
    """The rows of that process."""
    model, x = _toy(bench, layers)
    return {
        "eager, beside": lambda: partial(model, x),
        "one full graph, beside": lambda: full_graph(bench, partial(model, x)),
        "reduce-overhead": lambda: partial(with_graphs_of_torch(bench, model), x),
        "reduce-overhead, partitioned": lambda: partial(with_graphs_of_torch(bench, model, (SPLIT_OP,)), x),
    }


def _toy(bench: Bench, layers: int) -> tuple[Toy, torch.Tensor]:
    torch.manual_seed(layers)
    model = Toy(layers).to(bench.device).requires_grad_(False)
    return model, torch.randn(TOKENS, WIDTH, device=bench.device)


def _write_slopes(bench: Bench, found: dict[int, Medians]) -> None:
    """Host time of one more layer, which is a piece and a split op."""
    low, high = min(found), max(found)
    for config in found[high] if high > low else ():
        if config in found[low]:
            slope = (found[high][config]["host_us"] - found[low][config]["host_us"]) / (high - low)
            bench.row("host_us_per_piece", slope, config=config, layers=f"{low} to {high}")


def _replay_of_one_kernel(bench: Bench) -> None:
    """What a replay costs by the way it is called, beside the one op of a region."""
    x, out = torch.ones(TOKENS, WIDTH, device=bench.device), torch.zeros(TOKENS, WIDTH, device=bench.device)
    ways: dict[str, Step] = {"the split op of a region": partial(torch.ops.dispatch_benchmark.attend.default, x, out)}
    if bench.device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out.copy_(x)
        replays: list[Step] = [graph.replay]

        def in_a_loop() -> None:
            for replay in replays:
                replay()

        ways |= {"bound": bound_replay(graph), "CUDAGraph.replay": graph.replay, "in a loop": in_a_loop}
    host_us(bench, ways, "replay")
