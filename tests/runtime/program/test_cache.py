"""Entries go when what they were captured with dies, also while another entry is looked at."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime_helpers import compile_host

from dsv4_compile.runtime import captured
from dsv4_compile.runtime.program.cache import STALE_BUCKETS, CachedProgram, ProgramCache


class Weight:
    """A tensor as far as entries look at one; it may do something while they do."""

    def __init__(self, when_looked_at: Callable[[], Any] = lambda: None) -> None:
        self._when_looked_at = when_looked_at

    def data_ptr(self) -> int:
        self._when_looked_at()
        return 1


class Watched(tuple[int, ...]):
    """A bucket that does something when it is compared."""

    when_compared: Callable[[], Any] = staticmethod(lambda: None)
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        self.when_compared()
        return tuple.__eq__(self, other)


def entry(bucket: tuple[int, ...]) -> CachedProgram:
    nothing: Any = None
    return CachedProgram(nothing, nothing, bucket, (1,))


def test_a_weight_that_dies_while_another_is_looked_at() -> None:
    entries, others = ProgramCache(), [Weight()]
    first: Any = Weight(others.clear)
    second: Any = others[0]
    entries.add(("first", ()), entry((1,)), [first])
    entries.add(("second", ()), entry((2,)), [second])
    del second
    entries.drop_moved([first])
    assert entries.buckets((1,)) == {(1,)}


def test_a_weight_that_dies_while_buckets_are_compared() -> None:
    entries, others = ProgramCache(), [Weight()]
    bucket = Watched((1,))
    bucket.when_compared = others.clear
    first: Any = Weight()
    second: Any = others[0]
    entries.add(("first", ()), entry(bucket), [first])
    entries.add(("second", ()), entry((2,)), [second])
    del second
    assert entries.drop_oldest((3,), (1,)) == []
    assert entries.buckets((1,)) == {bucket}


def test_buckets_whose_entries_went_are_not_remembered_without_end() -> None:
    """A float among the arguments makes new buckets in every call."""
    entries = ProgramCache()
    for number in range(3 * STALE_BUCKETS):
        weight: Any = Weight()
        entries.add((number, ()), entry((number,)), [weight])
        del weight
    assert entries.buckets((1,)) == set()
    assert len(entries._stale) <= STALE_BUCKETS + 1


def test_the_loop_over_all_callables_sees_none_that_is_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python refuses to go on with a set that grew: whoever adds one waits for whoever lists them."""
    held: list[bool] = []

    class Watching(weakref.WeakSet[Any]):
        def add(self, item: Any) -> None:
            held.append(captured._live_lock.locked())
            super().add(item)

        def __iter__(self) -> Any:
            held.append(captured._live_lock.locked())
            return super().__iter__()

    monkeypatch.setattr(captured, "_live", Watching())
    run = compile_host(lambda x: torch.ops.toy.fresh(x + 1) * 2)
    with torch.no_grad():
        run(torch.ones(3, 4))
    assert held == [True]
    captured.release_all()
    assert held == [True, True]
