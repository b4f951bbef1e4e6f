"""Every test starts with an empty Dynamo cache, counters at zero and the ops registered by the package alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from case_helpers import Setup

import dsv4_compile
from dsv4_compile.ops import registry

# Tensors here are tiny: more threads only wait for each other, and on a busy machine for long.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long version of the property tests")
    parser.addoption(
        "--piece-compiler",
        choices=("eager", "aot_eager", "inductor"),
        default="eager",
        help="with which piece compiler the numbered cases and the property tests run",
    )


@pytest.fixture
def setup(request: pytest.FixtureRequest) -> Setup:
    """The setup of a numbered case, with the piece compiler of the command line unless it has its own."""
    given: Setup = request.param
    return replace(given, piece_compiler=given.piece_compiler or request.config.getoption("--piece-compiler"))


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
