"""What ranks agree on while buckets are captured ahead; more processes are in tests/test_collective_faults.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.errors import ArgumentError, CaptureError
from dsv4_compile.runtime.agreement import Agreement

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")

if dist.is_available():
    from processes import free_port, gloo_group


@pytest.fixture
def group() -> Iterator[None]:
    with gloo_group(0, 1, free_port()):
        yield


def of_three(monkeypatch: pytest.MonkeyPatch, *others: object) -> Agreement:
    """This rank, and two that answer so."""
    agreement = Agreement(None)
    monkeypatch.setattr(agreement, "_group", object())
    monkeypatch.setattr(agreement, "_gathered", lambda value: [value, *others])
    return agreement


def test_without_a_group_there_is_nobody_to_ask() -> None:
    agreement = Agreement(None)
    agreement.same("anything", [1])
    assert agreement.any(True)
    assert not agreement.any(False)
    assert agreement.all_made("it", lambda: 3) == 3


def test_who_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    of_three(monkeypatch, [1], [1]).same("the sizes to capture", [1])
    with pytest.raises(ArgumentError) as caught:
        of_three(monkeypatch, [2], [1]).same("the sizes to capture", [1])
    assert str(caught.value) == (
        "capture: the ranks of the group differ in the sizes to capture. ranks 0, 2: [1]; rank 1: [2]. Give all ranks "
        "the same"
    )


def test_one_rank_is_enough_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_three(monkeypatch, False, True).any(False)
    assert not of_three(monkeypatch, False, False).any(False)


def test_a_failure_elsewhere_is_told_and_one_of_its_own_passes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    agreement = of_three(monkeypatch, None, "KeyError: 'a'")
    with pytest.raises(CaptureError, match=r"^capture: it failed on another rank of the group\. rank 2: KeyError"):
        agreement.all_made("it", lambda: 3)

    def fail() -> None:
        raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        agreement.all_made("it", fail)


def test_a_group_of_one_captures_as_ever(group: None) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dsv4_piecewise", dynamic=True)
    dsv4_compile.capture(compiled, lambda size: (torch.ones(size, 2),), [3, 5], group=dist.group.WORLD)
    assert counters.captures == 2
