"""The engine for CPU inputs: it does what a CUDA graph does, so that everything else is tested without a GPU.

How each rule comes about:

| rule | where |
|---|---|
| no kernel runs while recording, results hold poison | `recorder`: ops are recorded, memory is poisoned |
| a compiled function is one launch, since nobody can look into it | `capture_state.launch` |
| ops implemented in Python are looked into | `op_kinds`: their body runs once, its ops are recorded |
| the host code of the recorded callable never runs again | a replay is a list of bound kernels |
| what needs a value on the host is refused, with the line | `sync_guard` |
| results are laid out as kernels do it | `layout_watch`: a warm-up tells where meta kernels differ |
| addresses and numbers are baked | `launch`: operands are aliases made while recording |
| memory of dead temporaries is reused by later captures | `pool` |
| work of two streams is ordered by events alone | `race_checker`: conflicts that are not are refused |
| a replay draws fresh random numbers, recording none | random kernels are launches as any other |

Left out against a real graph: streams that run at the same time; one thread runs all streams. Added to it: copies of
results are left out where that is safe (`copy_elision`), and everything recorded is kept alive, so that a mistake shows
as a wrong number and not as a crash.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..base import LaunchRecord, allocate_poisoned
from ..capture_state import offering, recording
from .layout_watch import LayoutWatch
from .meta_cache import MetaCache
from .pool import HostPool
from .recorder import Recorder


class HostLaunchRecord(LaunchRecord):
    """A captured graph whose replay leaves autocast blocks: the casts were recorded, and would be made twice."""

    def __init__(self, name: str, launches: list[Callable[[], object]], keep_alive: Sequence[object]) -> None:
        super().__init__(name, launches, keep_alive)
        run_all = self.replay

        def replay() -> None:
            if not torch.is_autocast_enabled("cpu"):
                run_all()
                return
            try:
                try:
                    torch.set_autocast_enabled("cpu", False)
                    run_all()
                finally:
                    torch.set_autocast_enabled("cpu", True)
            finally:
                torch.set_autocast_enabled("cpu", True)  # once more: an interrupt may have come in between

        self.replay = replay


class HostEngine:
    """See `base.Engine`; holds nothing of a capture, so any thread may use it.

    Attributes:
        stream_seed: in which of the orders that events allow replays run the work of several streams; None for the
            order of the capture.
    """

    name = "host"
    replays_in_captures = True  # it records what the replay launches
    stream_seed: int | None = None

    def __init__(self) -> None:
        self._meta_cache = MetaCache()

    def follow(self, call: object, *, alone: bool = False) -> bool:
        """See `Engine.follow`; what a thread does is done when it does the next thing."""
        return True

    def leave(self, call: object) -> None:
        """See `Engine.leave`."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """See `Engine.allocate`."""
        return allocate_poisoned(nbytes, device)

    def make_pool(self) -> HostPool:
        """See `Engine.make_pool`."""
        return HostPool()

    def warm_up(self, run: Callable[[], object], *, streams: int = 0) -> str | None:
        """See `Engine.warm_up`; one stream after the other."""
        watch = LayoutWatch(self._meta_cache)
        watch.run(run)
        return watch.other_op

    def capture(self, run: Callable[[], object], pool: HostPool, *, name: str, streams: int = 0) -> LaunchRecord:
        """See `Engine.capture`."""
        recorder = self.make_recorder(pool, name)
        with recording(name, recorder), offering(recorder.streams if streams else None):
            try:
                recorder.run(run)
                launches = recorder.finish()
            except BaseException:
                recorder.abandon()
                raise
        if not launches:
            warnings.warn(f"the graph of {name} is empty: it launches no kernel", stacklevel=2)
        # asking for autocast costs a fifth of a microsecond, which the short pieces would feel
        plain = all(launch.ignores_autocast for launch in recorder.launches)
        return (LaunchRecord if plain else HostLaunchRecord)(name, launches, recorder.used_blocks())

    def make_recorder(self, pool: HostPool, name: str) -> Recorder:
        """A recorder for one capture."""
        return Recorder(pool, name, self._meta_cache, self.stream_seed)
