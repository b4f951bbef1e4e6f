"""Every test starts with an empty Dynamo cache, counters at zero and the ops registered by the package alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import torch

import dsv4_compile
from dsv4_compile.ops import registry

# Tensors here are tiny: more threads only wait for each other, and on a busy machine for long.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long version of the property tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        missing = pytest.mark.skip(reason="no C++ compiler: set CXX, or install g++")
        for item in items:
            if item.get_closest_marker("inductor"):
                item.add_marker(missing)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    torch._dynamo.reset()
    dsv4_compile.counters.reset()
    registered = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(registered)
