"""Process groups as the ops of a graph name them: their backend, their ranks, how long they wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def backend_of(group: object, device: torch.device) -> str | None:
    """The backend that serves a group on a kind of device ("nccl", "gloo"); None if that cannot be told."""
    return _asked(group, lambda found: str(found._get_backend(torch.device(device.type)).name()))


def rank_in(group: object) -> tuple[int, int] | None:
    """The rank of this process in a group, and how many there are; None if that cannot be told."""
    return _asked(group, lambda found: (int(found.rank()), int(found.size())))


def timeout_of(group: object, device: torch.device) -> float | None:
    """Seconds that a group waits for other ranks; None if that cannot be told."""
    return _asked(
        group, lambda found: float(found._get_backend(torch.device(device.type)).options._timeout.total_seconds())
    )


def _asked(group: object, question: Callable[[Any], Result]) -> Result | None:
    """Ask a group, given as itself or by the name that functional collectives take."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed import distributed_c10d

    resolve: Callable[[Any], Any] = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009
    try:
        return question(resolve(group) if isinstance(group, str) else group)
    except Exception:  # a group that is gone, a backend that is not asked this way
        return None
