"""The program of one bucket: capture each piece, and write one straight line of replays and eager ops.

Building a program is also a call: each piece is captured and replayed at once, or run and then captured where that is
its warm-up; each eager op runs. So the next unit sees real values. What a program refers to is stable: static inputs at
their own addresses, copied in inputs and everything that crosses in slots of the arena. Views of stable tensors are
made once, while building.

    k0_copy_in(args[3])               copy a non-static input into its slot
    k1_replay()                       piece_0
    k2_attn(k3_tensor, k4_tensor)     region_0
    k5_replay()                       piece_1
    v_out = k6_clone()                the caller's outputs are fresh

A program that fails half-way is dropped whole: it holds the only references to its captures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, fx

from ...analysis.eager_reasons import inputs_shown_around, may_become_eager
from ...analysis.full_graph import promise_of
from ...analysis.sizes import Sizes, bytes_needed
from ...analysis.slot_placement import Placement, aligned, extent_bytes
from ...compat.dispatch import OpOverload, may_overlap_itself, op_name, with_lazy_bits_of
from ...errors import CaptureError
from ...graph.mode_scopes import ModeScope, inference_scope
from ...graph.partitioned import InputRole, PartitionedGraph, Unit
from ...graph.source_lines import where
from ...graph.traced import TensorMeta, Value
from ..engines.base import CapturedGraph, Engine, Pool
from ..memory.arena import copier, slot_tensor
from ..pieces.interpreter import UnitInterpreter
from ..pieces.pieces import Pieces
from ..pieces.replay_check import CheckedReplay
from ..pieces.result_checks import check_fresh, check_layout
from ..pieces.warm import WarmPieces, other_layout
from .codegen import Function, SourceWriter
from .profiler_ranges import profiler_range


@dataclass(frozen=True, slots=True)
class Program:
    """What replays one bucket.

    Attributes:
        run: takes the arguments of the graph as one tuple and returns its outputs.
        with_ranges: gives the same function with a profiler range for each unit; it is made when first asked for.
        source: the text of `run`.
        captured: the captured graphs of its pieces, whose memory goes with the last reference to the program.
    """

    run: Function
    with_ranges: Callable[[], Function]
    source: str
    captured: tuple[CapturedGraph, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What a program is built with.

    Attributes:
        graph: the partitioned and planned graph.
        roles: of the inputs; as planned, or copied out for those that turned out to move.
        sizes: of the bucket.
        title: "graph 0, bucket (16,)", for errors and tracebacks.
        pieces: what runs each piece.
        engine, pool: who records, and where temporaries go.
        streams: how many side streams pieces may use.
        warm: which functions of pieces have run for this bucket.
        arena, placement: where slots are.
        static_outputs: return buffers of the bucket, not fresh tensors.
        full_check: compare each replay with an eager run.
    """

    graph: PartitionedGraph
    roles: Mapping[fx.Node, InputRole]
    sizes: Sizes
    title: str
    pieces: Pieces
    engine: Engine
    streams: int
    warm: WarmPieces
    pool: Pool
    arena: Tensor
    placement: Placement
    static_outputs: bool
    full_check: bool


@dataclass(frozen=True, slots=True)
class Built:
    """What a call that captures comes to.

    Attributes:
        program: what replays its bucket.
        result: what the graph returns.
        refused: what nodes did that no graph can hold, if they may run eagerly instead. Their pieces ran uncaptured,
            and the program is of no use. It is of none either if a piece that was not warm has shown that the plan
            does not hold (`WarmPieces.mistrust`).
    """

    program: Program
    result: Value
    refused: Mapping[fx.Node, str]


def build_program(context: BuildContext, args: Sequence[Value]) -> Built:
    """Capture the bucket of this call, and run the call.

    Raises:
        CaptureError: a piece does what a graph cannot hold, and has to be captured, or it is not known where.
        LayoutMismatchError: an op's result differs from what its fake promised.
        Exception: whatever an op raises.
    """
    builder = _Builder(context, args)
    with profiler_range(f"{context.title}, capture"):
        try:
            builder.bind_inputs()
            for unit in context.graph.units:
                builder.add_unit(unit)
            return builder.finish()
        finally:
            builder.copy_out()  # what was written before a failure stays written, as in eager


