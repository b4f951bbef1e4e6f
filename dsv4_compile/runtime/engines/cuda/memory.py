"""What the cuda engine does when the device has no memory left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ....log import log

Result = TypeVar("Result")


def with_room(make: Callable[[], Result], name: str) -> Result:
    """What `make` returns; if it runs out of memory, it is called once more, after torch's cache was emptied.

    While anything is captured, and for a pool of its own, torch does not give back what it has cached for others: what
    warm-ups used, and pools whose graphs are gone. Room may be there that no allocation gets.

    Args:
        make: leaves nothing behind when it fails.
        name: what needs the memory, for the log.

    Raises:
        torch.OutOfMemoryError: there is no room either way.
    """
    try:
        return make()
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
    # outside of the handler: an error keeps the frames it came through alive, and with them memory
    log.warning("no memory for %s: it is tried once more, with torch's cache emptied", name)
    torch.cuda.empty_cache()
    return make()


def _is_out_of_memory(error: RuntimeError) -> bool:
    # CUDA says it in words of its own where it makes the graph, which is no allocation of torch's
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
