"""Every test starts with an empty Dynamo cache, counters at zero and the ops registered by the package alone."""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch._dynamo.guards
from case_helpers import Setup
from hypothesis import HealthCheck, settings

import dsv4_compile
from dsv4_compile.ops import registry

# Tensors here are tiny: more threads only wait for each other, and on a busy machine for long.
torch.set_num_threads(1)
# Nor is any example of a test to be quick: on a busy machine one of a millisecond took 0.3 s.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# Dynamo measures each set of guards that it makes, for a log, and flushes the caches of the processor for that: 26 ms.
torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0
# Where tests compare with plain `torch.compile`, its C++ on disk is not that of a run with other vector instructions.
torch.compiler.config.cache_key_tag = torch.backends.cpu.get_cpu_capability()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call() -> Iterator[None]:
    """Without pytest's handlers on torch's structured trace, which is written in full as soon as it has any."""
    logging.getLogger("torch.__trace").handlers.clear()
    return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--places", type=int, default=100, help="at how many places the exhaustive test interrupts a call")
    parser.addoption("--programs", type=int, default=150, help="how many programs the long property test draws")
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


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_all_but_a_sample(items)
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        missing = pytest.mark.skip(reason="no C++ compiler: set CXX, or install g++")
        for item in items:
            if item.get_closest_marker("inductor"):
                item.add_marker(missing)


def mark_all_but_a_sample(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(k)`, each k-th of its cases runs always, and the others with `-m exhaustive`.

    The cases of a product are numbered with the last parameter running fastest, so a step that shares no factor with
    its length meets every value of every parameter.
    """
    numbers: Counter[str] = Counter()
    for item in items:
        given = (
            item.callspec.params.get("setup")
            if isinstance(item, pytest.Function) and hasattr(item, "callspec")
            else None
        )
        if isinstance(given, Setup) and given.engine == "off":
            # where nothing is captured, little can go wrong: one case in four, under the old runner
            if given.runner == "mrv2" or numbers["engine off"] % 4:
                item.add_marker(pytest.mark.exhaustive)
            numbers["engine off"] += given.runner == "mrv1"
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            name = item.nodeid.partition("[")[0]
            if numbers[name] % marker.args[0]:
                item.add_marker(pytest.mark.exhaustive)
            numbers[name] += 1


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[object]:
    """A test marked `own_thread` runs in one: what it leaves in the state of its thread goes with it."""
    if pyfuncitem.get_closest_marker("own_thread") is not None:
        test = pyfuncitem.obj

        @functools.wraps(test)
        def in_thread(**arguments: object) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(test, **arguments).result()

        pyfuncitem.obj = in_thread
    return (yield)


@pytest.fixture(scope="module", autouse=True)
def young_heap() -> None:
    """A collection looks through what the tests of this file made, and not each time through all that was imported."""
    torch._dynamo.reset()  # or what the file before compiled would be kept for ever
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    torch._dynamo.reset()
    dsv4_compile.counters.reset()
    registered = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(registered)
