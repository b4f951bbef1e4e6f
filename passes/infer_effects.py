"""Learn what every node reads, writes and allocates by running the graph once on fake tensors.

A dispatch mode sees each op below autograd, where composites are taken apart, so the schemas tell exactly which
storages are touched, and views show by sharing a storage. No later pass guesses aliasing from names.

    v = h[:, :2]         free: reads nothing, makes nothing
    o = empty_like(h)    free: allocates storage 3
    attn(h, o)           reads 1, writes 3
    v.add_(y)            reads 2, writes 1

Storages get numbers in order of appearance. A number that is data-dependent is taken from the trace instead of being
computed again, since running it would mint a new symbol.

Note "concrete run": fakes with symbolic sizes cost five times as much as fakes with the sizes that the trace had, and
what is touched and shared is the same. So the graph runs on concrete ones, and the symbolic shapes come from the trace,
each compared with the shape that the run gave. Where they differ (a tensor's metadata was changed in place, or a size
depends on data) the graph runs again on symbolic fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import fx

from ..analysis.eager_reasons import has_unknown_size
from ..analysis.effects import EffectsRecorder, NodeEffects, Storages, WholeOps
from ..compat.dispatch import (
    READERS_ON_CPU,
    HigherOrderOperator,
    OpOverload,
    has_composite_kernel,
    python_kernels,
    pytree,
)
from ..compat.dynamo import data_dependent_errors
from ..compat.symbols import value_of
from ..compat.thread_state import OutsideInferenceMode
from ..errors import Dsv4Error, PlanError
from ..graph.mode_scopes import autocast_scopes
from ..graph.op_properties import bind_arguments, is_number_check
from ..graph.source_lines import where
from ..graph.traced import Effects, FakeInputs, Layouts, Provenance, TensorMeta, TracedGraph, Value

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class NeedsSymbolsError(Exception):
    """The concrete run cannot tell the symbolic shape of some value."""


def infer_effects(
    traced: TracedGraph, *, concrete: Callable[[], FakeInputs], symbolic: Callable[[], FakeInputs]
) -> TracedGraph:
    """Fill in `effects` for every node and the provenance of every storage.

    Args:
        traced: the normalised graph.
        concrete: makes fakes of the inputs with the sizes of the trace.
        symbolic: makes fakes of the inputs with symbolic sizes; only asked where the concrete run does not do.

    Raises:
        AliasingOpError: an op shares storage in a way its schema does not declare.
        PlanError: a node cannot be run on fake tensors.
    """
    try:
        return run_on_fakes(traced, concrete())
    except NeedsSymbolsError:
        return run_on_fakes(traced, symbolic())


def run_on_fakes(traced: TracedGraph, fake_inputs: FakeInputs) -> TracedGraph:
    """Fill in effects and provenance from one run.

    Raises:
        NeedsSymbolsError: concrete fakes do not do.
        Dsv4Error: as `infer_effects`.
    """
    storages = Storages()
    interpreter = _EffectsInterpreter(traced, EffectsRecorder(traced.ops, storages), fake_inputs)
    provenance = {
        storages.number(value): graph_input.provenance
        for graph_input, value in zip(traced.inputs, fake_inputs.values, strict=True)
        if isinstance(value, torch.Tensor)
    }
    # Composite ops arrive whole in inference mode, where `reshape` would pass for a view although it may copy.
    with OutsideInferenceMode(), torch.no_grad(), fake_inputs.mode, _kernels_for(fake_inputs):
        interpreter.run(*fake_inputs.values, enable_io_processing=False)
    effects = interpreter.effects
    for constant in interpreter.constants:
        provenance.setdefault(constant, Provenance.CONSTANT)
    floats = {graph_input.node for graph_input in traced.inputs if graph_input.number}
    _mark(traced, effects, interpreter.recorder.step_state, provenance, floats)
    return _filled(traced, effects, provenance)


def _kernels_for(fake_inputs: FakeInputs) -> AbstractContextManager[None]:
    """Some composite ops take symbolic sizes in their Python form alone, such as matmul of 3 dims in torch 2.11."""
    return nullcontext() if fake_inputs.concrete else python_kernels()


def _mark(
    traced: TracedGraph,
    effects: dict[fx.Node, Effects],
    step_state: set[int],
    provenance: dict[int, Provenance],
    floats: set[fx.Node],
) -> None:
    written = {storage for node_effects in effects.values() for storage in node_effects.writes}
    writes_inputs = bool(written & provenance.keys())
    for storage, origin in list(provenance.items()):
        if storage in step_state:
            provenance[storage] = Provenance.STEP_STATE
        elif origin is Provenance.BUFFER and storage in written:
            provenance[storage] = Provenance.CACHE
    for node, node_effects in effects.items():
        if node_effects.only_allocates and has_unknown_size(traced, node_effects.result):
            # nobody but the node itself can make it: its size is not known at the start of a call
            effects[node] = node_effects = replace(node_effects, pinned=True)
        for storage in node_effects.makes:
            provenance[storage] = Provenance.ACTIVATION
        if node_effects.bucket_scalar and writes_inputs and node.args[0] not in floats:
            # some call may pass a scalar that shares memory with what is written, and Dynamo has no guard for that
            effects[node] = replace(node_effects, bucket_scalar=False)


def _filled(
    traced: TracedGraph, effects: Mapping[fx.Node, Effects], provenance: Mapping[int, Provenance]
) -> TracedGraph:
    inputs = tuple(
        replace(graph_input, provenance=provenance[result.storage])
        if isinstance(result := effects[graph_input.node].result, TensorMeta)
        else graph_input
        for graph_input in traced.inputs
    )
    return replace(traced, inputs=inputs, effects=effects, storages=provenance)


class _EffectsInterpreter(fx.Interpreter):
    """Runs each node on fakes under the recorder and keeps its effects."""

    def __init__(self, traced: TracedGraph, recorder: EffectsRecorder, fake_inputs: FakeInputs) -> None:
        # Values stay alive to the end, so that no storage's identity is used twice.
        super().__init__(traced.gm, garbage_collect_values=False)
        self.recorder = recorder
        self._traced = traced
        self.effects: dict[fx.Node, Effects] = {}
        self.constants: set[int] = set()
        self._first_with: dict[int, fx.Node] = {}  # values stay alive, so no identity is used twice
        self._fake_inputs = fake_inputs
        self._has_composites = any(map(has_composite_kernel, traced.ops))
        self._scalar_inputs = {
            i.node for i in traced.inputs if isinstance(i.value, torch.Tensor) and i.value.dim() == 0 and i.value.is_cpu
        }

    def run_node(self, n: fx.Node) -> Value:
        try:
            return self._run_node(n)
        except (Dsv4Error, NeedsSymbolsError):
            raise
        except Exception as error:
            if self._fake_inputs.concrete:
                # sizes of the trace that a check of the graph refuses, or an op that only takes those Dynamo gave it
                raise NeedsSymbolsError from error
            # Some fake-tensor errors would turn into a silent graph break if they left the backend.
            raise PlanError(f"cannot run {n.format_node()} on fake tensors ({where(n)}): {error}") from error

    def _run_node(self, n: fx.Node) -> Value:
        traced = n.meta.get("example_value")
        if n.op == "call_function" and is_number_check(n):
            value, effects = None, _number_check()  # not run: the sizes of the trace may be the ones it refuses
        elif n.op in ("call_function", "call_method") and _is_data_dependent(n, traced, self.env):
            value, effects = self._known(traced), self._data_dependent(n)
        elif n.op in ("placeholder", "output"):
            value, effects = super().run_node(n), Effects()
        else:
            value, effects = self._run_op(n, traced)
        if not self._fake_inputs.concrete:
            n.meta["example_value"] = traced = value  # Dynamo's own was changed in place by a later node
        result = self._describe(value, traced)
        if n.op == "get_attr" and isinstance(result, TensorMeta):
            self.constants.add(result.storage)
        first = self._first_with.setdefault(id(value), n) if isinstance(value, torch.Tensor) else n
        self.effects[n] = replace(effects, result=result, same_as=None if first is n else first)
        return value

    def _run_op(self, n: fx.Node, traced: Value) -> tuple[Value, Effects]:
        try:
            with self.recorder.node(n) as node_effects, autocast_scopes(n):
                value = super().run_node(n)
            self._note_reads_on_cpu(n, node_effects)
            self._record_whole_ops(n, node_effects)
            return value, node_effects.effects(value)
        except data_dependent_errors():
            # an op that unpacks a tensor on the way, such as indexing by a 0-dim tensor
            return self._known(traced), self._data_dependent(n)
        except (Dsv4Error, NeedsSymbolsError):
            raise
        except Exception:
            if not isinstance(n.target, HigherOrderOperator):
                raise
            # some run under Dynamo's own modes only, such as while_loop
            return self._known(traced), self._opaque(n)

    def _note_reads_on_cpu(self, n: fx.Node, node_effects: NodeEffects) -> None:
        if n.target in READERS_ON_CPU and any(self.env[arg].is_cpu for arg in _tensors_of(n, self.env)):
            name = getattr(n.target, "__name__", n.target)
            node_effects.uncapturable = node_effects.uncapturable or f"{name} needs a device-to-host sync"

    def _record_whole_ops(self, n: fx.Node, node_effects: NodeEffects) -> None:
        """A role belongs to an op as it is called, but the recorder has seen the parts of a composite one."""
        if isinstance(n.target, OpOverload):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.recorder.record_whole(node_effects, n.target, bind_arguments(n.target, args, kwargs))
        elif self._has_composites and n.op in ("call_function", "call_method"):
            with torch.inference_mode(), WholeOps(self.recorder, node_effects):
                super().run_node(n)  # once more: on fakes nothing comes of it

    def _known(self, traced: Value) -> Value:
        """The value of the trace, as a stand-in of this run."""
        if self._fake_inputs.concrete:
            hint = traced.node.hint if isinstance(traced, _SYMBOLIC) else None
            if hint is None:
                raise NeedsSymbolsError
            return hint
        return pytree.tree_map_only(torch.Tensor, _like, traced)

    def _describe(self, value: Value, traced: Value) -> Layouts:
        """`TensorMeta` of a tensor, a tuple of them for a container, None for anything else."""
        if isinstance(value, (tuple, list)):
            items = traced if isinstance(traced, (tuple, list)) else [None] * len(value)
            return tuple(self._describe(item, item_traced) for item, item_traced in zip(value, items, strict=True))
        if not isinstance(value, torch.Tensor):
            return None
        shown = traced if isinstance(traced, torch.Tensor) else value
        if shown is not value and not _agree(self._traced, value, shown):
            raise NeedsSymbolsError
        layout = tuple(shown.shape), tuple(shown.stride()), shown.storage_offset()
        storage = self.recorder.storages.number(value)
        return TensorMeta(*layout, value.dtype, value.device, storage, conj=value.is_conj(), neg=value.is_neg())

    def _opaque(self, n: fx.Node) -> Effects:
        """The effects of a higher-order op that cannot be looked into: it may do anything to what it takes."""
        tensors = pytree.tree_leaves(self.fetch_args_kwargs_from_env(n))
        storages = frozenset(self.recorder.storages.number(t) for t in tensors if isinstance(t, torch.Tensor))
        reason = f"higher-order op {n.target} decides on the host what it runs"
        return Effects(reads=storages, writes=storages, barrier=reason, uncapturable=reason)

    def _data_dependent(self, n: fx.Node) -> Effects:
        reads = frozenset(self.recorder.storages.number(self.env[arg]) for arg in _tensors_of(n, self.env))
        name = getattr(n.target, "__name__", n.target)
        if n.meta.get("unbacked_bindings") and not isinstance(n.meta["example_value"], _SYMBOLIC):
            return Effects(reads=reads, uncapturable=f"{name} returns a tensor whose size depends on data")
        is_scalar_input = n.target == "item" and n.args[0] in self._scalar_inputs
        return Effects(reads=reads, uncapturable=f"{name} needs a device-to-host sync", bucket_scalar=is_scalar_input)


def _number_check() -> Effects:
    """Nothing with an effect may pass it: what follows happens only if it holds."""
    reason = "checks a number on the host"
    return Effects(barrier=reason, uncapturable=reason)


def _tensors_of(n: fx.Node, env: Mapping[fx.Node, Value]) -> list[fx.Node]:
    return [arg for arg in n.all_input_nodes if isinstance(env[arg], torch.Tensor)]


def _like(traced: torch.Tensor) -> torch.Tensor:
    """A fake of the mode in force; the trace's own belongs to another one."""
    return torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=traced.device)


def _agree(graph: TracedGraph, value: torch.Tensor, traced: torch.Tensor) -> bool:
    """The trace's symbolic layout is, for the sizes of the trace, the layout that the run gave."""
    layout = (*traced.shape, *traced.stride(), traced.storage_offset())
    if value.dtype != traced.dtype or value.dim() != traced.dim():
        return False
    sizes = graph.traced_sizes
    return [value_of(size, sizes) for size in layout] == [*value.shape, *value.stride(), value.storage_offset()]


def _is_data_dependent(n: fx.Node, traced: Value, env: Mapping[fx.Node, Value]) -> bool:
    """A number taken from a tensor's data, or a result whose size is.

    Sizes that follow from the inputs' are no longer read off tensors here, and a plain number is one that Dynamo knew.
    """
    if isinstance(traced, _SYMBOLIC):
        return any(isinstance(env[arg], torch.Tensor) for arg in n.all_input_nodes)
    return bool(n.meta.get("unbacked_bindings"))
