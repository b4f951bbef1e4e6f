"""Global modes as they were before a call, whatever happens inside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..compat.dynamo import autocast_state, restore_autocast


@contextmanager
def restored_modes() -> Iterator[None]:
    """Put grad mode and autocast back at the end of the block, also after an exception between two mode switches."""
    grad = torch.is_grad_enabled()
    autocast = autocast_state()
    try:
        yield
    finally:
        if torch.is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)
        if autocast_state() != autocast:
            restore_autocast(autocast)
