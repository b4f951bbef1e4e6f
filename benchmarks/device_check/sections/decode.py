"""S5: decode steps of eight layers with the dims of the Flash model, beside one full graph, eager and torch's graphs.

The hole is a stand-in that a graph can hold; the real ops stand beside it, with what they launch and wait for. Rows are
compared within a group: `in place`, nothing is made for a step and all read inputs that stay; `renewed`, all inputs are
made anew before every step, whether it reads them or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_compile import counters
from dsv4_compile.models.deepseek_v4 import AttentionStack

from ..bench import Bench
from ..graphs import compiled_plainly, cudagraph_skips, full_graph, with_graphs_of_torch
from ..hole import SPLIT_OPS, light_ops
from ..models import (
    FLASH_RATIOS,
    Batches,
    Inputs,
    compiled,
    config_of,
    draw_stack,
    inductor_of,
    many_recompiles,
    step_in_place,
    step_renewed,
)
from ..timing import Step, build, measure

TOKENS, DRY_TOKENS = (8, 1, 64, 256), (8,)  # the one of the headline first
CONTEXT, DRY_CONTEXT = 512, 40
TOLERANCE = 0.1  # of the largest logit: bf16 through eight layers
SYNCS = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal")
Builders = dict[str, Callable[[], Step]]


def run(bench: Bench) -> None:
    """Each number of tokens with the stand-in, then torch's own graphs, then the real ops."""
    model, batches = _model(bench)
    share = bench.remaining() / 3
    with many_recompiles():
        with light_ops(bench.device):
            for tokens in bench.pick(TOKENS, DRY_TOKENS):
                for group, rows in (("in place", in_place), ("renewed", with_new_inputs)):
                    inputs = batches.decode(tokens, _context(bench))
                    _compare(bench, rows(bench, model, inputs), share / 8, tokens=tokens, inputs=group, hole="stand-in")
        bench.apart(f"{__name__}:graphs_of_torch", bench.remaining() / 2)
        for tokens in bench.pick((8, 64), DRY_TOKENS):
            inputs = batches.decode(tokens, _context(bench))
            rows_with_ops = with_real_ops(bench, model, inputs)
            _compare(bench, rows_with_ops, share / 8, tokens=tokens, inputs="renewed", hole="the real ops")
        with bench.attempt(what="the hole"):
            count_the_hole(bench, model, batches.decode(8, _context(bench)))


def fill_caches(bench: Bench) -> None:
    """Compile what the section will."""
    model, batches = _model(bench)
    with light_ops(bench.device), many_recompiles(), torch.no_grad():
        for tokens in (8, 1):
            for region in ("narrow", "wide", "minimal"):
                with bench.attempt(filling="decode", region=region):
                    call = compiled(model, runner="mrv2", region=region, engine="off", piece_compiler="inductor")
                    step_in_place(call, batches.decode(tokens, CONTEXT))()


def in_place(bench: Bench, model: AttentionStack, inputs: Inputs) -> Builders:
    """Rows of steps that read inputs which stay."""
    inductor = inductor_of(bench)

    def ours(**options: Any) -> Callable[[], Step]:
        return lambda: step_in_place(compiled(model, runner="mrv2", **options), inputs)

    return {
        "eager": lambda: step_in_place(model, inputs),
        "one full graph": lambda: full_graph(bench, partial(model, *inputs)),
        "mrv2 narrow": ours(region="narrow", piece_compiler=inductor),
        "mrv2 narrow, eager pieces": ours(region="narrow", piece_compiler="eager"),
        "mrv2 narrow, check=off": ours(region="narrow", piece_compiler=inductor, check="off"),
        "mrv2 minimal": ours(region="minimal", piece_compiler=inductor),
        "mrv2 wide": ours(region="wide", piece_compiler=inductor),
        "torch.compile": lambda: step_in_place(compiled_plainly(bench, model), inputs),
    }


def with_new_inputs(bench: Bench, model: AttentionStack, inputs: Inputs) -> Builders:
    """Rows of steps before which all inputs are made anew."""
    found: Builders = {"eager": lambda: step_renewed(model, inputs, reads_new=True)}
    for runner, region in (("mrv1", "wide"), ("mrv1", "minimal"), ("mrv2", "narrow")):
        found[f"{runner} {region}"] = partial(_renewed_step, bench, model, inputs, runner, region)
    return found


