"""`dsv4_compile.capture`: warm up and capture the buckets of a compiled model ahead of serving."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch


def capture(
    compiled: Callable[..., Any],
    inputs_for: Callable[[int], Any],
    sizes: Iterable[int],
    *,
    progress: bool | None = None,
) -> None:
    """Call a compiled model twice for each token count, largest first, so that its buckets are captured.

    Caches, buffers and other inputs that the model writes, and the random state, are afterwards as before. Grad is
    off during the calls. What the model writes is copied for the time of each call, so where caches fill the device,
    capture before they are given their full size.

    Args:
        compiled: what `torch.compile` returned.
        inputs_for: token count -> arguments of one call, as a tuple, or a dict of keyword arguments; dummy data is
            fine.
        sizes: token counts to capture.
        progress: show a progress bar (needs tqdm); None: on a terminal only.
    """
    from .restoring import restoring_calls

    with torch.no_grad(), restoring_calls():
        for size in _shown(sorted(set(sizes), reverse=True), progress):
            inputs = inputs_for(size)
            for _ in range(2):  # the first call of a bucket is its warm-up
                _call(compiled, inputs)


def _call(compiled: Callable[..., Any], inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        compiled(**inputs)
    else:
        compiled(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))


def _shown(sizes: Sequence[int], progress: bool | None) -> Iterable[int]:
    if progress is False or (progress is None and not sys.stderr.isatty()):
        return sizes
    try:
        from tqdm import tqdm
    except ImportError:  # an extra, for looks only
        return sizes
    bar: Iterable[int] = tqdm(sizes, desc="capturing buckets", unit="bucket")
    return bar
