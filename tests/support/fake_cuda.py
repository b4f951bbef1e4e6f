"""A stand-in for `torch.cuda` on a CPU that knows which work is ordered: who may touch which memory, and when.

The real cuda engine runs over it with CPU tensors. Kernels run at once; what is looked at is what a GPU would be free
to do. A dispatch mode sees each op, on the stream that is current in its thread. The model:

- **Order** is a vector clock for each stream, and **blocks** are storages: see `device_model`.
- **Graphs** are one kernel when replayed, which touches the blocks that were touched at capture, and those of its pool.
  A stream joins a capture by waiting for an event of it.
- **cuBLAS** has a workspace for each thread and stream, which every product writes. To clear the workspaces frees them.

It finds RACE (two accesses, one of them a write, that nothing orders), REUSE (memory handed out that somebody uses),
UNJOINED (a side stream at the end of a capture) and UNCAPTURED (a capture that waits for work outside).
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from device_model import WHOLE, Block, Timeline, given, is_memory, span_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsv4_compile.runtime import captured
from dsv4_compile.runtime.engines import select
from dsv4_compile.runtime.engines.cuda import engine as cuda_engine


class FakeCuda:
    """The device, which threads share.

    Attributes:
        findings: what a GPU might do wrong, each beginning with its kind.
        replays, most_streams: graphs launched; streams of the one that has most.
        capturing: the graph that a stream is captured into.
    """

    def __init__(self) -> None:
        self.findings: list[str] = []
        self.replays = self.most_streams = 0
        self.capturing: dict[Stream, Graph] = {}
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.graphs_of: defaultdict[Any, Block] = defaultdict(lambda: Block("a pool of graphs", self.default))
        self._device = Timeline()
        self._blocks: dict[int, Block] = {}
        self._workspaces: dict[tuple[int, Stream], Block] = {}
        self._kept: defaultdict[tuple[Any, Stream], list[Block]] = defaultdict(list)
        self._thread = threading.local()
        self.stream, self.event, self.graph = (type(c.__name__, (c,), {"cuda": self}) for c in (Stream, Event, Graph))
        self.default: Stream = self.stream(name="default")

    @property
    def current(self) -> Stream:
        return getattr(self._thread, "stream", self.default)

    @property
    def now(self) -> Timeline:
        return self.timeline(self.current)

    def timeline(self, stream: Stream) -> Timeline:
        graph = self.capturing.get(stream)
        return self._device if graph is None else graph.timeline

    def block_of(self, tensor: torch.Tensor, maker: str = "") -> Block:
        """The block of a tensor, made on the current stream if it has a maker."""
        storage = tensor.untyped_storage()
        address, known = storage.data_ptr(), self._blocks.get(storage.data_ptr())
        if known is not None and known.storage.expired():
            self._free(address)
            known = None
        if known is None:
            home, pool = (self.current, self.capturing.get(self.current)) if maker else (self.default, None)
            known = self._blocks[address] = Block(f"what {maker or 'somebody'} made", home, pool)
            known.storage = StorageWeakRef(storage)
        return known

    def sweep(self) -> None:
        """Free the blocks of storages that are gone."""
        for address in [address for address, block in self._blocks.items() if block.storage.expired()]:
            self._free(address)

    def _free(self, address: int) -> None:
        block = self._blocks.pop(address)
        if block.pool is None:
            self._device.freed[block.home].append(block)
        elif block.pool is self.capturing.get(block.home):  # that of a graph which is done is handed out no more
            block.pool.timeline.freed[block.home].append(block)

    def workspace(self) -> Block:
        """What cuBLAS writes here, made when first asked for: in the pool of memory in use, or in everybody's."""
        key, pool = (threading.get_ident(), self.current), getattr(self._thread, "pool", None)
        if key not in self._workspaces:
            kept = self._kept[pool, self.current] if pool is not None else []
            self._workspaces[key] = kept.pop() if kept else Block(f"a workspace of {self.current}", self.current, pool)
        return self._workspaces[key]

    def clear_workspaces(self) -> None:
        """As torch's own graphs do around each warm-up and capture."""
        for block in self._workspaces.values():
            block.is_given_away = block.pool is None
            self._kept[block.pool, block.home].append(block)
        self._workspaces.clear()

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        return self._having(stream=stream)

    @contextmanager
    def _having(self, **values: Any) -> Iterator[None]:
        before = dict(self._thread.__dict__)
        self._thread.__dict__.update(values)
        try:
            yield
        finally:
            self._thread.__dict__.clear()
            self._thread.__dict__.update(before)

    def watching(self) -> Watch:
        return Watch(self)


