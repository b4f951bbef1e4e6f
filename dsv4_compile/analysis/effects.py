"""A dispatch mode that records which storages each op reads, writes and makes, from op schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import fx

from ..compat.dispatch import Op, OpArgs, OpKwargs, OpOverload, TorchDispatchMode, Tree, op_name, pytree
from ..compat.distributed import backend_of
from ..compat.subclasses import is_opaque
from ..errors import AliasingOpError
from ..graph.fused_call import FusedCall
from ..graph.op_properties import (
    ALLOCATIONS,
    OWN_NAMESPACES,
    UNDECLARED_VIEWS,
    aten_name,
    bind_arguments,
    checks_data,
    cudagraph_unsafe_reason,
    group_of,
    is_allocation,
    is_collective,
    is_wait,
    undeclared_writes,
)
from ..graph.source_lines import where
from ..graph.traced import Access, Effects
from ..ops.registry import RegisteredOp, find_op

# Ops that look at the shape of their tensor arguments and not at the data.
_SHAPE_ONLY = (
    ALLOCATIONS
    | frozenset(f"{kind}_like" for kind in ("zeros", "ones", "full", "rand", "randn", "randint"))
    | frozenset(["new_zeros", "new_ones", "new_full", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset"])
)
# Whose collectives a CUDA graph holds, if the backend is NCCL.
_CAPTURABLE_COLLECTIVES = frozenset(["_c10d_functional", "_dtensor"])


class Storages:
    """Numbers storages in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._alive.append(storage)  # an address must not be used again while it is a key
        return self._numbers[key]


@dataclass
class NodeEffects:
    """What one node has dispatched so far."""

    node: fx.Node
    storages: Storages
    accesses: list[Access] = field(default_factory=list)
    makes: set[int] = field(default_factory=set)
    ops: list[str] = field(default_factory=list)
    random: bool = False
    barrier: str | None = None
    uncapturable: str | None = None
    unknown_reach: list[str] = field(default_factory=list)
    makers: set[Op] = field(default_factory=set)
    pinned: bool = False

    def effects(self, value: object) -> Effects:
        """The node's effects, given its value."""
        uncapturable, barrier = self.uncapturable, self.barrier
        if value is None and not self.ops and self.node.op == "call_function":
            uncapturable = uncapturable or HOST_EFFECT
            barrier = barrier or uncapturable
        return Effects(
            accesses=tuple(self.accesses),
            reads=frozenset(access.storage for access in self.accesses if not access.write),
            writes=frozenset(access.storage for access in self.accesses if access.write),
            makes=frozenset(self.makes),
            ops=tuple(self.ops),
            only_allocates=bool(self.makers) and all(map(is_allocation, self.makers)),
            random=self.random,
            pinned=self.pinned,
            barrier=barrier,
            uncapturable=uncapturable,
            unknown_reach=tuple(self.unknown_reach),
        )


