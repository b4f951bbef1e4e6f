"""Makes the engine of a device, once."""

from __future__ import annotations

import threading
from functools import cache
from typing import Literal

import torch

from ...errors import OptionError
from .base import Engine

_making = threading.Lock()


def engine_for(name: Literal["auto", "cuda", "host"], device: torch.device) -> Engine:
    """The engine for inputs on a device; all callers of one `real_device` share it, and with it its capture stream.

    Args:
        name: "auto" takes cuda where the inputs are on a CUDA device and host where they are on the CPU.
        device: where the inputs are.

    Raises:
        OptionError: no engine of that name, or it cannot record work of that device.
    """
    if name not in ("auto", "cuda", "host"):
        raise OptionError(f"engine={name!r}: it must be 'auto', 'cuda' or 'host'")
    needed = {"cpu": "host", "cuda": "cuda"}.get(device.type)
    if needed is None or name not in ("auto", needed):
        known = f"use engine={needed!r} or 'auto'" if needed else "use engine='off'"
        raise OptionError(f"engine={name!r} cannot record the work of inputs on {device}: {known}")
    with _making:  # `cache` alone lets two threads make two engines
        return _make_engine(needed, real_device(device))


def real_device(device: torch.device) -> torch.device:
    """A device by its one name: "cuda" without an index is the current one, and there is one CPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


@cache
def _make_engine(name: str, device: torch.device) -> Engine:
    # imported when needed: either engine builds on this module
    if name == "cuda":
        from .cuda.engine import CudaEngine

        engine: Engine = CudaEngine(device)
        return engine
    from .host.engine import HostEngine

    return HostEngine()
