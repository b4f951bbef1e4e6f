"""The program of one bucket: capture each piece, and write one straight line of replays and eager ops.

Building a program is also a call: each piece is captured and replayed at once, each eager op runs, so that the next
unit sees real values. What a program refers to is stable: static inputs at their own addresses, staged inputs and
everything that crosses in slots of the arena. Views of stable tensors are made once, while building.

    k0_stage(args[3])                 copy a moving input into its slot
    k1_replay()                       piece_0
    k2_attn(k3_tensor, k4_tensor)     region_0
    k5_replay()                       piece_1
    v_out = k6_clone()                the caller's outputs are fresh

A program that fails half-way is dropped whole: it holds the only references to its captures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from ..compat import ENTER_AUTOCAST, EXIT_AUTOCAST, may_overlap_itself
from ..draft import Draft, InputRole, TensorMeta, Unit
from ..passes.scope_modes import autocast_of
from .check_replay import CheckedReplay
from .check_results import check_fresh, check_layout
from .engine import Captured, Engine
from .pieces import Pieces
from .sizes import Sizes
from .source import Function, SourceWriter
from .spans import span
from .workspace import Placement, aligned, copier, extent_bytes, slot_tensor


@dataclass(frozen=True, slots=True)
class Program:
    """What replays one bucket.

    Attributes:
        run: takes the arguments of the graph as one tuple and returns its outputs.
        with_spans: gives the same function with a span for each unit (see `spans`); it is made when first asked for.
        source: the text of `run`.
        captured: the recordings of its pieces, whose memory goes with the last reference to the program.
    """

    run: Function
    with_spans: Callable[[], Function]
    source: str
    captured: tuple[Captured, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What a program is built with.

    Attributes:
        draft: the partitioned and planned graph.
        roles: of the inputs; as planned, or written back for those that turned out to move.
        sizes: of the bucket.
        title: "graph 0, bucket (16,)", for errors and tracebacks.
        pieces: what runs each piece.
        engine, pool: who records, and where temporaries go.
        lanes: how many side lanes pieces may use.
        arena, placement: where slots are.
        static_outputs: return buffers of the bucket, not fresh tensors.
        full_check: compare each replay with an eager run.
    """

    draft: Draft
    roles: Mapping[fx.Node, InputRole]
    sizes: Sizes
    title: str
    pieces: Pieces
    engine: Engine
    lanes: int
    pool: Any
    arena: Tensor
    placement: Placement
    static_outputs: bool
    full_check: bool


def build_program(context: BuildContext, args: Sequence[Any]) -> tuple[Program, Any]:
    """Capture the bucket of this call, and run the call.

    Returns:
        The program, and what the graph returns for `args`.

    Raises:
        CaptureError: a piece does what a graph cannot hold.
        LayoutMismatchError: an op's result differs from what its fake promised.
        Exception: whatever an op raises.
    """
    builder = _Builder(context, args)
    with span(f"{context.title}, capture"):
        try:
            builder.bind_inputs()
            for unit in context.draft.units:
                builder.add_unit(unit)
            return builder.finish()
        finally:
            builder.write_back()  # what was written before a failure stays written, as in eager


def _copy_overlapping(target: Tensor, source: Tensor) -> None:
    copier(target)(source)