class EffectsRecorder(TorchDispatchMode):
    """Records every op between `with recorder.node(n)` and its end."""

    supports_higher_order_operators = True

    def __init__(self, ops: Mapping[str, RegisteredOp], storages: Storages) -> None:
        super().__init__()
        self.storages = storages
        self.step_state: set[int] = set()
        self._ops = ops
        self._collectives: dict[int, str | None] = {}  # by storage: why no graph holds what was started there
        self._node_effects: NodeEffects | None = None

    @contextmanager
    def node(self, node: fx.Node) -> Iterator[NodeEffects]:
        """Record the ops of one node."""
        self._node_effects = NodeEffects(node, self.storages)
        if _is_foreign_function(node):
            reason = f"{_target_name(node)} is a Python function that torch does not know"
            self._node_effects.barrier = self._node_effects.uncapturable = reason
        with self:
            yield self._node_effects
        self._node_effects = None

    def __torch_dispatch__(self, func: Op, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None) -> Tree:
        kwargs = kwargs or {}
        before = {self.storages.number(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = args[0] if is_wait(func) else func(*args, **kwargs)  # its fake makes a new tensor
        node_effects = self._node_effects
        assert node_effects is not None, "the mode is only entered by node()"
        if isinstance(func, OpOverload):
            self._record_op(node_effects, func, args, kwargs, result)
        else:
            self._record_opaque(node_effects, func, before)
        made = {self.storages.number(t) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)} - before
        if made:
            node_effects.makes |= made
            node_effects.makers.add(func)
        return result

    def _record_op(
        self, node_effects: NodeEffects, func: OpOverload, args: OpArgs, kwargs: OpKwargs, result: Tree
    ) -> None:
        name = op_name(func)
        bound = bind_arguments(func, args, kwargs)
        registered = self.record_role(node_effects, func, bound)
        undeclared = undeclared_writes(func, bound)
        for argument, declared in _data_arguments(func):
            write = declared or argument in undeclared
            is_step_state = registered is not None and argument in registered.step_state
            for tensor in _tensors(bound.get(argument)):
                access = Access(name, argument, self.storages.number(tensor), write, is_step_state)
                node_effects.accesses.append(access)
        if torch.Tag.nondeterministic_seeded in func.tags:
            node_effects.random = True
        if checks_data(name):
            self._record_data_check(node_effects, name, bound)
        if is_collective(func):
            self._record_collective(node_effects, func, bound, result)
        if reason := cudagraph_unsafe_reason(func, bound):
            node_effects.uncapturable = node_effects.uncapturable or f"{name} {reason}"
        node_effects.barrier = node_effects.barrier or _why_barrier(func, name, registered)
        if func.namespace not in OWN_NAMESPACES:
            self._check_aliasing(node_effects.node, func, bound, result)
            if registered is None and not is_collective(func):
                node_effects.unknown_reach += [f"{name} ({argument})" for argument in _objects(bound)]
            if _host_effect(func) and not (registered and registered.role == "capture"):
                node_effects.uncapturable = node_effects.uncapturable or HOST_EFFECT

    def _record_data_check(self, node_effects: NodeEffects, name: str, bound: Mapping[str, Tree]) -> None:
        """What follows a check in the program happens only if it holds, so nothing passes it."""
        node_effects.barrier = node_effects.barrier or f"{name} checks data"
        if any(not tensor.is_cpu for tensor in _tensors(bound)):
            # a kernel that fails inside of a graph leaves the process without its device
            node_effects.uncapturable = node_effects.uncapturable or f"{name} checks data, which is safer outside"

    def _record_collective(
        self, node_effects: NodeEffects, func: OpOverload, bound: Mapping[str, Tree], result: Tree
    ) -> None:
        """The other processes do the same at the same time, so it keeps its place in the program.

        What is started in a graph is waited for in it, and what is started outside is waited for outside.
        """
        node_effects.barrier = node_effects.barrier or f"{op_name(func)} is a collective"
        started = {self.storages.number(tensor) for tensor in (*_tensors(bound), *_tensors(result))}
        if is_wait(func):
            reason = self._collectives.get(next(iter(started), -1), _why_no_graph_holds(func, bound))
        else:
            reason = _why_no_graph_holds(func, bound)
            self._collectives.update(dict.fromkeys(started, reason))
        node_effects.uncapturable = node_effects.uncapturable or reason

    def record_role(
        self, node_effects: NodeEffects, func: OpOverload, bound: Mapping[str, Tree]
    ) -> RegisteredOp | None:
        """Note a call of an op and what it is registered as."""
        name = op_name(func)
        registered = find_op(self._ops, name)
        if name not in node_effects.ops:
            node_effects.ops.append(name)
        if registered is not None:
            tensors = [tensor for argument in registered.step_state for tensor in _tensors(bound.get(argument))]
            self.step_state |= {self.storages.number(tensor) for tensor in tensors}
            node_effects.pinned |= registered.role == "split" or registered.reads_context or bool(tensors)
            node_effects.barrier = node_effects.barrier or _why_barrier(func, name, registered)
        return registered

    def is_registered(self, func: OpOverload) -> bool:
        """Whether an op has a role."""
        return find_op(self._ops, op_name(func)) is not None

    def record_whole(self, node_effects: NodeEffects, func: OpOverload, bound: Mapping[str, Tree]) -> None:
        """Note the call of an op that the mode may not have seen: torch takes composite ops apart before."""
        registered = self.record_role(node_effects, func, bound)
        name = op_name(func)
        if registered is not None and all(access.op != name for access in node_effects.accesses):
            for argument in registered.step_state:
                numbers = [self.storages.number(tensor) for tensor in _tensors(bound.get(argument))]
                node_effects.accesses += [Access(name, argument, number, False, True) for number in numbers]

    def _record_opaque(self, node_effects: NodeEffects, func: Op, inputs: set[int]) -> None:
        """A higher-order op that did not run its body op by op: it may do anything to its inputs."""
        name = str(func)
        node_effects.ops.append(name)
        node_effects.accesses += [Access(name, "operand", storage, True, False) for storage in sorted(inputs)]
        node_effects.uncapturable = f"higher-order op {name} decides on the host what it runs"
        node_effects.barrier = f"higher-order op {name}"

    def _check_aliasing(self, node: fx.Node, func: OpOverload, bound: Mapping[str, Tree], result: Tree) -> None:
        """Refuse an op that returns (a view of) an argument although its schema promises a fresh tensor."""
        returned = result if len(func._schema.returns) > 1 else (result,)  # one return may be a list of tensors
        taken = {self.storages.number(t): name for name, value in bound.items() for t in _tensors(value)}
        for declared, value in zip(func._schema.returns, returned, strict=False):
            for tensor in _tensors(value):
                argument = taken.get(self.storages.number(tensor))
                if argument is not None and declared.alias_info is None and not is_wait(func):
                    raise AliasingOpError(
                        f"op {op_name(func)} returns memory of its argument {argument!r}, but its schema promises a "
                        f"fresh tensor ({where(node)}): return nothing, return a clone, or declare the alias"
                    )


def _why_no_graph_holds(func: OpOverload, bound: Mapping[str, Tree]) -> str | None:
    """Why a collective, or a wait for one that this graph has not started, is eager; None if a graph may hold it."""
    devices = {tensor.device for tensor in _tensors(bound)}
    if all(device.type == "cpu" for device in devices):
        return "a collective runs on the host here"
    backends = {backend_of(group_of(bound), device) for device in devices}
    is_capturable = func.namespace in _CAPTURABLE_COLLECTIVES and backends == {"nccl"}
    return None if is_capturable else "a collective runs outside of graphs here"


class WholeOps(TorchDispatchMode):
    """Shows a recorder the registered ops that a node calls, as called; composite ones arrive so in inference mode."""

    def __init__(self, recorder: EffectsRecorder, node_effects: NodeEffects) -> None:
        super().__init__()
        self._recorder = recorder
        self._node_effects = node_effects

    def __torch_dispatch__(self, func: Op, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None) -> Tree:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and self._recorder.is_registered(func):
            self._recorder.record_whole(self._node_effects, func, bind_arguments(func, args, kwargs))
        return func(*args, **kwargs)


HOST_EFFECT = "declares no effect, so it has one on the host"


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _objects(bound: Mapping[str, Tree]) -> list[str]:
    """Arguments of a call that hold an object opaque to torch."""
    return [argument for argument, value in bound.items() if any(map(is_opaque, pytree.tree_leaves(value)))]


@cache
def _data_arguments(func: OpOverload) -> tuple[tuple[str, bool], ...]:
    """The arguments whose data the op touches, with whether it writes them."""
    returns = func._schema.returns
    # one that also returns something of its own has read the data to make it
    is_undeclared_view = aten_name(func) in UNDECLARED_VIEWS
    is_view = is_undeclared_view or (
        bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    )
    shape_only = aten_name(func) in _SHAPE_ONLY or func.namespace == "prim"
    touched = []
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        viewed = is_view and (argument.alias_info is not None or is_undeclared_view)
        if writes or not (viewed or shape_only):
            touched.append((argument.name, writes))
    return tuple(touched)


@cache
def _host_effect(func: OpOverload) -> bool:
    return not func._schema.returns and not func._schema.is_mutable


def _why_barrier(func: OpOverload, name: str, registered: RegisteredOp | None) -> str | None:
    if registered and registered.reads_context:
        return f"{name} reads the step context"
    if func.namespace not in OWN_NAMESPACES and _host_effect(func):
        return f"{name} has undeclared effects"
    return None


def _is_foreign_function(node: fx.Node) -> bool:
    """A plain Python function from outside of torch, let in by `allow_in_graph`: what else it does is unknown."""
    module = getattr(node.target, "__module__", None) or ""
    known = module.split(".")[0] in ("torch", "_operator", "operator", "builtins", "math", "")
    return node.op == "call_function" and not known and not isinstance(node.target, (OpOverload, FusedCall))


def _target_name(node: fx.Node) -> str:
    return str(getattr(node.target, "__qualname__", node.target))
