"""What a partition must be, from a run of the traced graph on real tensors: it uses none of the code it judges.

`watch` runs a graph node by node under a dispatch mode and notes for each node which storages its ops read and wrote.
From that alone follow which nodes work, which of them must be eager under each policy, which pairs must keep their
order, and which values own their memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from toy_ops import LOG, SPLIT

ALLOCATE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
BARRIERS = ("toy::tick", "toy::context_write")
STEP_READERS = ("toy::kv_write", "toy::context_write")


@dataclass
class Deed:
    """What one node did when it ran: the ops, the storages read and written, and the value it made."""

    name: str
    ops: list[str] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    masked: bool = False
    works: bool = False
    value: Any = None
    feeders: set[str] = field(default_factory=set)  # nodes whose values it took

    @property
    def is_split(self) -> bool:
        return any(op in SPLIT for op in self.ops)

    @property
    def is_barrier(self) -> bool:
        return any(op in BARRIERS for op in self.ops)


@dataclass
class Deeds:
    """All nodes of one run, in order, and which storage is step state."""

    by_name: dict[str, Deed]
    made_by: dict[int, str]  # the first node that showed a storage
    step_storages: set[int]

    @property
    def working(self) -> list[Deed]:
        return [deed for deed in self.by_name.values() if deed.works]

    def reads_step(self, deed: Deed) -> bool:
        """It reads what the runner replaces: a registered op, or any reader of the same storage."""
        return any(op in STEP_READERS for op in deed.ops) or bool(deed.reads & self.step_storages)

    def must_be_eager(self, runner: str, region: str) -> set[str]:
        """Names of the nodes that belong into regions, by the definition of each policy."""
        working = self.working
        eager = {deed.name for deed in working if deed.is_split or deed.masked}
        if region == "minimal" and runner == "mrv1":
            eager |= {deed.name for deed in working if self.reads_step(deed)}
        if region == "wide":
            kinds = "".join("S" if d.is_split else "P" if self.reads_step(d) else "N" for d in working)
            # from a preparation op to the last split op before the next one, what lies between included
            for run in re.finditer(r"P[PN]*S(?:[SN]*S)?|P", kinds):
                eager |= {deed.name for deed in working[run.start() : run.end()]}
        return eager

    def ordered_pairs(self) -> Iterator[tuple[str, str]]:
        """Pairs of compute nodes that no move may swap."""
        working = self.working
        for position, late in enumerate(working):
            sources = self._sources(late)
            for early in working[:position]:
                touched = late.reads | late.writes
                conflict = early.writes & touched or early.reads & late.writes
                held = (early.is_barrier or late.is_barrier) and touched and (early.reads | early.writes)
                if early.name in sources or conflict or held:
                    yield early.name, late.name

    def _sources(self, deed: Deed) -> set[str]:
        """Who made the memory and the numbers that a node uses; a tensor taken for its shape alone is no source."""
        found = {self.made_by[storage] for storage in deed.reads | deed.writes if storage in self.made_by}
        pending = [*deed.feeders]
        while pending:
            feeder = self.by_name[pending.pop()]
            if not storages_of(feeder.value):
                found.add(feeder.name)
                pending += [] if feeder.works else feeder.feeders
        return found


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.deed = Deed("")
        self.step_storages: set[int] = set()
        self.ops: list[str] = []  # of all nodes, those that are neither views nor allocations
        self._alive: list[Any] = []  # an address must not name two storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {s.name: value for s, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        written = set() if torch.Tag.inplace_view in func.tags else written
        before = set(storages_of((args, kwargs)))
        result = func(*args, **kwargs)
        self._alive.append(result)
        name = f"{func.namespace}::{func._opname}"
        is_view = not written and before and set(storages_of(result)) <= before and func._schema.returns
        self.deed.ops.append(name)
        if not is_view and func._opname not in ALLOCATE:
            self.deed.works = True
            self.ops.append(name)
            self._note_data(name, given, written)
        return result

    def _note_data(self, name: str, given: dict[str, Any], written: set[str]) -> None:
        for argument, value in given.items():
            seen = self.deed.writes if argument in written else self.deed.reads
            seen.update(storages_of(value) if not _looks_at_shape_only(name) else ())
        if name == "toy::kv_write":
            self.step_storages.update(storages_of(given["slots"]))
        indices = [i for i in given.get("indices", ()) if i is not None] if "index_put" in name else []
        self.deed.masked |= any(index.dtype == torch.bool for index in indices)


def _looks_at_shape_only(name: str) -> bool:
    return name.endswith("_like") or name.startswith("aten::new_")


class _Watched(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.watch = _Watch()
        self.deeds = Deeds({}, {}, self.watch.step_storages)

    def run_node(self, n: fx.Node) -> Any:
        self.watch.deed = deed = Deed(n.name, feeders={arg.name for arg in n.all_input_nodes})
        with self.watch:
            deed.value = super().run_node(n)
        if n.op != "output":
            self.deeds.by_name[n.name] = deed
            for storage in storages_of(deed.value):
                self.deeds.made_by.setdefault(storage, n.name)
        return deed.value


def watch(gm: fx.GraphModule, args: Sequence[Any]) -> Deeds:
    """Run a graph and note what each node does; the arguments and the log of `tick` stay as they are."""
    logged = len(LOG)
    interpreter = _Watched(gm)
    interpreter.run(*clone_all(args), enable_io_processing=False)
    del LOG[logged:]
    return interpreter.deeds


def working_ops(run: Any, args: Sequence[Any]) -> list[str]:
    """The ops a callable dispatches, views and allocations left out, sorted."""
    logged = len(LOG)
    with _Watch() as mode:
        run(*clone_all(args))
    del LOG[logged:]
    return sorted(mode.ops)


def storages_of(values: Any) -> list[int]:
    return [int(leaf.untyped_storage()._cdata) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def clone_all(values: Sequence[Any]) -> list[Any]:
    """Copies of the tensors among them that overlap one another just as the originals do."""
    copies: dict[int, torch.UntypedStorage] = {}

    def clone(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        copy = copies.setdefault(int(storage._cdata), storage.clone())
        empty = torch.empty(0, dtype=value.dtype)
        return empty.set_(copy, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]

    return [clone(value) for value in values]


def snapshot(given: Any, returned: Any) -> list[Any]:
    """All that a caller can see of a call: bytes, layouts, and who shares memory with whom."""
    leaves = [*pytree.tree_leaves(given), *pytree.tree_leaves(returned)]
    owners = [leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)]
    seen: list[Any] = [pytree.tree_structure(returned)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            # strides that lead nowhere mean nothing, and fakes choose them otherwise than kernels do
            pairs = zip(leaf.shape, leaf.stride(), strict=True)
            strides = [stride for size, stride in pairs if size > 1 and leaf.numel()]
            layout = (leaf.dtype, tuple(leaf.shape), strides, leaf.storage_offset())
            storage = leaf.untyped_storage()
            seen.append((layout, owners.index(storage.data_ptr()), bytes(storage.tolist())))
        else:
            seen.append(leaf)
    return seen
