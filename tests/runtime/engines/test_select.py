"""One engine for each real device, however it is named; asked of devices that need not be there."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dsv4_compile.runtime.engines import select
from dsv4_compile.runtime.engines.cuda import engine as cuda
from dsv4_compile.runtime.engines.select import engine_for


class Made:
    """Stands for `CudaEngine`, which needs a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


@pytest.fixture(autouse=True)
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of the current CUDA device; no engine that was made here stays."""
    number = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: number[0])
    monkeypatch.setattr(cuda, "CudaEngine", Made)
    monkeypatch.setattr(select, "_make_engine", cache(select._make_engine.__wrapped__))
    return number


def test_a_device_without_an_index_is_the_current_one(current: list[int]) -> None:
    first: Any = engine_for("auto", torch.device("cuda"))
    assert first.device == torch.device("cuda", 0)
    assert engine_for("cuda", torch.device("cuda:0")) is first
    current[0] = 1
    second: Any = engine_for("cuda", torch.device("cuda"))
    assert second.device == torch.device("cuda", 1)
    assert engine_for("auto", torch.device("cuda:1")) is second
    assert engine_for("auto", torch.device("cuda:0")) is first


def test_there_is_one_cpu() -> None:
    assert engine_for("auto", torch.device("cpu", 0)) is engine_for("host", torch.device("cpu"))
