"""What is kept of results is right for every later call: nothing that a layout depends on is left out of the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.runtime.engines.host import meta_cache, recorder
from dsv4_compile.runtime.engines.host.engine import HostEngine


def replayed(engine: HostEngine, fn: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """What a captured call of a function gives."""
    expected = fn(*args)
    out = torch.empty_like(expected)
    engine.capture(lambda: out.copy_(fn(*args)), engine.make_pool(), name="the example").replay()
    return out


@contextmanager
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the ops whose meta kernels were run."""
    names: list[str] = []
    original = recorder.MetaArguments

    class Watched(original):  # type: ignore[misc, valid-type]
        def of(self, values: Any) -> Any:
            names.append("asked")
            return super().of(values)

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "MetaArguments", Watched)
        yield names


PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "an int and a float": (lambda i, f: i * 2, lambda i, f: i * 2.0),
    "a bool and an int": (lambda i, f: (f > 0) + True, lambda i, f: (f > 0) + 1),
    "the dim of a sum": (lambda i, f: f.sum(0), lambda i, f: f.sum(1)),
    "strides": (lambda i, f: f + 1, lambda i, f: f.t() + 1),
    "shapes": (lambda i, f: f[:2] + 1, lambda i, f: f[:3] + 1),
    "dtypes": (lambda i, f: i + i, lambda i, f: f + f),
    "an argument by name": (
        lambda i, f: torch.empty_like(f).fill_(1),
        lambda i, f: torch.zeros_like(f, dtype=torch.int),
    ),
    "a memory format": (
        lambda i, f: f.reshape(1, 2, 3, 4).clone(),
        lambda i, f: f.reshape(1, 2, 3, 4).clone(memory_format=torch.channels_last),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_calls_that_differ_are_told_apart(pair: str) -> None:
    engine = HostEngine()
    args = torch.arange(24).reshape(6, 4), torch.randn(6, 4)
    for fn in (*PAIRS[pair], *PAIRS[pair]):
        expected = fn(*args)
        result = replayed(engine, fn, *args)
        assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
        assert torch.equal(result, expected)


def test_global_settings_are_part_of_the_key() -> None:
    engine, x = HostEngine(), torch.arange(4)
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert replayed(engine, lambda x: x / 3, x).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_question_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, x, w = HostEngine(), torch.randn(5, 4), torch.randn(4, 4)

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu_().add_(1)

    with asked(monkeypatch) as first:
        replayed(engine, layer, x, w)
    assert first
    with asked(monkeypatch) as second:
        assert torch.equal(replayed(engine, layer, x, w), layer(x, w))
        assert torch.equal(replayed(engine, layer, x + 1, w), layer(x + 1, w))
    assert second == []


def test_ops_of_others_are_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their fakes may look at anything, and do so here."""
    width = [4]
    with torch.library._scoped_library("fickle", "DEF") as library:
        library.define("rows(Tensor x) -> Tensor")
        library.impl("rows", lambda x: x.new_ones(x.shape[0], width[0]), "CompositeExplicitAutograd")
        library.impl("rows", lambda x: x.new_empty(x.shape[0], width[0]), "Meta")
        engine, x = HostEngine(), torch.randn(3, 2)
        for width[0] in (4, 5, 4):
            assert replayed(engine, torch.ops.fickle.rows, x).shape == (3, width[0])


def test_an_output_that_is_resized_is_resized_each_time() -> None:
    engine, x = HostEngine(), torch.randn(5)

    def fn(x: Tensor) -> Tensor:
        return torch.add(x, 1, out=torch.empty(0))

    for _ in range(3):
        assert torch.equal(replayed(engine, fn, x), x + 1)


def test_what_is_kept_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_cache, "MOST", 8)
    engine, x = HostEngine(), torch.randn(3)
    for number in range(40):
        assert torch.equal(replayed(engine, lambda x, number=number: x + number, x), x + number)
    assert len(engine._meta_cache._known) <= 8
