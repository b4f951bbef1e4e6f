"""The passes, in order, and the runner that applies them.

    TracedGraph      --traced passes-->       TracedGraph
    TracedGraph      --partition_graph-->     PartitionedGraph
    PartitionedGraph --partitioned passes-->  PartitionedGraph

None keeps state between graphs. `run_passes` lints the graph after every pass, and shows each stage to an observer (the
dump folder, the logs, a test). `plan_graph.py` runs all of them.
"""

from __future__ import annotations

if __name__ != "dsv4_compile.passes":
    # A second copy under another name would break identity checks on the classes that both define.
    raise ImportError("import this package as dsv4_compile.passes, not as passes")

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import fx

from ..config import Config
from ..graph.partitioned import PartitionedGraph
from ..graph.traced import FakeInputs, SizeValues, TracedGraph
from .add_full_graph import add_full_graph
from .assign_streams import assign_streams
from .check_hazards import check_hazards
from .check_partition import check_partition
from .choose_regions import choose_regions
from .cut_subgraphs import cut_subgraphs
from .decompose_sizes import decompose_sizes
from .find_duplicates import find_duplicates
from .fuse_transforms import fuse_transforms
from .infer_effects import infer_effects
from .inline_bodies import inline_bodies
from .join_results import join_results
from .lift_size_checks import lift_size_checks
from .move_nodes import move_nodes
from .name_collectives import name_collectives
from .partition_graph import partition_graph as partition_graph
from .place_getitems import place_getitems
from .place_waits import place_waits
from .plan_workspace import plan_workspace
from .rebase_results import rebase_results
from .relate_offsets import relate_offsets
from .resolve_targets import resolve_targets
from .scope_modes import scope_modes
from .settle_rebindings import settle_rebindings
from .try_ones import try_ones

TracedPass = Callable[[TracedGraph], TracedGraph]
PartitionedPass = Callable[[PartitionedGraph], PartitionedGraph]
Observer = Callable[[str, TracedGraph | PartitionedGraph], None]
MakeFakeInputs = Callable[[], FakeInputs]
ResizeFakeInputs = Callable[[SizeValues], FakeInputs]
Graph = TypeVar("Graph", TracedGraph, PartitionedGraph)


def traced_passes(
    config: Config, concrete: MakeFakeInputs, symbolic: MakeFakeInputs, resized: ResizeFakeInputs
) -> tuple[TracedPass, ...]:
    """What runs before the partition, with settings bound, in order.

    Args:
        config: the options.
        concrete, symbolic, resized: make fakes of the graph's inputs, with the sizes of the trace, with symbols, or
            with given sizes.
    """
    return (
        inline_bodies,
        fuse_transforms,  # after bodies, which may have transforms in them
        resolve_targets,
        scope_modes,
        decompose_sizes,
        lift_size_checks,  # after sizes: what is left of them is read off tensors whose size depends on data
        place_getitems,  # after sizes: a torch.Size is a tuple too, and is gone by now
        place_waits,
        name_collectives,
        partial(infer_effects, concrete=concrete, symbolic=symbolic),  # everything below decides from effects
        settle_rebindings,
        partial(try_ones, resized=resized),
        relate_offsets,  # before results are rebased, which makes strided views of its own
        join_results,
        rebase_results,
        *region_passes(config),
    )


def region_passes(config: Config) -> tuple[TracedPass, ...]:
    """The last of them: which nodes are eager. They run again once a capture has shown what no graph can hold."""
    return (
        partial(
            choose_regions,
            runner=config.resolved_runner,
            region=config.resolved_region,
            runs_twice=config.check == "full",
        ),
        partial(move_nodes, region=config.resolved_region),
        partial(check_hazards, runner=config.resolved_runner),  # after moves: it judges what will run
    )


def partitioned_passes(config: Config) -> tuple[PartitionedPass, ...]:
    """What runs after the partition, with settings bound, in order."""
    passes: tuple[PartitionedPass, ...] = (
        check_partition,
        find_duplicates,
        partial(assign_streams, config=config),  # after duplicates, which run on the streams of their originals
        plan_workspace,
        partial(cut_subgraphs, config=config),  # after the workspace: what cannot be captured is not compiled either
    )
    return (*passes, partial(add_full_graph, config=config, passes=passes))  # last: the same for one piece


def run_passes(graph: Graph, passes: tuple[Callable[[Graph], Graph], ...], observe: Observer) -> Graph:
    """Apply passes of one kind one after another; `observe(name, graph)` sees the graph after each."""
    for transform in passes:
        graph = transform(graph)
        gm_of(graph).graph.lint()
        observe(pass_name(transform), graph)
    return graph


def gm_of(graph: TracedGraph | PartitionedGraph) -> fx.GraphModule:
    """The graph module of a record."""
    return graph.gm if isinstance(graph, TracedGraph) else graph.traced.gm


def pass_name(transform: Callable[..., object]) -> str:
    """The verb_object name of a pass, its settings bound or not."""
    function = transform.func if isinstance(transform, partial) else transform
    return str(function.__name__)
