"""Which functions of pieces have run, and on memory of which alignment.

What a function does first and never again, a capture cannot hold: Triton compiles and tunes its kernels in the first
call, and others for arguments that are not aligned to 16 bytes. So a piece may be captured once the very function that
is captured has run on such arguments. A call may have run another function (of a number that it was not compiled with)
or on other memory: its own, where the capture has a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...graph.partitioned import Unit
from ...graph.source_lines import where
from ...graph.traced import TracedGraph, Value
from ..engines.base import Engine
from .pieces import PieceFunction

ALIGNMENT_OF_KERNELS = 16


class WarmPieces:
    """What has run for calls of one bucket, whose sizes and numbers are the same.

    Attributes:
        mistrust: why the plan does not hold for these sizes, if it does not.
    """

    mistrust: str | None = None

    def __init__(self) -> None:
        self._ran: set[tuple[PieceFunction, tuple[int, ...]]] = set()

    def warm_up(
        self,
        engine: Engine,
        streams: int,
        function: PieceFunction,
        inputs: Sequence[Value],
        call: Callable[[], object],
    ) -> str | None:
        """Run a function before it is captured.

        Args:
            engine: who will capture it.
            streams: how many side streams it may use.
            function: the piece.
            inputs: what it is called with.
            call: calls it; see `Engine.warm_up`.

        Returns:
            As `Engine.warm_up`: an op whose layout a capture would get wrong.
        """
        other_op = engine.warm_up(call, streams=streams)
        self._ran.add((function, _alignment(inputs)))  # only now: one that failed half-way has run half of it
        return other_op

    def covers(self, function: PieceFunction, inputs: Sequence[Value]) -> bool:
        """Whether a function has run on such inputs."""
        return (function, _alignment(inputs)) in self._ran

    def forget(self) -> None:
        """Take nothing for warm: a capture failed, and what was missing in it is not known."""
        self._ran.clear()


def other_layout(traced: TracedGraph, unit: Unit, op: str) -> str:
    """Why a plan does not hold, if an op in a piece gives another layout than a capture would record."""
    nodes = [node for node in unit.nodes if op in traced.effects[node].ops]
    return f"{op} gives another layout than its meta kernel says ({where(nodes[0]) if nodes else unit.name})"


def _alignment(inputs: Sequence[Value]) -> tuple[int, ...]:
    return tuple([value.data_ptr() % ALIGNMENT_OF_KERNELS for value in inputs if isinstance(value, Tensor)])
