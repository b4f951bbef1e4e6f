"""The engine for CUDA inputs, over `torch.cuda.CUDAGraph`. It has not run on hardware yet.

What it takes care of, each learnt by others the hard way:

- One stream for the work of all pieces of a device, warm-up and capture: what cuBLAS makes per thread and per stream
  (a handle, workspaces) is there before a capture, once and not in a graph's pool.
- A capture begins and ends on another stream, from which that of the work is forked. In torch 2.13 a graph that goes
  takes the cuBLAS workspaces of the stream that its capture began on with it (pytorch#193402), and other graphs would
  go on writing to them.
- `thread_local` capture mode: another thread's CUDA call does not invalidate the capture.
- Garbage collection paused and autocast's cache off while capturing (`capture_state`).
- Memory that outlives a capture (`allocate`) comes from outside any pool, and goes back to the stream of the work: the
  next one to get it is ordered after all replays.
- A capture begins outside of inference mode: what a generator keeps for graphs is made then, and written in any mode by
  later replays (pytorch#166792).
- Streams that are nobody else's, where there is a way to make such: another's kernels would become part of a graph.
- A capture that runs out of memory is left, and made once more without what torch has cached (`memory`).
- Events are made anew for each use (by `wait_stream`). Streams that the recorded code forks itself it has to join
  itself; CUDA refuses the capture otherwise.
- Calls on other streams, and of other threads, are ordered with each other (`call_order`): what graphs share is used by
  one at a time.
- Warm-ups and memory that outlives a capture use the stream of the work, and wait for one another there. So they do not
  run while another thread captures, or they would become part of somebody else's graph. What a warm-up returns is
  recorded for the stream of its caller: freed, it is not handed out before that stream has read it.
- Workspaces of cuBLAS that graphs hold are safe from those who clear them (`streams`).
- The default generator of the device is registered with every graph by torch; a generator of the user's has to be put
  into `generators` before a piece that draws from it is captured.
- torch refuses a capture into a pool whose graphs are all gone: then a pool takes another handle.
- A capture that CUDA has found invalid (a value was copied to the host) cannot be ended, and torch's allocators may
  go on recording to its pool: the one of the device is told to stop, the one of pinned memory cannot be. So later
  captures get another pool, and the graph is kept, which that allocator asks whether it records. Before torch 2.13 its
  generators count as capturing, and draw nothing else, until another capture ends well: so one is made.
- No synchronisation, garbage collection or emptying of caches per capture otherwise: with a hundred pieces in each of
  dozens of buckets that took longer than the captures.

Left to the caller: capture the largest bucket first; replay right after capture, since a graph's outputs hold nothing
before; release the captured graphs before a process group is destroyed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from ....analysis.slot_placement import ALIGNMENT
from ....compat.cuda import PoolHandle, bound_replay, own_stream, record_use, stop_recording_to_pool
from ....errors import CaptureError, Dsv4Error
from ..base import LaunchRecord, allocate_poisoned, refuse_replay
from ..capture_state import no_capture_elsewhere, offering, recording
from ..user_line import line_of
from .call_order import CallOrder
from .memory import with_room
from .pool import CudaPool
from .streams import SideStreams


class CudaEngine:
    """See `engine.Engine`. Threads may share it: captures exclude each other.

    Args:
        device: the CUDA device; without an index, the current one.

    Attributes:
        generators: the user's generators that captured work draws from.
    """

    name = "cuda"
    replays_in_captures = False  # CUDA launches no graph into a capture, and finds the capture invalid

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.generators: list[torch.Generator] = []
        self._device = torch.device("cuda", index)
        self._origin = own_stream(self._device)
        self._stream = own_stream(self._device)
        self._side_streams = SideStreams(self._device)
        self._order = CallOrder(self._device)
        self._invalid: list[torch.cuda.CUDAGraph] = []

    def follow(self, call: object, *, alone: bool = False) -> bool:
        """See `Engine.follow`."""
        return self._order.follow(call, alone=alone)

    def leave(self, call: object) -> None:
        """See `Engine.leave`."""
        self._order.leave(call)

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """See `Engine.allocate`."""
        with no_capture_elsewhere(), self._on(self._stream):
            memory = allocate_poisoned(nbytes, device)
        assert memory.data_ptr() % ALIGNMENT == 0, "torch aligns CUDA memory to 512 bytes"
        return memory

    def make_pool(self) -> CudaPool:
        """See `Engine.make_pool`."""
        return CudaPool()

    def warm_up(self, run: Callable[[], object], *, streams: int = 0) -> None:
        """See `Engine.warm_up`; a capture records what kernels give."""
        caller = torch.cuda.current_stream(self._device)
        with no_capture_elsewhere():
            # before anything runs: a product would have its workspace made where everybody's memory is
            with_room(partial(self._side_streams.prepare_blas, self._stream, streams), "a warm-up")
            with self._on(self._stream), offering(self._side_streams.streams(self._stream, streams)):
                result = run()
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor):
                record_use(tensor, caller)

    def capture(self, run: Callable[[], object], pool: CudaPool, *, name: str, streams: int = 0) -> LaunchRecord:
        """See `Engine.capture`."""
        # ordered with the caller's work, since a begin writes seeds and offsets of generators that replays read
        with recording(name), self._on(self._origin):
            try:
                graph = with_room(partial(self._make_graph, run, pool, streams), name)
            except (Dsv4Error, torch.OutOfMemoryError):
                raise  # that of a capture inside of this one speaks of captures too
            except RuntimeError as error:
                if "captur" in str(error):
                    raise _refusal(name, error) from error
                raise
        return CudaCapturedGraph(name, graph, pool)

    def _make_graph(self, run: Callable[[], object], pool: CudaPool, streams: int) -> torch.cuda.CUDAGraph:
        self._side_streams.prepare_blas(self._stream, streams)
        shared = pool.join()
        graph = self._new_graph()
        self._record(graph, run, pool, streams)
        del shared  # it kept the pool alive
        return graph

    def _new_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(False):
            for generator in self.generators:
                graph.register_generator_state(generator)
        return graph

    @staticmethod
    def _begin(graph: torch.cuda.CUDAGraph, handle: PoolHandle) -> None:
        with torch.inference_mode(False):
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], object], pool: CudaPool, streams: int) -> None:
        try:
            self._begin(graph, pool.handle)
            self._stream.wait_stream(self._origin)
            with torch.cuda.stream(self._stream), offering(self._side_streams.streams(self._stream, streams)):
                run()
            self._origin.wait_stream(self._stream)
        except BaseException:
            with suppress(RuntimeError):  # the first error counts
                self._origin.wait_stream(self._stream)
            with suppress(RuntimeError, Warning):  # torch warns of a graph without kernels
                self._end(graph, pool)
            graph.reset()
            raise
        self._end(graph, pool)

    def _end(self, graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
        """End a capture, once; see the module docstring for one that is invalid."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._drop(graph, pool.handle)
            pool.renew()
            self._free_generators()
            raise

    def _drop(self, graph: torch.cuda.CUDAGraph, handle: PoolHandle) -> None:
        graph.reset()  # first: that of torch 2.14 does itself what the next line does, which must not come twice
        stop_recording_to_pool(self._device.index, handle)
        self._invalid.append(graph)

    def _free_generators(self) -> None:
        graph, handle = self._new_graph(), torch.cuda.graph_pool_handle()
        try:
            try:
                self._begin(graph, handle)
                torch.zeros(1, device=self._device)  # torch warns of a graph without kernels
            finally:
                graph.capture_end()
        except RuntimeError:  # the error of the capture before counts
            self._drop(graph, handle)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Make a stream current, after the caller's work so far and before the caller's next."""
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)


class CudaCapturedGraph(LaunchRecord):
    """A captured graph whose replay is one graph launch on the current stream, with nothing of Python between."""

    def __init__(self, name: str, graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
        bound = partial(bound_replay(graph))
        super().__init__(name, [bound], [graph])
        self.replay = self._bound = bound
        self._graph = graph
        self._in_pool = pool.graphs
        self._in_pool.add(self)

    def release(self) -> None:
        """See `CapturedGraph.release`."""
        super().release()
        # in place: what was taken out before refuses as well
        self._bound.__setstate__((partial(refuse_replay, self._name), (), {}, {}))  # type: ignore[attr-defined]
        self._in_pool.discard(self)
        self._graph.reset()


def _refusal(name: str, error: RuntimeError) -> CaptureError:
    line = line_of(error)
    refused = CaptureError(
        f"CUDA refused the graph of {name} ({line}): {error}. Usual causes: a value copied to the host, "
        "an error that the recorded code swallowed, a stream that was forked and not joined. Move what does it into "
        "an op that is registered as a split op."
    )
    refused.reason = f"CUDA refused to capture it ({str(error).partition(chr(10))[0]})"
    refused.line, refused.node = line, vars(error).get("node")
    return refused
