"""What the other ranks do when one is killed in a step, raises in an eager op, or captures other buckets."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hooks import HOOK, set_hook

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.errors import CollectiveError, Dsv4Error

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed"),
]

if dist.is_available():
    import torch.distributed._functional_collectives as fc
    from processes import in_processes, values_of

TIMEOUT = 5.0  # seconds that a rank waits for the other one, once both have come as far


def step(x: torch.Tensor) -> torch.Tensor:
    """A collective, an eager op that a test may make fail, and another collective."""
    total = fc.all_reduce(x * 2, "sum", dist.group.WORLD)
    out = torch.empty_like(total)
    torch.ops.toy.hook(total, out)
    return fc.all_reduce(out + 1, "sum", dist.group.WORLD)


def compiled_step() -> Any:
    set_hook(lambda x: x)
    return torch.compile(step, backend="dsv4_piecewise", dynamic=True, options=HOOK)


def outcome(call: Callable[[], object]) -> tuple[str, str, float]:
    """What a call raised, and after how many seconds."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error).partition("\n\n")[0], time.monotonic() - start
    return "", "", time.monotonic() - start


@torch.no_grad()
def rank_one_is_killed(rank: int, warm_calls: int) -> tuple[str, str, float]:
    compiled = compiled_step()
    for _ in range(warm_calls):
        compiled(torch.ones(2))
    if rank == 1:
        set_hook(lambda x: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[arg-type, return-value]
    return outcome(lambda: compiled(torch.ones(2)))


FAILED = r"_c10d_functional::(all_reduce|wait_tensor)\.default of group \S+ failed on rank 0 of 2 \(\S+:\d+ in step: .*"


@pytest.mark.parametrize("warm_calls", [1, 3], ids=["capture", "replay"])
def test_a_rank_that_is_killed_in_a_step(warm_calls: int) -> None:
    survivor, killed = in_processes(rank_one_is_killed, warm_calls)
    assert killed.exitcode == -signal.SIGKILL
    name, message, seconds = survivor.value
    assert name == "CollectiveError"
    assert re.match(FAILED, message)
    assert "Another rank has failed, has ended, or calls other collectives" in message
    assert seconds < 60  # its connection is closed, so this is long before its timeout


@torch.no_grad()
def rank_one_raises(rank: int) -> list[Any]:
    compiled = compiled_step()
    for _ in range(3):
        compiled(torch.ones(2))
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), dist.group.WORLD)
    if rank == 1:
        set_hook(fail)
    found = outcome(lambda: compiled(torch.ones(2)))
    if rank == 1:  # it lives on, so the other one meets the timeout and no closed connection
        time.sleep(TIMEOUT + 2)
    return list(found)


def fail(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such block")


def test_a_rank_that_raises_in_an_eager_op() -> None:
    waiting, failing = values_of(in_processes(rank_one_raises))
    assert failing[:2] == ["ValueError", "no such block"]
    assert failing[2] < TIMEOUT
    assert waiting[0] == "CollectiveError"
    assert re.match(FAILED, waiting[1])
    assert f"init_process_group(timeout=...), {TIMEOUT:g} s here" in waiting[1]
    assert TIMEOUT / 2 < waiting[2] < TIMEOUT + 20


@torch.no_grad()
def captures(rank: int) -> dict[str, Any]:
    """What ranks with these sizes, and inputs of them, come to; whatever was refused, they are in step afterwards."""
    found = {}
    for case, sizes in {"sizes": [8, 2], "bad": "8", "inputs": [8, 4], "same": [8, 4]}.items():
        torch._dynamo.reset()
        counters.reset()
        compiled = compiled_step()

        def inputs_for(size: int, fails: bool = case == "inputs") -> tuple[torch.Tensor]:
            if fails and rank == 1 and size == 4:
                raise KeyError("no table")
            return (torch.ones(size),)

        own: Any = [4, 8, 4] if rank == 0 else sizes
        name, message, _ = outcome(partial(dsv4_compile.capture, compiled, inputs_for, own, group=dist.group.WORLD))
        found[case] = name, message, compiled(torch.ones(8)).tolist()[0], counters.captures
    found["replans"] = refuses_on_rank_one(rank)
    return found


def test_what_ranks_capture_ahead() -> None:
    first, second = values_of(in_processes(captures))
    message = (
        "capture: the ranks of the group differ in the sizes to capture. rank 0: [8, 4]; rank 1: [8, 2]. Give all "
        "ranks the same"
    )
    assert first["sizes"] == second["sizes"] == ("ArgumentError", message, 10.0, 0)
    bad = "capture: sizes has '8'; a token count is an integer of at least 1"
    assert second["bad"] == ("ArgumentError", bad, 10.0, 0)
    told = f"capture: an argument failed on another rank of the group. rank 1: ArgumentError: {bad}"
    assert first["bad"] == ("CaptureError", told, 10.0, 0)
    assert second["inputs"] == ("KeyError", "'no table'", 10.0, 1)
    told = "capture: inputs_for(4) failed on another rank of the group. rank 1: KeyError: 'no table'"
    assert first["inputs"] == ("CaptureError", told, 10.0, 1)
    assert first["same"] == second["same"] == ("", "", 10.0, 2)
    assert (first["replans"], second["replans"]) == ([0, 2], [1, 2])


def refuses_on_rank_one(rank: int) -> list[int]:
    """Only the capture of rank 1 shows that an op has to be eager, so that rank plans and calls again."""
    library = torch.library.Library("faults", "FRAGMENT")
    library.define("reads(Tensor x, Tensor(a!) out) -> ()")

    def reads(x: torch.Tensor, out: torch.Tensor) -> None:
        if rank == 1:
            x.sum().item()
        out.copy_(x)

    library.impl("reads", reads, "CompositeExplicitAutograd")
    torch.library.register_fake("faults::reads", lambda x, out: None, lib=library)

    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.faults.reads(x, out)
        return fc.all_reduce(out, "sum", dist.group.WORLD)

    counters.reset()
    compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True)
    dsv4_compile.capture(compiled, lambda size: (torch.ones(size),), [4, 8], group=dist.group.WORLD)
    with torch.no_grad(), counters.expect(replays=1):
        assert compiled(torch.ones(4)).tolist() == [2.0] * 4
    return [counters.replans, counters.captures]


def test_the_errors_are_of_the_package() -> None:
    assert issubclass(CollectiveError, Dsv4Error)
