"""The callable of the capturing engines: warm-up call, capturing call, then the bucket's program.

    call 1 of a bucket    runs uncaptured, which is also its warm-up
    call 2                builds its program: each piece is captured and replayed at once. One that call 1 did not warm
                          up as it is captured (`WarmPieces`) is run instead, and captured then
    later calls           look the program up by sizes and addresses, and run it

Threads and nesting: one call at a time uses the workspace, which several graphs may share (`MemoryPool`). A call that
comes while it does, from another thread or from inside of it (an eager op that calls the compiled model), runs
uncaptured in memory of its own, and is counted so. It does not wait: an eager op may itself wait for the thread that
would.

Uniform decode: where the graph is planned as one piece too (`PartitionedGraph.full`), another object of this class
serves calls in a block of `uniform_decode` by that plan. It has warm-ups, keys and programs of its own, and shares the
memory and the turn (`GraphMemory`).

A program whose parameters or buffers die goes with them. One whose static inputs have moved is captured again, in the
place of the old one. Nothing global refers to this object but a weak set, by which `torch._dynamo.reset()` reaches it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import fx

from ..analysis.sizes import Sizes, SizesOfCalls
from ..analysis.slot_placement import Placement, place_slots, reuse_placement
from ..compat.dispatch import OpOverload, op_name
from ..compat.dynamo import is_profiling
from ..compat.functorch import has_tangents
from ..config import Config
from ..counting import counters
from ..decode import current_query_len
from ..graph.joined_call import op_of
from ..graph.mode_scopes import scopes_of
from ..graph.partitioned import InputRole, PartitionedGraph
from ..graph.source_lines import where
from ..graph.traced import Value
from ..log import log
from .engines.base import Engine, Pool
from .engines.capture_state import is_capturing, restoring
from .graph_memory import GraphMemory
from .memory.call_memory import memory_for
from .memory.overlap import OverlapCheck
from .pieces.pieces import Pieces
from .pieces.warm import WarmPieces
from .program.builder import BuildContext, build_program
from .program.cache import Bucket, CachedProgram, ProgramCache
from .program.context_addresses import ContextAddresses
from .program.keys import Key, KeyReader
from .program.limits import Limits
from .program.profiler_ranges import profiler_range
from .program.unreplayed import Unreplayed
from .restore_inputs import call_restoring, is_restoring
from .traced_call import TracedCall
from .uncaptured import UncapturedCallable

PlanAgain = Callable[[PartitionedGraph, Mapping[fx.Node, str]], tuple[PartitionedGraph, Pieces]]

_live: weakref.WeakSet[CapturedCallable] = weakref.WeakSet()
_live_lock = threading.Lock()  # one that is made meanwhile would break the loop over them
_graph_numbers = itertools.count()
# An input that is written and was found at a new address more often than this is copied in and copied out from then on.
MOVES_TOLERATED = 2
# Buckets remembered as warm; host scalars make new ones without end, and the oldest may warm up again.
WARM_BUCKETS = 1024


class CapturedCallable:
    """Takes and returns what Dynamo's graph does.

    Args:
        graph: the planned graph.
        pieces: their functions.
        traced_call: serves calls that break an assumption of the plan.
        config: the options.
        engine: who records.
        bound: the largest token count, if known.
        show_program: is told the sizes and the text of each program.
        plan_again: plans a graph anew, and makes its pieces, once captures have shown what no graph can hold.
        full: serves calls of uniform decode.
        is_full: this one does.

    Attributes:
        refused: of one that does, what a capture has shown that no graph can hold.
    """

    def __init__(
        self,
        graph: PartitionedGraph,
        pieces: Pieces,
        traced_call: TracedCall,
        config: Config,
        engine: Engine,
        *,
        bound: int | None,
        show_program: Callable[[Bucket, str], None],
        plan_again: PlanAgain,
        full: CapturedCallable | None = None,
        is_full: bool = False,
    ) -> None:
        self.refused: Mapping[fx.Node, str] = {}
        self._full = full
        self._is_full = is_full
        self._show_program = show_program
        self._plan_again = plan_again
        self._config = config
        self._engine = engine
        self._bound = bound
        self._traced_call = traced_call
        self._number: int = next(_graph_numbers) if full is None else full._number
        self._title = f"{'full ' * is_full}graph {self._number}"
        self._memory: GraphMemory = (
            GraphMemory(memory_for(config.pool, engine, graph.traced.device)) if full is None else full._memory
        )
        self._serving = self._memory.serving  # the call that uses the workspace
        self._use(graph, pieces)
        with _live_lock:
            _live.add(self)

    def _use(self, graph: PartitionedGraph, pieces: Pieces) -> None:
        """Serve calls by this plan from now on."""
        self._graph = graph
        self._pieces = pieces
        self._full = None if graph.full is None else self._full
        self._hears_decode = self._full is not None or graph.no_full is not None
        self._sizes = SizesOfCalls(graph.traced.symbols)
        self._limits = Limits(self._config, graph.token_count, self._bound, graph.slots)
        self._uncaptured = UncapturedCallable(graph, pieces, self._traced_call)
        self._context_addresses = ContextAddresses(graph, is_checked=self._config.check != "off")
        self._streams = max(graph.streams.values(), default=0)
        self._memory.use_for("full" if self._is_full else "pieces", graph.slots, self._limits)
        self._eager_ops = sum(len(unit.nodes) for unit in graph.units if unit.kind == "region")
        self._per_replay = {
            "replays": 1,
            "eager_op_calls": self._eager_ops,
            **({"full_replays": 1} if self._is_full else {}),
        }
        self._switches_modes = any(scopes_of(node) for node in graph.traced.gm.graph.nodes)
        self._start_empty()

    def _start_empty(self) -> None:
        self._cache = ProgramCache()
        self._warm: dict[Bucket, WarmPieces] = {}  # in order of age
        self._moves: dict[fx.Node, set[int]] = {}
        self._unreplayed = Unreplayed()
        self._memory.renew_own()
        self._set_roles(dict(self._graph.roles))

    @property
    def _pool(self) -> Pool:
        return self._memory.pool

    def _set_roles(self, roles: dict[fx.Node, InputRole]) -> None:
        self._roles = roles
        is_checked = self._config.check != "off"
        self._keys = KeyReader(self._graph.traced, roles, check_addresses=is_checked, is_full=self._is_full)

    def __call__(self, *args: Value) -> Value:
        """Serve a call: by its program, by building one, or uncaptured."""
        if self._hears_decode and current_query_len() is not None:
            full = self._full  # another thread may plan again meanwhile
            if full is not None:
                return self._serve_decode(full, args)
            self._limits.warn_pieces(self._graph.no_full)
        if is_restoring():
            result = call_restoring(self._serve_alone, self._graph.traced, args)
        else:
            result = self._serve_alone(args)
        if self._graph.traced.leaves_grad is not None:
            torch.set_grad_enabled(self._graph.traced.leaves_grad)
        return result

    def _serve_decode(self, full: CapturedCallable, args: tuple[Value, ...]) -> Value:
        """Serve a call of uniform decode by the plan of the whole step; give that up once a capture was refused."""
        result = full(*args)
        if full.refused:
            this = object()
            try:
                if self._serving.setdefault("call", this) is this:  # else the next call sees to it
                    self._move_to_regions(full.refused)
            finally:
                self._end(this)
        return result

    def _serve_alone(self, args: tuple[Value, ...]) -> Value:
        if not self._engine.replays_in_captures and is_capturing():
            return self._serve_uncaptured(args)  # becomes part of the graph that is recorded around it
        this = object()
        try:
            try:
                if self._serving.setdefault("call", this) is this:
                    return self._serve_in_order(this, args)
            finally:
                self._end(this)
        finally:
            self._end(this)  # once more: an interrupt may have come in between
        return self._serve_uncaptured(args)

    def _serve_in_order(self, this: object, args: tuple[Value, ...]) -> Value:
        if not self._engine.follow(this):
            return self._serve_unordered(args)
        return restoring(self._serve, args) if self._switches_modes else self._serve(args)

    def _end(self, call: object) -> None:
        try:
            self._engine.leave(call)
        finally:
            if self._serving.get("call") is call:
                del self._serving["call"]

    def _serve(self, args: tuple[Value, ...]) -> Value:
        key = self._keys.read(args)
        entry = self._cache.get(key)
        if entry is None or has_tangents():
            return restoring(self._serve_new, key, args)
        if entry.overlap.check(args):
            return self._serve_uncaptured(args)
        if entry.context:
            self._context_addresses.check(args, entry.context)
        if self._unreplayed.streak:
            self._unreplayed.note_replay(entry.bucket)
        counters.add(**self._per_replay)
        if is_profiling():
            return entry.program.with_ranges()(args)
        return entry.program.run(args)

    def _serve_unordered(self, args: tuple[Value, ...]) -> Value:
        self._limits.warn_unordered()
        return self._serve_uncaptured(args)

    def _serve_uncaptured(self, args: tuple[Value, ...]) -> Value:
        with profiler_range(f"{self._title}, uncaptured"):
            return self._uncaptured.run(args)

    def _serve_new(self, key: Key, args: tuple[Value, ...]) -> Value:
        bucket, _ = key
        sizes = self._sizes.of({i.node: arg for i, arg in zip(self._graph.traced.inputs, args, strict=True)})
        if self._graph.uncaptured is not None or self._limits.excludes(sizes):
            return self._serve_uncaptured(args)
        if self._unreplayed.excludes(bucket) and not is_restoring():  # what is captured ahead is asked for
            return self._serve_uncaptured(args)
        if (reason := self._traced_call.why_needed(args)) is not None:
            return self._traced_call.run(args, reason)
        warm = self._warm.get(bucket)
        if warm is not None and warm.mistrust is not None:
            return self._traced_call.run(args, warm.mistrust)
        this = object()
        try:
            try:
                if not self._engine.follow(this, alone=True):
                    return self._serve_unordered(args)
                return self._warm_up(bucket, args, sizes) if warm is None else self._build(key, args, sizes, warm)
            finally:
                self._engine.leave(this)
        finally:
            self._engine.leave(this)  # once more: see `_serve_alone`

    def _warm_up(self, bucket: Bucket, args: tuple[Value, ...], sizes: Sizes) -> Value:
        warm = WarmPieces()
        run_piece = partial(warm.warm_up, self._engine, self._limits.streams(self._streams, sizes))
        with profiler_range(f"{self._title}, warm-up"):
            result, warm.mistrust = self._uncaptured.warm_up(args, run_piece)
        self._note_warm(bucket, warm)  # only now: a call that failed half-way has warmed up half of it
        return result

    def _build(self, key: Key, args: tuple[Value, ...], sizes: Sizes, warm: WarmPieces) -> Value:
        bucket, _ = key
        key = self._settle_moving_inputs(key, args)
        parameter_addresses = self._keys.parameter_addresses(args)
        self._cache.drop_moved(self._keys.owned_tensors(args))
        if self._cache.drop_oldest(bucket, parameter_addresses):
            self._limits.warn_moving()
        captured = self._cache.buckets(parameter_addresses)
        if bucket not in captured and len(captured) >= self._config.max_captures:
            self._limits.warn_full(self._config.max_captures)
            return self._serve_uncaptured(args)
        overlap = OverlapCheck(self._graph.traced, args)
        if overlap.check(args):
            return self._serve_uncaptured(args)
        context = self._context_addresses.read(args)
        built = build_program(self._context(sizes, bucket, warm, *self._fit(sizes)), args)
        if built.refused or warm.mistrust is not None:
            counters.add(uncaptured_calls=1, eager_op_calls=self._eager_ops)
            if built.refused and self._is_full:
                self.refused = built.refused
            elif built.refused:
                self._move_to_regions(built.refused)
            return built.result
        is_again = self._cache.add(
            key,
            CachedProgram(built.program, overlap, bucket, parameter_addresses, context),
            self._keys.owned_tensors(args),
        )
        counters.add(captures=1, recaptures=int(is_again), **self._per_replay)
        if bucket not in captured and not is_again and not is_restoring():
            names = partial(self._keys.bucket_names, self._graph.traced)
            self._unreplayed.note_capture(bucket, self._limits.listed(sizes), self._cache.buckets(), names)
        self._show_program(sizes_of_bucket(bucket), built.program.source)
        return built.result

    def _move_to_regions(self, refused: Mapping[fx.Node, str]) -> None:
        """Plan again, with these nodes eager; what was captured before goes."""
        graph, pieces = self._plan_again(self._graph, refused)
        said = {op_text(node): f"{reason} ({where(node)})" for node, reason in refused.items()}
        for op, reason in said.items():
            log.warning("%s runs eagerly from now on, since no graph can hold it: %s", op, reason)
        if graph.uncaptured is not None:
            log.warning("calls run uncaptured: %s", graph.uncaptured)
        counters.add(replans=1)
        self._cache.clear()
        self._use(graph, pieces)

    def _note_warm(self, bucket: Bucket, warm: WarmPieces) -> None:
        self._unreplayed.note_warm_up(bucket)
        self._warm[bucket] = warm
        if len(self._warm) > WARM_BUCKETS:
            del self._warm[next(iter(self._warm))]

    def _settle_moving_inputs(self, key: Key, args: tuple[Value, ...]) -> Key:
        """Stop binding written inputs that keep changing their addresses, and drop the programs that bound them."""
        roles = dict(self._roles)
        for graph_input, arg in zip(self._graph.traced.inputs, args, strict=True):
            if roles[graph_input.node] is InputRole.BOUND:
                seen = self._moves.setdefault(graph_input.node, set())
                seen.add(arg.data_ptr())
                if len(seen) > MOVES_TOLERATED + 1:
                    roles[graph_input.node] = InputRole.COPIED_OUT
        if roles == self._roles:
            return key
        self._cache.clear()
        self._set_roles(roles)
        return self._keys.read(args)

    def _fit(self, sizes: Sizes) -> tuple[torch.Tensor, Placement]:
        """An arena and where the slots of the bucket lie in it."""
        slots, largest = self._graph.slots, self._limits.largest(sizes)
        placement = place_slots(slots, sizes)
        arenas = self._memory.arenas
        if largest is None:
            return arenas.fit(placement.planned), placement
        at_largest = place_slots(slots, largest)
        arena = arenas.locked_at(self._memory.bytes_at_largest(sizes))
        if placement.planned > arena.numel():
            # greedy placement may need more for less; no slot is larger here, so the largest bucket's offsets hold
            placement = reuse_placement(slots, sizes, at_largest)
        return arena, placement

    def _context(
        self, sizes: Sizes, bucket: Bucket, warm: WarmPieces, arena: torch.Tensor, placement: Placement
    ) -> BuildContext:
        return BuildContext(
            graph=self._graph,
            roles=self._roles,
            sizes=sizes,
            title=f"{self._title}, bucket {sizes_of_bucket(bucket)}",
            pieces=self._pieces,
            engine=self._engine,
            streams=self._limits.streams(self._streams, sizes),
            warm=warm,
            pool=self._engine.make_pool() if self._config.pool == "bucket" else self._pool,
            arena=arena,
            placement=placement,
            static_outputs=self._config.static_outputs,
            full_check=self._config.check == "full",
        )

    def release(self) -> None:
        """Let go of every program, the pool and the arenas; the next call starts from a warm-up.

        A call that is running keeps what it uses until it ends.
        """
        self._cache.clear()
        self._memory.renew()
        self._start_empty()


def op_text(node: fx.Node) -> str:
    """What a node calls, as a person would say it."""
    op = op_of(node.target)
    return op_name(op) if isinstance(op, OpOverload) else node.name


def sizes_of_bucket(bucket: Bucket) -> Bucket:
    """The sizes and ints of a bucket; its floats, which may be many, only tell calls apart."""
    return tuple(number for number in bucket if isinstance(number, int))


def release_all() -> None:
    """Free what every live callable holds."""
    with _live_lock:
        owners = list(_live)
    for owner in owners:
        owner.release()
