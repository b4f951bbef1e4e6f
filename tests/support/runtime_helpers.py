"""What the tests of the capture runtime share: spies on memory and captures, ops with a body to break, global state."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from case_helpers import Setup
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.library import Library
from torch.multiprocessing.reductions import StorageWeakRef
from toy_ops import SPLIT

from dsv4_compile.compat import functorch
from dsv4_compile.runtime import captured
from dsv4_compile.runtime.captured import CapturedCallable
from dsv4_compile.runtime.engines.base import POISON
from dsv4_compile.runtime.engines.host.engine import HostEngine
from dsv4_compile.runtime.program.cache import CachedProgram

HOST = Setup("host", "mrv2")
LIBRARY = Library("probe", "FRAGMENT")


class Probe:
    """What the `probe` ops do besides their arithmetic: state on the host that no schema shows."""

    amount: float = 1.0
    called: Callable[[str], None] = staticmethod(lambda op: None)


def _shift(q: Tensor) -> Tensor:
    Probe.called("shift")
    return q + Probe.amount  # what a capture freezes


def _store(q: Tensor, cache: Tensor) -> None:
    Probe.called("store")
    cache[: q.shape[0]].mul_(0.5).add_(q)


def _core(q: Tensor, out: Tensor) -> None:
    Probe.called("core")
    out.copy_(2 * q)


def _give(q: Tensor) -> Tensor:
    Probe.called("give")
    return 3 * q


for _schema, _body, _fake in (
    ("shift(Tensor q) -> Tensor", _shift, torch.empty_like),
    ("store(Tensor q, Tensor(a!) cache) -> ()", _store, lambda q, cache: None),
    ("core(Tensor q, Tensor(a!) out) -> ()", _core, lambda q, out: None),
    ("give(Tensor q) -> Tensor", _give, torch.empty_like),
):
    _name = _schema.partition("(")[0]
    LIBRARY.define(_schema)
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"probe::{_name}", _fake, lib=LIBRARY)

SPLIT_PROBES = ("probe::core", "probe::give")


def compile_host(function: Any, **options: Any) -> Any:
    """Compiled for the host engine, with the split ops of `toy` and `probe`."""
    given = {"split_ops": (*SPLIT, *SPLIT_PROBES), **options}
    return torch.compile(function, backend="dsv4_piecewise", dynamic=True, options=HOST.options(**given))


def call_often(compiled: Any, *args: Any, times: int = 3) -> Any:
    """The result of the last of several equal calls: warm-up, capture, replay."""
    with torch.no_grad():
        for _ in range(times - 1):
            compiled(*args)
        return compiled(*args)


def owners() -> list[CapturedCallable]:
    """The live callables, and perhaps some that wait for the collector, in the order in which they were made."""
    return sorted(captured._live, key=lambda owner: int(owner._title.split()[-1]))


def the_owner() -> CapturedCallable:
    """The callable that was made last."""
    return owners()[-1]


def entries() -> list[CachedProgram]:
    """What the callable that was made last has captured."""
    return list(the_owner()._cache._programs.values())


def captured_sizes() -> list[int]:
    """The first size of every captured bucket of that callable, in ascending order."""
    return sorted(entry.bucket[0] for entry in entries())


@dataclass
class Allocations:
    """What `Engine.allocate` handed out.

    Attributes:
        made: bytes and the storage, weakly.
        holds: whether `memories` keeps the memory itself, so that a test may overwrite it.
    """

    made: list[tuple[int, StorageWeakRef]] = field(default_factory=list)
    holds: bool = False
    memories: list[Tensor] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        return [nbytes for nbytes, _ in self.made]

    @property
    def alive(self) -> list[int]:
        """Sizes of those that something still refers to."""
        return [nbytes for nbytes, storage in self.made if not storage.expired()]

    def poison(self) -> None:
        """Overwrite every byte that was handed out."""
        for memory in self.memories:
            memory.view(torch.int16).fill_(POISON)


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    """Counts the arenas (and, with static outputs or inputs that are copied out, other buffers) of a test."""
    seen = Allocations()
    allocate = HostEngine.allocate

    def spy(self: HostEngine, nbytes: int, device: torch.device) -> Tensor:
        memory = allocate(self, nbytes, device)
        seen.made.append((nbytes, StorageWeakRef(memory.untyped_storage())))
        if seen.holds:
            seen.memories.append(memory)
        return memory

    monkeypatch.setattr(HostEngine, "allocate", spy)
    return seen


def live_tensors() -> list[Tensor]:
    """Every tensor with memory that Python can reach."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return [tensor for tensor in tensors if _has_memory(tensor)]


def _has_memory(tensor: Tensor) -> bool:
    """A sparse tensor and one of a transform, which other tests may have left behind, have no storage of their own."""
    if isinstance(tensor, FakeTensor) or functorch.is_wrapped(tensor):
        return False
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


def live_bytes() -> int:
    """Bytes of all storages that Python can reach, each once."""
    storages = {}
    for tensor in live_tensors():
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
