"""The backend, top to bottom.

options                                  -> Config     config.py
Dynamo's graph                           -> Draft      tracing.py
normalise, effects, regions, partition   -> Draft      passes/__init__.py, in order
what explain, logs and dumps show        -> Plan       make_plan.py
parts of pieces                          -> functions  compile_pieces.py
pieces and regions, one after another    -> callable   runtime/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from .compat import concrete_stand_ins, graph_break_reason, symbolic_stand_ins, upper_bound
from .compile_pieces import compile_pieces
from .config import Config
from .counting import counters
from .draft import Draft, StandIns
from .inspect.artifacts import Artifacts, log
from .make_plan import make_plan, token_count
from .ops.registry import snapshot, with_split_ops
from .passes import Observer, pass_order, run_passes
from .plan import Plan
from .reasons import graph_device
from .runtime.captured import CapturedCallable, release_all
from .runtime.engine import engine_for
from .runtime.pieces import Pieces
from .runtime.uncaptured import UncapturedCallable
from .tracing import draft_graph


def dsv4_piecewise(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
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
    config = Config.from_options(options, mode)
    artifacts = Artifacts(config)
    draft, plan = plan_graph(gm, example_inputs, config, artifacts.observe)
    artifacts.finish(draft, plan)
    pieces = Pieces(draft, compile_pieces(draft, config), example_inputs)
    counters.add(
        graphs_compiled=1,
        pieces_compiled=len(plan.pieces) - len(draft.copies),
        pieces_reused=len(draft.copies),
        regions=len(plan.regions),
    )
    return make_callable(draft, pieces, config, artifacts)


def make_callable(draft: Draft, pieces: Pieces, config: Config, artifacts: Artifacts) -> Callable[..., Any]:
    """What runs the plan: captured programs, or the units one by one."""
    if draft.uncaptured is not None:
        log.warning("calls run uncaptured: %s", draft.uncaptured)
    if config.engine == "off" or draft.uncaptured is not None:
        return UncapturedCallable(draft, pieces)
    tokens = token_count(draft)
    if tokens is None and (config.capture_sizes is not None or config.max_tokens is not None):
        log.warning("no tensor of this graph says how many tokens there are: capture_sizes and max_tokens mean nothing")
    bound = config.token_bound or (None if tokens is None else upper_bound(tokens))
    engine = engine_for(config.engine, graph_device(draft))
    show = artifacts.show_program
    return CapturedCallable(draft, pieces, config, engine, tokens=tokens, bound=bound, show_program=show)


def reset() -> None:
    """Free every capture, pool and arena; `torch._dynamo.reset()` calls this."""
    release_all()


# where Dynamo looks for it
dsv4_piecewise.reset = reset  # type: ignore[attr-defined]


def plan_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: Config, observe: Observer
) -> tuple[Draft, Plan]:
    """Compute what becomes of a graph, without compiling or capturing anything."""
    ops = with_split_ops(snapshot(), config.split_ops)
    draft = draft_graph(gm, example_inputs, ops, graph_break_reason(gm))

    def concrete() -> StandIns:
        mode, values = concrete_stand_ins(example_inputs)
        return StandIns(mode=mode, values=values, concrete=True)

    def symbolic() -> StandIns:
        mode, values = symbolic_stand_ins(example_inputs, gm)
        return StandIns(mode=mode, values=values, concrete=False)

    draft = run_passes(draft, pass_order(config, concrete, symbolic), observe)
    return draft, make_plan(draft, config)
