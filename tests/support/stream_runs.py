"""Compiled functions whose pieces run on side streams, in a chosen order."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import pytest

from dsv4_compile.runtime.engines.host.engine import HostEngine

# the package has the function by this name
ASSIGN_STREAMS = importlib.import_module("dsv4_compile.passes.assign_streams")


@contextmanager
def replays_in_order(seed: int | None) -> Iterator[None]:
    before, HostEngine.stream_seed = HostEngine.stream_seed, seed
    try:
        yield
    finally:
        HostEngine.stream_seed = before


@contextmanager
def on_streams(streams: Sequence[int]) -> Iterator[None]:
    """The first nodes of every piece on the given streams, the others on stream 0."""

    def schedule(before: Sequence[Collection[int]], weights: Sequence[int], side_streams: int) -> tuple[int, ...]:
        return tuple((*streams, *[0] * len(before))[: len(before)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ASSIGN_STREAMS, "schedule", schedule)
        yield
