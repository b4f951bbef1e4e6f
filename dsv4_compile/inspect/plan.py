"""The plan: what became of a graph, as frozen text-only records. `str(plan)` is the report and the snapshot format.

    plan: runner mrv2 (asked for), region narrow
    sizes: s77 = hidden_states.size()[0] (tokens)
    2 pieces captured (12 ops), 1 region eager (2 ops)

    piece_0  captured, 9 ops
        ops    linear[wq_a.weight], dsv4::fused_q_kv_rmsnorm, ...
        inputs hidden_states, step.swa_slot_mapping (step state), ...
        outputs q_out [s77, 4, 32] float32
    region_0  eager, 2 ops
        sparse_indexer: dsv4::sparse_indexer      split op
        ...

Nothing in it depends on addresses, hashes or the time, so two processes print the same.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

from .plan_text import render_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOp:
    """One compute node.

    Attributes:
        node: its name in the traced graph.
        op: what it calls, with the weight it applies in brackets: "linear[wq_a.weight]".
        reason: why it is eager; None where it is captured.
        line: the user's source line.
        stream: of its piece, on which it runs; 0 is the main one.
        weight: the name of the (first) weight it applies, or None.
    """

    node: str
    op: str
    reason: str | None
    line: str
    stream: int = 0
    weight: str | None = None

    @property
    def name(self) -> str:
        """What it calls: "linear", "dsv4::forward_mqa"."""
        return self.op if self.weight is None else self.op.removesuffix(f"[{self.weight}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanValue:
    """A tensor or number that goes into a unit or out of it.

    Attributes:
        name: of the node, or of the graph input as the user reaches it.
        layout: shape and dtype, such as "[s77, 64] float32"; "number" of what is no tensor.
        origin: "activation" for what a unit made, "host scalar" for a number that the user gave; else the provenance of
            a graph input: "weight", "buffer", "cache", "step state", "user input", "constant", or "size" for a size,
            stride or offset of a tensor.
    """

    name: str
    layout: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSubgraph:
    """A subgraph of a piece as the piece compiler gets it.

    Attributes:
        name: "piece_3.0", ...
        nodes: how many compute nodes it has.
        uncompiled: why it runs as it is, or None.
        duplicate_of: the first subgraph that is the same up to its weights, or None.
    """

    name: str
    nodes: int
    uncompiled: str | None
    duplicate_of: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanUnit:
    """A piece or a region.

    Attributes:
        kind: "piece" or "region".
        name: "piece_0", "region_0", ...
        ops: its compute nodes in order.
        inputs: what it needs from outside; the text leaves out what has the origin "size" or "weight".
        outputs: what later units or the caller need of what it makes.
        duplicate_of: the first piece that is the same up to its weights, or None.
        subgraphs: of a piece that is compiled and no copy.
    """

    kind: Literal["piece", "region"]
    name: str
    ops: tuple[PlanOp, ...]
    inputs: tuple[PlanValue, ...]
    outputs: tuple[PlanValue, ...]
    duplicate_of: str | None
    subgraphs: tuple[PlanSubgraph, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSlot:
    """A value in the workspace.

    Attributes:
        name: of the value.
        offset, nbytes: where it lies in the arena and how much room it takes, for the sizes of the trace.
        first, last: the units between which it must live; "start" and "end" for the edges of the call.
    """

    name: str
    offset: int
    nbytes: int
    first: str
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWorkspace:
    """The workspace of a captured call with the sizes of the trace, in bytes.

    Attributes:
        slots: in the order in which they are made.
        planned: the arena needed.
        lower_bound: the largest sum of bytes alive at once.
        unshared: what it would be if no two values shared memory.
    """

    slots: tuple[PlanSlot, ...]
    planned: int
    lower_bound: int
    unshared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFull:
    """The whole step as one piece, which serves calls of uniform decode.

    Attributes:
        unit: the piece.
        workspace: of such a call, in the same arena.
    """

    unit: PlanUnit
    workspace: PlanWorkspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the backend makes of one graph; `str()` gives the report, `to_json()` the same for programs.

    Attributes:
        runner: "mrv1" or "mrv2".
        runner_reason: why that one.
        region: "narrow", "wide" or "minimal".
        piece_compiler: who compiles the subgraphs of pieces; None where pieces run as they are.
        tokens: the size expression of the token count, or None if there is none.
        sizes: size symbol and where it comes from.
        scalars: host scalars that are part of the bucket.
        units: pieces and regions in program order.
        inputs: the graph's tensor inputs.
        traced_sizes: the sizes that the trace had, for which the workspace is shown.
        workspace: where values that cross between captured pieces and regions live.
        notes: remarks, such as an op in `split_ops` that the graph never calls.
        full: for calls of uniform decode, if they have a graph of their own.
    """

    runner: str
    runner_reason: str
    region: str
    piece_compiler: str | None = None
    tokens: str | None
    sizes: tuple[tuple[str, str], ...]
    scalars: tuple[str, ...]
    units: tuple[PlanUnit, ...]
    inputs: tuple[PlanValue, ...]
    traced_sizes: tuple[tuple[str, int], ...]
    workspace: PlanWorkspace
    notes: tuple[str, ...]
    full: PlanFull | None = None

    @property
    def pieces(self) -> tuple[PlanUnit, ...]:
        """The captured units."""
        return tuple(unit for unit in self.units if unit.kind == "piece")

    @property
    def regions(self) -> tuple[PlanUnit, ...]:
        """The eager units."""
        return tuple(unit for unit in self.units if unit.kind == "region")

    @property
    def all_units(self) -> tuple[PlanUnit, ...]:
        """Those, and the whole step as one piece."""
        return self.units if self.full is None else (*self.units, self.full.unit)

    def __str__(self) -> str:
        return render_plan(self)

    def to_json(self) -> str:
        """The plan as JSON, keys as the attributes here."""
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, object]:
        """The plan as plain dictionaries and lists."""
        return dataclasses.asdict(self)
