"""The bar of `dsv4_compile.capture`: on request, and only where tqdm is installed."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import dsv4_compile


def capture(progress: bool | None) -> None:
    def layer(x: Tensor) -> Tensor:
        return x.sin() + 1

    compiled = torch.compile(layer, backend="dsv4_piecewise", dynamic=True)
    with dsv4_compile.counters.expect(captures=3):
        dsv4_compile.capture(compiled, lambda size: (torch.ones(size, 4),), [4, 8, 16], progress=progress)


def test_the_bar_counts_buckets(capsys: pytest.CaptureFixture[str]) -> None:
    capture(progress=True)
    shown = capsys.readouterr().err
    assert " 0/3 " in shown
    assert "bucket" in shown


@pytest.mark.parametrize("progress", [False, None])
def test_no_bar_away_from_a_terminal(progress: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    capture(progress)
    assert capsys.readouterr().err == ""


def test_no_bar_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    capture(progress=True)
    assert capsys.readouterr().err == ""