def with_real_ops(bench: Bench, model: AttentionStack, inputs: Inputs) -> Builders:
    """The same rows; the ops of the hole take most of their time."""
    found = with_new_inputs(bench, model, inputs)
    return found | {"mrv2 wide": partial(_renewed_step, bench, model, inputs, "mrv2", "wide")}


def graphs_of_torch(bench: Bench) -> None:
    """In a process of its own: torch's graphs clear the workspaces of cuBLAS."""
    model, batches = _model(bench)
    tokens = bench.pick(TOKENS, DRY_TOKENS)[:2]
    with light_ops(bench.device), many_recompiles():
        for count in tokens:
            inputs = batches.decode(count, _context(bench))
            rows: Builders = {
                "eager, beside": partial(step_in_place, model, inputs),
                "one full graph, beside": partial(full_graph, bench, partial(model, *inputs)),
                "reduce-overhead": partial(_graphed, bench, model, inputs, ()),
                "reduce-overhead, partitioned": partial(_graphed, bench, model, inputs, SPLIT_OPS),
            }
            seconds = bench.remaining() / 8
            _compare(bench, rows, seconds, tokens=count, inputs="in place", hole="stand-in")
    bench.row("cudagraph_skips", cudagraph_skips(), expected=0)


@torch.no_grad()
def count_the_hole(bench: Bench, model: AttentionStack, inputs: Inputs) -> None:
    """What the real ops launch and wait for in a step, and what a captured step leaves to launch."""
    with _LaunchCount() as seen:
        model(*inputs)
    for op in SPLIT_OPS:
        name = op.partition("::")[2]
        bench.row("launches", seen.launches[name], op=name)
        bench.row("syncs", seen.syncs[name], op=name)
    step = step_in_place(compiled(model, runner="mrv2", piece_compiler="eager"), inputs)
    for _ in range(3):
        step()
    before = counters.eager_op_calls
    step()
    bench.row("eager_ops_a_step", counters.eager_op_calls - before, config="mrv2 narrow")


class _LaunchCount(TorchDispatchMode):
    """Counts what runs inside of the split ops: ops that are no views, and those that the host waits for.

    Attributes:
        launches: by split op.
        syncs: by split op.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self._inside: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if f"{namespace}::{name}" in SPLIT_OPS and self._inside is None:
            self._inside = name
            try:
                with self:  # the op is Python, and what it calls comes here too
                    key = torch._C.DispatchKey.CUDA if args[0].is_cuda else torch._C.DispatchKey.CPU
                    return func.redispatch(torch._C.DispatchKeySet(key), *args, **(kwargs or {}))
            finally:
                self._inside = None
        if self._inside is not None:
            with self:  # what is made of other ops comes whole, and launches what they do
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
            self.launches[self._inside] += not func.is_view
            self.syncs[self._inside] += name in SYNCS
        return func(*args, **(kwargs or {}))


def _renewed_step(bench: Bench, model: AttentionStack, inputs: Inputs, runner: str, region: str) -> Step:
    call = compiled(model, runner=runner, region=region, piece_compiler=inductor_of(bench))
    return step_renewed(call, inputs, reads_new=runner == "mrv1")


def _graphed(bench: Bench, model: AttentionStack, inputs: Inputs, split_ops: tuple[str, ...]) -> Step:
    return step_in_place(with_graphs_of_torch(bench, model, split_ops), inputs)


def _compare(bench: Bench, rows: Builders, seconds: float, **case: Any) -> None:
    measure(bench, build(bench, rows, TOLERANCE, **case), seconds, **case)


def _context(bench: Bench) -> int:
    return bench.pick(CONTEXT, DRY_CONTEXT)


def _model(bench: Bench) -> tuple[AttentionStack, Batches]:
    model = draw_stack(bench, config_of(bench, bench.pick(FLASH_RATIOS, (4,)), max_len=1024))
    most = max(bench.pick(TOKENS, DRY_TOKENS))
    return model, Batches(model, requests=most, max_len=_context(bench) + 8)
