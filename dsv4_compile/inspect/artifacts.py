"""Stages of one compilation for people and tools: log lines, structured-trace artifacts, a dump folder.

`TORCH_LOGS="+dsv4_compile"` prints the plan and, at debug level, every stage. The same texts go to
`torch._logging.trace_structured`, where `tlparse` finds them. With the option `dump_dir` they are also files:

    graph_0/00_dynamo.py, 01_resolve_targets.py, ...   the graph after each pass, with how many nodes it changed
    graph_0/piece_0.py, region_0.py, ...               each unit's own graph; whole_step.py that of uniform decode
    graph_0/plan.txt, plan.json
    graph_0/report.html                                all of it as a page; `report DIR` adds later captures
    graph_0/program_16.py                              the straight-line program of each captured bucket;
    graph_0/program_full_16_1.py                       the same of uniform decode, with its query_len

Each compiled graph takes the next free `graph_<n>`; making the folder is what claims the number, so several threads
or processes may share one `dump_dir`.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import fx

from ..compat.dynamo import trace_artifact
from ..config import Config
from ..errors import ExplainError, OptionError
from ..graph.partitioned import PartitionedGraph
from ..graph.traced import TracedGraph
from ..log import log
from ..passes import gm_of
from .plan import Plan


class Artifacts:
    """Shows the stages of one compilation; files are written as they come, so a failed pass leaves its traces."""

    def __init__(self, config: Config) -> None:
        self._folder = None if config.dump_dir is None else claim_folder(Path(config.dump_dir))
        self._count = itertools.count()
        self._nodes = 0
        self._programs: Counter[str] = Counter()

    def observe(self, stage: str, graph: TracedGraph | PartitionedGraph) -> None:
        """Show the graph after a stage."""
        gm = gm_of(graph)
        nodes = len(gm.graph.nodes)
        header = f"# {stage}: {nodes} nodes ({nodes - self._nodes:+d})"
        self._nodes = nodes
        self._show(f"{next(self._count):02d}_{stage}.py", lambda: f"{header}\n{_code(gm)}")

    def finish(self, graph: PartitionedGraph, plan: Plan) -> None:
        """Show the units and the plan, and say what is remarkable about it."""
        self.show_plan(graph, plan)
        for note in graph.notes:  # the plan has remarks of its own, which are no cause for worry
            log.warning("%s", note)

    def show_plan(self, graph: PartitionedGraph, plan: Plan) -> None:
        """Show the units and the plan; that of a graph that was planned again takes the place of the first one."""
        for unit in (*graph.units, *(() if graph.full is None else graph.full.units)):
            self._show(f"{unit.name}.py", partial(_code, unit.gm))
        self._show("plan.json", plan.to_json)
        self._show("plan.txt", lambda: str(plan), level=logging.INFO)
        self._write_report()

    def show_program(self, sizes: Sequence[object], source: str) -> None:
        """Show the program of a bucket that was captured."""
        label = "_".join(map(str, sizes)) or "static"
        self._programs[label] += 1
        again = "" if self._programs[label] == 1 else f"-{self._programs[label]}"  # other floats, or captured again
        self._show(f"program_{label}{again}.py", lambda: source)

    def show_full_program(self, sizes: Sequence[object], source: str) -> None:
        """Show the program of a bucket of uniform decode, the last of whose sizes is `query_len`."""
        self.show_program(("full", *sizes), source)

    def _show(self, name: str, text: Callable[[], str], level: int = logging.DEBUG) -> None:
        self._write(name, text)
        if log.isEnabledFor(level):
            log.log(level, "%s\n%s", name, text())
        trace_artifact(f"dsv4_{name}", text)

    def _write(self, name: str, text: Callable[[], str]) -> None:
        if self._folder is not None:
            try:
                (self._folder / name).write_text(text() + "\n", encoding="utf-8")
            except OSError as error:
                self._give_up(error)

    def _write_report(self) -> None:
        if self._folder is not None:
            # imported when needed: the template engine is of no use without a dump
            from .report.page import write_report

            try:
                write_report(self._folder)
            except ExplainError as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Looking on is no reason for a call to fail, least of all one that has captured, and done what it does."""
        log.warning("nothing more is dumped to %s: %s", self._folder, str(error).partition("\n")[0])
        self._folder = None


def claim_folder(parent: Path) -> Path:
    """Make the next free `graph_<n>` under a folder."""
    for number in itertools.count():
        folder = parent / f"graph_{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise OptionError(f"option dump_dir={str(parent)!r}: cannot make a folder there: {error}") from error
        return folder
    raise AssertionError("unreachable: there is always a next number")


def _code(gm: fx.GraphModule) -> str:
    return gm.print_readable(print_output=False)
