"""What captures take on the host engine: a few pieces of a tiny stack are captured in the same run.

The stack has one layer of each kind that the model has. All ops of this package are split ops in it, so its pieces hold
torch's own ops alone: on the host the others are looked into and recorded op by op, with temporaries that the kernel of
a GPU does not have. No piece's numbers matter, so inputs are zeros.

The figures say how an engine scales with ops and bytes. Those of the host are not those of a GPU, where a capture
instantiates a CUDA graph; whoever shows them says where they come from.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..analysis.sizes import Sizes
from ..compat.dispatch import all_op_names
from ..config import Config
from ..graph.partitioned import PartitionedGraph, Unit
from ..graph.traced import TensorMeta, Value
from ..models.deepseek_v4 import DeepseekV4Config
from ..runtime.engines.base import CapturedGraph
from ..runtime.engines.host.engine import HostEngine
from ..runtime.engines.host.pool import HostPool
from ..runtime.pieces.pieces import PieceFunction, Pieces
from .fake_stack import read_stack
from .figures import EngineFigures
from .memory import most_temporaries, sizes_for

TOKENS = 64  # few enough for a moment, and enough that rounding to 256 bytes does not show
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class ReadyPiece:
    """A piece that can be captured: its function, and memory for what it takes and gives."""

    unit: Unit
    function: PieceFunction
    inputs: Sequence[Value]
    slots: Sequence[Tensor]

    def run(self) -> None:
        """Run it, or let an engine record it."""
        self.function.fill(self.inputs, self.slots)


def measure_host_engine(config: DeepseekV4Config) -> EngineFigures:
    """Capture the pieces of a tiny stack some times, and take the fastest round."""
    graph = tiny_graph(config)
    sizes = sizes_for(graph, TOKENS)
    pieces = ready_pieces(graph, sizes)
    engine = HostEngine()
    for piece in pieces:
        engine.warm_up(piece.run)
    rounds = [_timed_captures(engine, pieces) for _ in range(ROUNDS)]
    pool = engine.make_pool()
    kept, traced_bytes = _traced(lambda: capture_all(engine, pieces, pool))
    ops = sum(len(piece.unit.nodes) for piece in pieces)
    return EngineFigures(
        engine=engine.name,
        pieces=len(kept),
        ops=ops,
        seconds_an_op=min(rounds) / ops,
        bytes_an_op=max(traced_bytes - pool.nbytes, 0) / ops,
        pool_factor=pool.nbytes / most_temporaries(graph, sizes, leaving=False),
    )


def tiny_graph(config: DeepseekV4Config) -> PartitionedGraph:
    """The plan of a stack with a tiny layer of each kind, whose pieces hold torch's own ops alone."""
    kinds = tuple(dict.fromkeys(config.compress_ratios[: config.num_hidden_layers]))
    return read_stack(DeepseekV4Config.tiny(kinds), torch.float32, 2, package_ops_split(), lambda _, graph: graph)


def package_ops_split() -> Config:
    """Options with which every op of this package is a split op."""
    ops = sorted({name.partition(".")[0] for name in all_op_names() if name.startswith("dsv4::")})
    return Config.from_options({"runner": "mrv2", "piece_compiler": "eager", "split_ops": ops})


def ready_pieces(graph: PartitionedGraph, sizes: Sizes) -> list[ReadyPiece]:
    """The pieces of a graph with inputs of zeros."""
    functions = Pieces(graph, {}).uncompiled()
    numbers = {node: sizes.of_expr(symbol) for symbol, node in graph.traced.symbols.items()}

    def zeros(node: fx.Node) -> Value:
        meta = graph.traced.effects[node].result
        return sizes.allocate(meta).zero_() if isinstance(meta, TensorMeta) else numbers[node]

    return [
        ReadyPiece(unit, functions[unit.name], [zeros(node) for node in unit.inputs], [*map(zeros, unit.outputs)])
        for unit in graph.units
        if unit.kind == "piece"
    ]


def capture_all(engine: HostEngine, pieces: Sequence[ReadyPiece], pool: HostPool) -> list[CapturedGraph]:
    """The captured graphs of pieces, one after another."""
    return [engine.capture(piece.run, pool, name=piece.unit.name) for piece in pieces]


def _timed_captures(engine: HostEngine, pieces: Sequence[ReadyPiece]) -> float:
    started = time.perf_counter()
    capture_all(engine, pieces, engine.make_pool())
    return time.perf_counter() - started


def _traced(make: Callable[[], list[CapturedGraph]]) -> tuple[list[CapturedGraph], int]:
    """What is made, and the bytes of Python's allocators that it keeps."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = make()
        gc.collect()
        return made, tracemalloc.get_traced_memory()[0] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()