class _Builder:
    """The values of the call that builds, and the text of the calls to come."""

    def __init__(self, context: BuildContext, args: Sequence[Any]) -> None:
        self._context = context
        self._draft = context.draft
        self._pieces = context.pieces.for_call(args)
        self._args = args
        self._source = SourceWriter(context.title)
        self._values: dict[fx.Node, Any] = {}
        self._operands: dict[fx.Node, str] = {}
        self._stable: set[fx.Node] = set()
        self._captured: list[Captured] = []
        self._staged_writes: list[tuple[Tensor, Tensor]] = []
        self._slots = {
            slot.node: slot_tensor(context.arena, offset, slot.meta, context.sizes)
            for slot, offset in zip(context.draft.slots, context.placement.offsets, strict=True)
        }

    def bind_inputs(self) -> None:
        """Give every input its stable tensor, or the argument of the call; read host scalars; bind allocations."""
        for position, graph_input in enumerate(self._draft.inputs):
            self._bind_input(position, graph_input.node, self._args[position])
        for node, effects in self._draft.effects.items():
            if effects.bucket_scalar:
                self._bind(node, self._values[node.all_input_nodes[0]].item())
        for node in self._draft.allocations:
            self._bind(node, self._slots[node])

    def _bind_input(self, position: int, node: fx.Node, arg: Any) -> None:
        role = self._context.roles[node]
        if role is InputRole.NUMBER:
            self._bind(node, arg)
        elif role in (InputRole.STATIC, InputRole.BOUND):
            # an alias: the program must not keep the caller's tensor object alive
            self._bind(node, arg.detach())
        elif role is InputRole.DIRECT:
            self._values[node], self._operands[node] = arg, f"args[{position}]"
        else:
            self._stage(position, node, arg, written_back=role is InputRole.WRITTEN_BACK)

    def _stage(self, position: int, node: fx.Node, arg: Tensor, *, written_back: bool) -> None:
        buffer = self._own_buffer(node) if written_back else self._slots[node]
        self._bind(node, buffer)
        copy = copier(buffer)
        self._source.line(f"{self._source.name_of(copy, 'stage')}(args[{position}])")
        copy(arg)
        if written_back:
            self._source.last_line(self._copy_back(f"args[{position}]", buffer, self._operands[node]))
            self._staged_writes.append((arg, buffer))

    def _copy_back(self, arg: str, buffer: Tensor, operand: str) -> str:
        if not may_overlap_itself(buffer):
            return f"{arg}.copy_({operand})"
        return f"{self._source.name_of(_copy_overlapping, 'copy')}({arg}, {operand})"

    def write_back(self) -> None:
        """Give the caller's tensors what was written to their staged copies."""
        for arg, buffer in self._staged_writes:
            copier(arg)(buffer)

    def _own_buffer(self, node: fx.Node) -> Tensor:
        meta = self._meta(node)
        nbytes = aligned(extent_bytes(meta, self._context.sizes))
        memory = self._context.engine.allocate(nbytes, meta.device)
        return slot_tensor(memory, 0, meta, self._context.sizes)

    def _bind(self, node: fx.Node, value: Any) -> None:
        """A value that is the same object in every call of the bucket."""
        self._values[node] = value
        self._stable.add(node)
        is_number = not isinstance(value, Tensor)
        self._operands[node] = self._source.text_of(value, {}) if is_number else self._source.name_of(value, "tensor")

    def _meta(self, node: fx.Node) -> TensorMeta:
        meta = self._draft.effects[node].result
        assert isinstance(meta, TensorMeta), f"{node} is no tensor"
        return meta

    def add_unit(self, unit: Unit) -> None:
        """Run a piece or a region."""
        with self._source.span(unit.name), span(unit.name):
            if unit.kind == "piece":
                self._add_piece(unit)
            else:
                self._add_region(unit)

    def _add_piece(self, unit: Unit) -> None:
        """Capture a piece that writes its results into their slots, and replay it."""
        inputs = [self._values[node] for node in unit.inputs]
        slots = [self._slots[node] for node in unit.outputs]
        function = self._pieces[unit.name]
        run = partial(function.fill, inputs, slots)
        context = self._context
        name = f"{unit.name} of {context.title}"
        captured = context.engine.capture(run, context.pool, name=name, lanes=context.lanes)
        self._captured.append(captured)
        replay: Callable[[], Any] = captured.replay
        if context.full_check:
            replay = CheckedReplay(self._draft, unit, function, inputs, slots, captured.replay)
        replay()
        self._source.line(f"{self._source.name_of(replay, 'replay')}()  # {unit.name}")
        for node, slot in zip(unit.outputs, slots, strict=True):
            self._bind(node, slot)

    def _add_region(self, unit: Unit) -> None:
        """Run a region's ops one by one, and copy what later pieces take into its slot."""
        self._source.line(f"# {unit.name}")
        self._run_nodes(unit.body, kept=unit.outputs)
        for node in unit.outputs:
            slot = self._slots.get(node)
            if slot is not None:
                check_layout(self._draft, node, self._values[node], slot)
                copy = copier(slot)
                self._source.line(f"{self._source.name_of(copy, 'keep')}({self._operands[node]})")
                copy(self._values[node])
                self._forget(node)
                self._bind(node, slot)

    def _forget(self, node: fx.Node) -> None:
        """Let go of a value of this call that is not used again."""
        self._source.line(f"del {self._operands.pop(node)}")
        del self._values[node]

    def _run_nodes(self, nodes: Sequence[fx.Node], kept: Sequence[fx.Node]) -> None:
        last_user = {arg: node for node in nodes for arg in node.all_input_nodes}
        variables = set(nodes) - set(kept)
        scopes: tuple[tuple[Any, ...], ...] = ()
        entered: list[tuple[str, Any]] = []
        for node in nodes:
            wanted = autocast_of(node)
            if wanted != scopes and node.op != "get_attr":
                self._leave(entered)
                entered = [self._enter(scope, len(entered)) for scope in wanted]
                scopes = wanted
            self._run_node(node)
            for arg in node.all_input_nodes:
                if last_user[arg] is node and arg in variables and arg not in self._stable:
                    self._forget(arg)
        self._leave(entered)

    def _enter(self, scope: tuple[Any, ...], depth: int) -> tuple[str, Any]:
        name = f"autocast_{depth}"
        args = ", ".join(self._source.text_of(arg, {}) for arg in scope)
        self._source.line(f"{name} = {self._source.name_of(ENTER_AUTOCAST, 'enter')}({args})")
        return name, ENTER_AUTOCAST(*scope)

    def _leave(self, entered: list[tuple[str, Any]]) -> None:
        while entered:
            name, mode = entered.pop()
            self._source.line(f"{self._source.name_of(EXIT_AUTOCAST, 'leave')}({name})")
            EXIT_AUTOCAST(mode)

    def _run_node(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self._bind(node, _attribute(self._draft.gm, str(node.target)))
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: self._values[arg])
        value = _call(node, args, kwargs)
        check_fresh(self._draft, node, value, (args, kwargs))
        effects = self._draft.effects[node]
        if effects.is_free and not effects.only_allocates and all(arg in self._stable for arg in node.all_input_nodes):
            self._bind(node, value)
            return
        self._stable.discard(node)  # a view that an earlier unit made of a stable base
        text = self._source.call_text(node, self._operands)
        self._values[node], self._operands[node] = value, f"v_{node.name}"
        if node.users:
            self._source.line(f"v_{node.name} = {text}")
        else:
            self._source.line(text)
            del self._values[node], self._operands[node]

    def finish(self) -> tuple[Program, Any]:
        """Make the outputs; the program and the result of this call."""
        epilogue = self._draft.epilogue
        assert epilogue is not None, "the graph is partitioned by now"
        positions = {graph_input.node: position for position, graph_input in enumerate(self._draft.inputs)}
        # the caller's tensors are new in every call, so only numbers are the same object still
        self._stable = {node for node in self._stable if isinstance(self._values[node], (int, float))}
        for node in epilogue.inputs:
            if node in positions and self._context.roles[node] is not InputRole.NUMBER:
                # what the caller passed comes back as the caller's own tensor
                self._values[node], self._operands[node] = self._args[positions[node]], f"args[{positions[node]}]"
            elif node in self._slots:
                self._hand_out(node)
        self._run_nodes(epilogue.body, kept=epilogue.body)
        output = self._draft.gm.graph.output_node().args[0]
        result = fx.map_arg(output, lambda arg: self._values[arg])
        self._source.line(f"return {self._source.text_of(output, self._operands)}")
        source = self._source
        program = Program(source.function(), cache(source.function_with_spans), source.text(), tuple(self._captured))
        return program, result

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
        clone: Callable[[], Tensor] = slot.clone
        if clone().stride() != slot.stride():  # it closes gaps between strides
            clone = partial(_clone_with_gaps, slot)
        self._source.line(f"v_{node.name} = {self._source.name_of(clone, 'clone')}()")
        self._values[node], self._operands[node] = clone(), f"v_{node.name}"


def _clone_with_gaps(slot: Tensor) -> Tensor:
    clone = torch.empty_strided(slot.size(), slot.stride(), dtype=slot.dtype, device=slot.device)
    copier(clone)(slot)
    return clone


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if callable(node.target):
        return node.target(*args, **kwargs)
    return getattr(args[0], node.target)(*args[1:], **kwargs)


def _attribute(root: torch.nn.Module, path: str) -> Any:
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value
