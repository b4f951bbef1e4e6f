"""Every test starts with an empty Dynamo cache, counters at zero and the ops registered by the package alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dsv4_compile
from dsv4_compile.ops import registry

# Tensors here are tiny: more threads only wait for each other, and on a busy machine for long.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long version of the property tests")


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    torch._dynamo.reset()
    dsv4_compile.counters.reset()
    registered = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(registered)