def _broken_promise(node: fx.Node, promise: str, error: CaptureError) -> CaptureError:
    """A split op that is registered as capturable does what no graph can hold."""
    op = op_name(node.target) if isinstance(node.target, OpOverload) else node.name
    broken = CaptureError(
        f"split op {op} is registered with capturable={promise!r}, but no graph can hold what it does: "
        f"{error.reason} ({error.line}), called at {where(node)}. Compute that on the device in batches of uniform "
        "decode (`dsv4_compile.uniform_query_len()` tells an op), or register the op with capturable='never'."
    )
    broken.reason, broken.line, broken.node = error.reason, error.line, node
    return broken


def _copy_overlapping(target: Tensor, source: Tensor) -> None:
    copier(target)(source)


class _Builder(UnitInterpreter):
    """The values of the call that builds, and the text of the calls to come."""

    def __init__(self, context: BuildContext, args: Sequence[Value]) -> None:
        super().__init__(context.graph.traced.gm)
        self._context = context
        self._graph = context.graph
        self._pieces = context.pieces.for_call(args)
        self._args = args
        self._source = SourceWriter(context.title)
        self._operands: dict[fx.Node, str] = {}
        self._stable: set[fx.Node] = set()
        self._captured: list[CapturedGraph] = []
        self._refused: dict[fx.Node, str] = {}
        self._copied_out: list[tuple[Tensor, Tensor]] = []
        self._slots = {
            slot.node: slot_tensor(context.arena, offset, slot.meta, context.sizes)
            for slot, offset in zip(context.graph.slots, context.placement.offsets, strict=True)
        }

    def bind_inputs(self) -> None:
        """Give every input its stable tensor, or the argument of the call; read host scalars; bind allocations."""
        for position, graph_input in enumerate(self._graph.traced.inputs):
            self._bind_input(position, graph_input.node, self._args[position])
        for node, effects in self._graph.traced.effects.items():
            if effects.bucket_scalar:
                self._bind(node, self.values[node.all_input_nodes[0]].item())
        for node in self._graph.allocations:
            self._bind(node, self._slots[node])

    def _bind_input(self, position: int, node: fx.Node, arg: Value) -> None:
        role = self._context.roles[node]
        if role is InputRole.NUMBER:
            self._bind(node, arg)
        elif role in (InputRole.STATIC, InputRole.BOUND):
            # an alias: the program must not keep the caller's tensor object alive
            self._bind(node, arg.detach())
        elif role is InputRole.DIRECT:
            self.values[node], self._operands[node] = arg, f"args[{position}]"
        else:
            self._copy_in(position, node, arg, copied_out=role is InputRole.COPIED_OUT)

    def _copy_in(self, position: int, node: fx.Node, arg: Tensor, *, copied_out: bool) -> None:
        buffer = self._own_buffer(node) if copied_out else self._slots[node]
        self._bind(node, buffer)
        copy = copier(buffer)
        self._source.line(f"{self._source.name_of(copy, 'copy_in')}(args[{position}])")
        copy(arg)
        if copied_out:
            self._source.last_line(self._copy_back(f"args[{position}]", buffer, self._operands[node]))
            self._copied_out.append((arg, buffer))

    def _copy_back(self, arg: str, buffer: Tensor, operand: str) -> str:
        if not may_overlap_itself(buffer):
            return f"{arg}.copy_({operand})"
        return f"{self._source.name_of(_copy_overlapping, 'copy')}({arg}, {operand})"

    def copy_out(self) -> None:
        """Give the caller's tensors what was written to their copied in copies."""
        for arg, buffer in self._copied_out:
            copier(arg)(buffer)

    def _own_buffer(self, node: fx.Node) -> Tensor:
        meta = self._meta(node)
        nbytes = aligned(extent_bytes(meta, self._context.sizes))
        memory = self._context.engine.allocate(nbytes, meta.device)
        return slot_tensor(memory, 0, meta, self._context.sizes)

    def _bind(self, node: fx.Node, value: Value) -> None:
        """A value that is the same object in every call of the bucket."""
        self.values[node] = value
        self._stable.add(node)
        is_number = not isinstance(value, Tensor)
        self._operands[node] = self._source.text_of(value, {}) if is_number else self._source.name_of(value, "tensor")

    def _meta(self, node: fx.Node) -> TensorMeta:
        meta = self._graph.traced.effects[node].result
        assert isinstance(meta, TensorMeta), f"{node} is no tensor"
        return meta

    def add_unit(self, unit: Unit) -> None:
        """Run a piece or a region."""
        with self._source.unit(unit.name), profiler_range(unit.name):
            if unit.kind == "piece":
                self._add_piece(unit)
            else:
                self._add_region(unit)

    def _add_piece(self, unit: Unit) -> None:
        """Capture a piece that writes its results into their slots, and replay it.

        One that is not warm runs for real before, which is also what this call needs of it.
        """
        inputs = [self.values[node] for node in unit.inputs]
        slots = [self._slots[node] for node in unit.outputs]
        function = self._pieces[unit.name]
        run = partial(function.fill, inputs, slots)
        context = self._context
        has_run = not context.warm.covers(function, inputs)
        if has_run:
            other_op = context.warm.warm_up(context.engine, context.streams, function, inputs, run)
            if other_op is not None:
                context.warm.mistrust = other_layout(self._graph.traced, unit, other_op)
        captured = self._capture(unit, run, has_run=has_run) if context.warm.mistrust is None else None
        if captured is not None:
            self._captured.append(captured)
            replay: Callable[[], object] = captured.replay
            if context.full_check:
                replay = CheckedReplay(self._graph.traced, unit, function, inputs, slots, captured.replay)
            if not has_run:
                replay()
            self._source.line(f"{self._source.name_of(replay, 'replay')}()  # {unit.name}")
        elif not has_run:  # none of its kernels has
            context.engine.warm_up(run, streams=context.streams)
        for node, slot in zip(unit.outputs, slots, strict=True):
            self._bind(node, slot)

    def _capture(self, unit: Unit, run: Callable[[], object], *, has_run: bool) -> CapturedGraph | None:
        """The graph of a piece; None if it was refused, and the call can go on."""
        context = self._context
        try:
            try:
                name = f"{unit.name} of {context.title}"
                return context.engine.capture(run, context.pool, name=name, streams=context.streams)
            except CaptureError as error:
                self._note_refusal(error, has_run=has_run)
                return None
        except BaseException:
            context.warm.forget()
            raise

    def _note_refusal(self, error: CaptureError, *, has_run: bool) -> None:
        """Remember which node a capture refused, or raise the error again, if the call cannot go on.

        A broken promise is an error while nothing of the piece has run; what it did cannot be taken back.
        """
        node = error.node
        if error.reason is None or not isinstance(node, fx.Node) or node not in self._graph.traced.effects:
            raise error
        promise = promise_of(self._graph.traced, node)
        if promise != "never" and not has_run:
            raise _broken_promise(node, promise, error) from error
        if node in self._graph.traced.eager or not (promise != "never" or may_become_eager(self._graph.traced, node)):
            raise error
        self._refused[node] = f"{error.reason}, as its capture showed"

    def _add_region(self, unit: Unit) -> None:
        """Run a region's ops one by one, and copy what later pieces take into its slot."""
        self._source.line(f"# {unit.name}")
        with self._callers_own(unit):
            self.run_nodes(unit.body, kept=unit.outputs)
        for node in unit.outputs:
            slot = self._slots.get(node)
            if slot is not None:
                check_layout(self._graph.traced, node, self.values[node], slot)
                copy = copier(slot)
                self._source.line(f"{self._source.name_of(copy, 'keep')}({self._operands[node]})")
                copy(self.values[node])
                self.forget(node)
                self._bind(node, slot)

    @contextmanager
    def _callers_own(self, unit: Unit) -> Iterator[None]:
        """Let a region see the caller's own tensor of an input whose storage it views, and not the copied in copy."""
        positions = {i.node: position for position, i in enumerate(self._graph.traced.inputs)}
        copied = {node for node in unit.inputs if self._context.roles.get(node) is InputRole.COPIED_IN}
        own = copied & inputs_shown_around(self._graph.traced)
        before = {node: (self.values[node], self._operands[node]) for node in own}
        self._stable -= own
        for node in own:
            self.values[node], self._operands[node] = self._args[positions[node]], f"args[{positions[node]}]"
        yield
        self._stable |= own
        for node, (value, operand) in before.items():
            self.values[node], self._operands[node] = value, operand

    def forget(self, node: fx.Node) -> None:
        """See `UnitInterpreter`; what is the same object in every call stays."""
        if node not in self._stable:
            self._source.line(f"del {self._operands.pop(node)}")
            super().forget(node)

    def enter(self, scope: ModeScope) -> None:
        """See `UnitInterpreter`."""
        super().enter(scope)
        args = ", ".join(self._source.text_of(arg, {}) for arg in scope.args)
        call = f"{self._source.name_of(scope.enter, 'enter')}({args})"
        self._source.line(call if scope.leave_args is not None else f"mode_{len(self._entered)} = {call}")

    def leave(self) -> None:
        """See `UnitInterpreter`."""
        depth, (scope, _) = len(self._entered), self._entered[-1]
        args = scope.leave_args
        given = f"mode_{depth}" if args is None else ", ".join(self._source.text_of(arg, {}) for arg in args)
        self._source.line(f"{self._source.name_of(scope.leave, 'leave')}({given})")
        super().leave()

    def run_node(self, node: fx.Node) -> None:
        """See `UnitInterpreter`; the statement of later calls is written, unless the value is the same in each."""
        super().run_node(node)
        effects = self._graph.traced.effects[node]
        is_view = effects.is_view and not effects.only_allocates
        if node.op == "get_attr" or (is_view and all(arg in self._stable for arg in node.all_input_nodes)):
            self._bind(node, self.values[node])
            return
        self._stable.discard(node)  # a view that an earlier unit made of a stable base
        text = self._source.call_text(node, self._operands)
        self._operands[node] = f"v_{node.name}"
        if node.users:
            self._source.line(f"v_{node.name} = {text}")
        else:
            self._source.line(text)
            del self.values[node], self._operands[node]

    def look_at(self, node: fx.Node, value: Value, args: Sequence[Value], kwargs: Mapping[str, Value]) -> None:
        """See `UnitInterpreter`."""
        check_fresh(self._graph.traced, node, value, (args, kwargs))

    def finish(self) -> Built:
        """Make the outputs; the program and the result of this call."""
        self._source.end_guard()  # an input that is written may be a static output, which this call hands out anew
        output_assembly = self._graph.output_assembly
        positions = {graph_input.node: position for position, graph_input in enumerate(self._graph.traced.inputs)}
        # the caller's tensors are new in every call, so only numbers are the same object still
        self._stable = {node for node in self._stable if isinstance(self.values[node], (int, float))}
        for node in output_assembly.inputs:
            if node in positions and self._context.roles[node] is not InputRole.NUMBER:
                # what the caller passed comes back as the caller's own tensor
                self.values[node], self._operands[node] = self._args[positions[node]], f"args[{positions[node]}]"
            elif node in self._slots:
                self._hand_out(node)
        self.run_nodes(output_assembly.body, kept=output_assembly.body)
        output = self._graph.traced.gm.graph.output_node().args[0]
        result = fx.map_arg(output, lambda arg: self.values[arg])
        self._source.line(f"return {self._source.text_of(output, self._operands)}")
        source = self._source
        program = Program(source.function(), cache(source.function_with_ranges), source.text(), tuple(self._captured))
        return Built(program, result, self._refused)

    def _hand_out(self, node: fx.Node) -> None:
        """An output that lives in the arena: a clone, or with static outputs a copy in a buffer of the bucket."""
        slot = self._slots[node]
        if self._context.static_outputs:
            buffer = self._own_buffer(node)
            copy = copier(buffer)
            self._source.line(f"{self._source.name_of(copy, 'hand_out')}({self._source.name_of(slot, 'tensor')})")
            copy(slot)
            self._bind(node, buffer)
            return
        offset = self._context.sizes.of(self._meta(node).offset)
        clone: Callable[[], Tensor] = slot.clone
        # a clone closes gaps between strides, and does what is to be done lazily
        if offset or slot.is_conj() or slot.is_neg() or clone().stride() != slot.stride():
            clone = partial(_clone_alike, slot, offset)
        scopes = inference_scope(self._graph.traced.producer(node))  # an inference tensor where eager gives one
        for scope in scopes:
            self.enter(scope)
        self._source.line(f"v_{node.name} = {self._source.name_of(clone, 'clone')}()")
        self.values[node], self._operands[node] = clone(), f"v_{node.name}"
        for _ in scopes:
            self.leave()


def _clone_alike(slot: Tensor, offset: int) -> Tensor:
    """A clone with the slot's strides and lazy bits, which begins at an offset of its storage."""
    extent = bytes_needed(slot.size(), slot.stride(), 1)
    memory = torch.empty(offset + extent, dtype=slot.dtype, device=slot.device)
    clone = with_lazy_bits_of(slot, memory.as_strided(slot.size(), slot.stride(), offset))
    copier(clone)(slot)
    return clone
