"""The backend, top to bottom.

options                                  -> Config             config.py
Dynamo's graph                           -> PlainGraph         graph/desugar.py
a graph on plain tensors                 -> TracedGraph        graph/tracing.py
normalise, effects, regions              -> TracedGraph        passes/__init__.py, in order
partition, duplicates, streams, slots    -> PartitionedGraph   passes/__init__.py, in order
what explain, logs and dumps show        -> Plan               inspect/make_plan.py
subgraphs of pieces                      -> functions          piece_compilers.py
pieces and regions, one after another    -> callable           runtime/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import fx

from .compat.dynamo import resumable_trace
from .compat.symbols import upper_bound
from .config import Config
from .counting import counters
from .graph.desugar import in_plain_tensors
from .graph.partitioned import PartitionedGraph
from .graph.traced import Value
from .inspect.artifacts import Artifacts
from .inspect.make_plan import make_plan
from .log import log
from .piece_compilers import compile_pieces
from .plan_graph import plan_again, plan_graph
from .runtime.captured import CapturedCallable, PlanAgain, release_all
from .runtime.engines.capture_state import restoring
from .runtime.engines.select import engine_for
from .runtime.pieces.pieces import Pieces
from .runtime.plain_tensors import on_plain_tensors
from .runtime.traced_call import TracedCall
from .runtime.uncaptured import UncapturedCallable


def dsv4_piecewise(
    gm: fx.GraphModule,
    example_inputs: Sequence[Value],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., object]:
    """The Dynamo backend: `torch.compile(model, backend="dsv4_piecewise", options={...})`.

    Args:
        gm: the graph Dynamo traced, before AOTAutograd; it is not changed.
        example_inputs: one real tensor or SymInt per placeholder.
        options: see README.md; not changed.
        mode: only None or "default".

    Returns:
        A callable that takes and returns what the graph does.

    Raises:
        Dsv4Error: one of its subclasses in `errors`, as itself.
    """
    return restoring(compile_graph, gm, example_inputs, Config.from_options(options, mode))


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Value], config: Config) -> Callable[..., object]:
    """The pipeline; see the module docstring."""
    artifacts = Artifacts(config)
    plain = in_plain_tensors(gm, example_inputs)
    graph = plan_graph(plain.gm, plain.example_inputs, config, artifacts.observe)
    plan = make_plan(graph, config)
    artifacts.finish(graph, plan)
    pieces = Pieces(graph, compile_pieces(graph, config))
    traced_call = TracedCall(graph.traced, plain.example_inputs)
    counters.add(
        graphs_compiled=1,
        pieces_compiled=len(plan.pieces) - len(graph.duplicates) + (graph.full is not None),
        pieces_reused=len(graph.duplicates),
        regions=len(plan.regions),
    )
    return on_plain_tensors(plain, make_callable(graph, pieces, traced_call, config, artifacts))


def plan_anew(config: Config, artifacts: Artifacts) -> PlanAgain:
    """What plans a graph again, in a later call, as if this compilation were still going on."""
    trace = resumable_trace()

    def plan(graph: PartitionedGraph, refused: Mapping[fx.Node, str]) -> tuple[PartitionedGraph, Pieces]:
        with trace():
            graph = plan_again(graph, refused, config, artifacts.observe)
            artifacts.show_plan(graph, make_plan(graph, config))
            return graph, Pieces(graph, compile_pieces(graph, config))

    return plan


def make_callable(
    graph: PartitionedGraph, pieces: Pieces, traced_call: TracedCall, config: Config, artifacts: Artifacts
) -> Callable[..., object]:
    """What runs the plan: captured programs, or the units one by one."""
    if graph.uncaptured is not None:
        log.warning("calls run uncaptured: %s", graph.uncaptured)
    if config.engine == "off" or graph.uncaptured is not None:
        return UncapturedCallable(graph, pieces, traced_call)
    tokens = graph.token_count
    if tokens is None and (config.capture_sizes is not None or config.max_tokens is not None):
        log.warning("no tensor of this graph says how many tokens there are: capture_sizes and max_tokens mean nothing")
    bound = config.token_bound or (None if tokens is None else upper_bound(tokens))
    engine = engine_for(config.engine, graph.traced.device)
    show = artifacts.show_program
    again = plan_anew(config, artifacts)
    make = partial(CapturedCallable, config=config, engine=engine, bound=bound, plan_again=again)
    if graph.full is None:
        return make(graph, pieces, traced_call, show_program=show)
    of_full = Pieces(graph.full, compile_pieces(graph.full, config))
    full = make(graph.full, of_full, traced_call, show_program=artifacts.show_full_program, is_full=True)
    return make(graph, pieces, traced_call, show_program=show, full=full)


def reset() -> None:
    """Free every capture, pool and arena; `torch._dynamo.reset()` calls this."""
    release_all()


# where Dynamo looks for it
dsv4_piecewise.reset = reset  # type: ignore[attr-defined]
