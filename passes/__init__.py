"""The passes, in order, and the runner that applies them.

Each takes a `Draft` and returns one; none keeps state between graphs. `run_passes` lints the graph after every
pass, and shows each stage to an observer (the dump folder, the logs, a test).
"""

from __future__ import annotations

if __name__ != "dsv4_compile.passes":
    # A second copy under another name would break identity checks on the classes that both define.
    raise ImportError("import this package as dsv4_compile.passes, not as passes")

from collections.abc import Callable
from functools import partial

from ..config import Config
from ..draft import Draft, StandIns
from .assign_lanes import assign_lanes
from .check_hazards import check_hazards
from .check_partition import check_partition
from .choose_regions import choose_regions
from .cut_pieces import cut_pieces
from .decompose_sizes import decompose_sizes
from .find_copies import find_copies
from .infer_effects import infer_effects
from .move_nodes import move_nodes
from .partition_graph import partition_graph
from .place_getitems import place_getitems
from .plan_workspace import plan_workspace
from .rebase_results import rebase_results
from .relate_offsets import relate_offsets
from .resolve_targets import resolve_targets
from .scope_modes import scope_modes

Pass = Callable[[Draft], Draft]
Observer = Callable[[str, Draft], None]
MakeStandIns = Callable[[], StandIns]


def pass_order(config: Config, concrete: MakeStandIns, symbolic: MakeStandIns) -> tuple[Pass, ...]:
    """All passes with their settings bound, in the order in which they run.

    Args:
        config: the options.
        concrete, symbolic: make fakes of the graph's inputs, with the sizes of the trace or with symbols.
    """
    return (
        resolve_targets,
        scope_modes,
        decompose_sizes,
        place_getitems,  # after sizes: a torch.Size is a tuple too, and is gone by now
        partial(infer_effects, concrete=concrete, symbolic=symbolic),  # everything below decides from effects
        relate_offsets,  # before results are rebased, which makes strided views of its own
        rebase_results,
        partial(choose_regions, runner=config.resolved_runner, region=config.resolved_region),
        partial(move_nodes, region=config.resolved_region),
        partial(check_hazards, runner=config.resolved_runner),  # after moves: it judges what will run
        partition_graph,
        check_partition,
        find_copies,
        partial(assign_lanes, config=config),  # after copies, which run on the lanes of their originals
        plan_workspace,
        partial(cut_pieces, config=config),  # after the workspace: what cannot be captured is not compiled either
    )


def run_passes(draft: Draft, passes: tuple[Pass, ...], observe: Observer) -> Draft:
    """Apply the passes one after another; `observe(name, draft)` sees the graph before the first and after each."""
    observe("dynamo", draft)
    for transform in passes:
        draft = transform(draft)
        draft.gm.graph.lint()
        observe(pass_name(transform), draft)
    return draft


def pass_name(transform: Pass) -> str:
    """The verb_object name of a pass, its settings bound or not."""
    function = transform.func if isinstance(transform, partial) else transform
    return str(function.__name__)
