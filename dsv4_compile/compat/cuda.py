"""Private names about CUDA's streams, allocator and graphs, and streams that are made past torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

PoolHandle: TypeAlias = "_POOL_HANDLE"  # of a graph memory pool
# CU_STREAM_NON_BLOCKING, as torch makes its own: the legacy default stream does not wait for such a stream.
_NON_BLOCKING = 1


def stop_recording_to_pool(device_index: int, handle: PoolHandle) -> None:
    """Undo what the begin of a capture did to a graph memory pool, for a capture that torch cannot end."""
    try:
        torch._C._cuda_endAllocateToPool(device_index, handle)
    except RuntimeError:
        return  # it was ended; in torch 2.13 its use of the pool is never given back, later the graph does that
    torch._C._cuda_releasePool(device_index, handle)


def current_stream_number(device_index: int) -> int:
    """The current stream of a device as CUDA knows it: a fifth of what `torch.cuda.current_stream` costs."""
    number: int = torch._C._cuda_getCurrentRawStream(device_index)
    return number


def is_external(stream: torch.cuda.Stream) -> bool:
    """Whether torch did not make a stream, so that it may be destroyed: its id is then its address, which is even."""
    return stream.stream_id != 0 and stream.stream_id % 2 == 0


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A new stream that nobody else is given, where `cuda.bindings` can make one; it is never destroyed.

    torch makes 32 streams of a device and hands them out in turn, so one of its streams may be somebody else's too.

    Args:
        device: a CUDA device with an index.
    """
    of_torch = torch.cuda.Stream(device)  # what is given where nothing better is; it also makes the context
    if torch.version.hip is not None:
        return of_torch
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return of_torch
    with torch.cuda.device(device):
        status, stream = driver.cuStreamCreate(_NON_BLOCKING)
        if status != driver.CUresult.CUDA_SUCCESS:
            return of_torch
        return torch.cuda.ExternalStream(int(stream), device=device)


def record_use(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Have torch's allocator wait for the work of a stream before it hands out the memory of a tensor again."""
    if tensor.is_cuda:
        tensor.record_stream(stream)


def bound_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """What launches a graph: the C++ method, past the Python one, which asks for what only debugging switches on."""
    replay: Callable[[], None] = getattr(super(torch.cuda.CUDAGraph, graph), "replay", graph.replay)
    return replay