class Stream:
    cuda: FakeCuda

    def __init__(self, device: Any = None, name: str = "") -> None:
        self.cuda_stream = next(self.cuda.numbers)
        self.name = name or f"stream {self.cuda_stream}"
        self.stream_id, self.is_destroyed = 2 * self.cuda_stream + 1, False  # odd: torch made it

    def __repr__(self) -> str:
        return self.name

    def record_event(self) -> Event:
        assert not self.is_destroyed
        event = self.cuda.event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.graph is not None:
            self.cuda.capturing.setdefault(self, event.graph)
        elif self in self.cuda.capturing:
            self.cuda.findings.append(f"UNCAPTURED {self} waits for work outside of its capture")
        self.cuda.timeline(self).merge(self, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event:
    cuda: FakeCuda

    def record(self, stream: Stream) -> None:
        self.graph = self.cuda.capturing.get(stream)
        self.clock = dict(self.cuda.timeline(stream).clocks[stream])


class Graph:
    cuda: FakeCuda

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.origin, self.timeline, self.pool = self.cuda.current, Timeline(), pool
        self.cuda.capturing[self.origin] = self

    def capture_end(self) -> None:
        clocks, streams = self.timeline.clocks, [s for s, graph in self.cuda.capturing.items() if graph is self]
        for stream in streams:
            if clocks[self.origin][stream] < clocks[stream][stream]:
                self.cuda.findings.append(f"UNJOINED {stream} at the end of a capture")
            del self.cuda.capturing[stream]
        outside = [(block, accesses) for block, accesses in self.timeline.accesses.items() if block.pool is not self]
        self.cuda.most_streams = max(self.cuda.most_streams, len(streams))
        self.touched = [(block, a.is_write, a.span) for block, accesses in outside for a in accesses]

    def replay(self) -> None:
        with self.cuda.lock:
            self.cuda.replays += 1
            self.cuda.sweep()
            touched = [*self.touched, (self.cuda.graphs_of[self.pool], True, WHOLE)]
            self.cuda.findings += self.cuda.now.run(self.cuda.current, "a replay", touched)

    def reset(self) -> None:
        self.touched = []


class Watch(TorchDispatchMode):
    """Sees the ops of one thread; calls of compiled models are watched anyway."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cuda, name = self._cuda, function.name()
        with cuda.lock:
            cuda.sweep()
            touched = [(cuda.block_of(t), is_write, span_of(t)) for t, is_write in given(function, args, kwargs or {})]
        result = function(*args, **(kwargs or {}))
        with cuda.lock:
            known = {block for block, _, _ in touched}
            fresh = {cuda.block_of(t, name) for t in tree_leaves(result) if is_memory(t)} - known
            if fresh:
                cuda.findings += cuda.now.allocate(cuda.current, name)
            if "empty" in name or not (fresh or any(is_write for _, is_write, _ in touched)):
                return result  # no kernel: an allocation, a view, a look at a number
            if "mm" in name:
                touched.append((cuda.workspace(), True, WHOLE))
            cuda.findings += cuda.now.run(cuda.current, name, [*touched, *((block, True, WHOLE) for block in fresh)])
        return result


def hide_bindings(patch: pytest.MonkeyPatch) -> None:
    """Streams come from `torch.cuda`, which is replaced, and not from the driver, which a build of torch may bring."""
    patch.setitem(sys.modules, "cuda.bindings.driver", None)  # to import it is an ImportError now


def install(patch: pytest.MonkeyPatch) -> FakeCuda:
    """Put it in the place of `torch.cuda`, and the cuda engine in that of the host engine."""
    cuda, pools = FakeCuda(), itertools.count(1)
    hide_bindings(patch)
    for name, value in {
        "Stream": cuda.stream,
        "Event": cuda.event,
        "CUDAGraph": cuda.graph,
        "MemPool": object,
        "device": lambda device: nullcontext(),
        "stream": cuda.on,
        "use_mem_pool": lambda pool, device: cuda._having(pool=pool),
        "current_device": lambda: 0,
        "current_stream": lambda device=None: cuda.current,
        "current_blas_handle": cuda.workspace,
        "graph_pool_handle": lambda: (0, next(pools)),
        "is_current_stream_capturing": lambda: cuda.current in cuda.capturing,
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: cuda.current.cuda_stream, raising=False)
    patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", cuda.clear_workspaces, raising=False)
    patch.setattr(cuda_engine, "record_use", lambda tensor, stream: cuda.block_of(tensor).recorded.add(stream))
    engine, call = cuda_engine.CudaEngine(torch.device("cuda", 0)), captured.CapturedCallable.__call__

    def watched(self: captured.CapturedCallable, *args: Any) -> Any:
        with cuda.watching():
            return call(self, *args)

    patch.setattr(select, "_make_engine", lambda name, device: engine)
    patch.setattr(captured.CapturedCallable, "__call__", watched)
    return cuda
