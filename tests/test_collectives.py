"""Collectives run on the host, once a call, in the order of the program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from decode_ops import decode, register
from eager_twin import check_calls, compile_piecewise
from processes import free_port, gloo_group, in_processes, values_of

import dsv4_compile
from dsv4_compile import counters, uniform_decode
from dsv4_compile.errors import CollectiveError, FullGraphError
from dsv4_compile.graph import collective_call
from dsv4_compile.graph.collective_call import CollectiveCall

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*single:FutureWarning"),  # of 2.13, new in it
]


@pytest.fixture
def group() -> Iterator[None]:
    with gloo_group(0, 1, free_port()):
        yield


def all_reduce(x):
    return fc.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def all_reduce_in_place(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def all_reduce_of_an_input(x):
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x * 2


def all_gather(x):
    out = torch.empty(dist.get_world_size() * 4)
    dist.all_gather_into_tensor(out, x * 2)
    return out + 1


def all_gather_list(x):
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x * 2)
    return out[0] + 1, out[-1]


def reduce_scatter(x):
    return fc.reduce_scatter_tensor(x + 1, "sum", 0, dist.group.WORLD) * 2


def all_to_all(x):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x * 2)
    return out + 1


def broadcast_and_permute(x):
    size = dist.get_world_size()
    return fc.broadcast(x * 2, 0, dist.group.WORLD) + fc.permute_tensor(x, list(range(size)), dist.group.WORLD)


def coalesced(x):
    a, b = fc.all_reduce_coalesced([x * 2, x + 1], "sum", dist.group.WORLD)
    return a + b, b


def waited_for_late(x):
    started = torch.ops._c10d_functional.all_reduce(x * 2, "sum", dist.group.WORLD.group_name)
    other = x @ x
    result = torch.ops._c10d_functional.wait_tensor(started)
    result.add_(1)
    return started * 2 + other, result


def in_place_and_waited_for_late(x):
    y = x * 2
    torch.ops._c10d_functional.all_reduce_(y, "sum", dist.group.WORLD.group_name)
    other = x @ x
    torch.ops._c10d_functional.wait_tensor(y)
    return y + other


PROGRAMS = [
    all_reduce,
    all_reduce_in_place,
    all_reduce_of_an_input,
    all_gather,
    all_gather_list,
    reduce_scatter,
    all_to_all,
    broadcast_and_permute,
    coalesced,
    waited_for_late,
    in_place_and_waited_for_late,
]
OPTIONS = [{}, {"region": "minimal", "runner": "mrv1"}, {"engine": "off"}]


def calls(rank: int = 0) -> list[tuple[torch.Tensor]]:
    return [(torch.arange(4.0) + number + 10 * rank,) for number in range(4)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_process(group, program, options):
    check_calls(program, calls(), **options)


def in_two(rank: int) -> None:
    for program in PROGRAMS:
        check_calls(program, calls(rank), region="minimal")
        torch._dynamo.reset()


@pytest.mark.exhaustive
def test_two_processes():
    values_of(in_processes(in_two))


def test_each_runs_once_a_call_in_program_order(group):
    def f(x):
        a = fc.all_reduce(x * 2, "sum", dist.group.WORLD)
        b = fc.all_gather_tensor(x + 1, 0, dist.group.WORLD)
        return a, b, fc.all_reduce(a * b, "max", dist.group.WORLD)

    compiled = compile_piecewise(f, region="minimal")
    for number in range(4):
        with counters.expect(eager_op_calls=6), torch.profiler.profile() as profile:
            compiled(torch.arange(4.0) + number)
        starts = sorted((e for e in profile.events() if e.name.startswith("c10d::")), key=lambda e: e.time_range.start)
        kinds = [event.name.replace("_", "").partition("::")[2][:9] for event in starts]
        assert kinds == ["allreduce", "allgather", "allreduce"]


def test_the_plan_says_why(group):
    plan = dsv4_compile.explain(all_reduce, torch.ones(4))
    reasons = {op.op: op.reason for unit in plan.regions for op in unit.ops}
    assert reasons == {
        "_c10d_functional::all_reduce": "a collective runs on the host here",
        "_c10d_functional::wait_tensor": "a collective runs on the host here",
    }


def test_a_result_is_waited_for_before_it_is_copied(group):
    plan = dsv4_compile.explain(waited_for_late, torch.ones(4))
    assert [[op.name for op in unit.ops] for unit in plan.regions] == [
        ["_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"]
    ]


def test_a_collective_that_another_graph_started_is_not_captured(group):
    def f(x):
        return torch.ops._c10d_functional.wait_tensor(x) * 2

    compiled = compile_piecewise(f)
    for number in range(3):
        started = torch.ops._c10d_functional.all_reduce(torch.ones(4) + number, "sum", dist.group.WORLD.group_name)
        assert torch.equal(compiled(started), (torch.ones(4) + number) * 2)
    assert counters.captures == 0


def test_a_collective_keeps_a_decode_step_in_pieces(group):
    """It runs on the host, so there is no graph of the whole step; asked for by name, that is an error."""
    register()

    def step(x):
        out = torch.empty_like(x)
        decode.fill(x, out)
        return fc.all_reduce(out, "sum", dist.group.WORLD) + 1

    compiled = compile_piecewise(step)
    with torch.no_grad(), uniform_decode(), counters.expect(full_replays=0, replays=2):
        for _ in range(3):
            x = torch.randn(4, 8)
            assert torch.equal(compiled(x), 2 * x + 1)
    with pytest.raises(FullGraphError, match="a collective runs on the host here"):
        dsv4_compile.explain(step, torch.randn(4, 8), options={"decode": "full"})


@torch.no_grad()
def in_phases(rank: int) -> list[float]:
    """One rank warms up, captures or is compiled anew while the other replays; all make the same calls."""

    def f(x):
        return fc.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    compiled = compile_piecewise(f)
    seen = []
    for number in range(12):
        if number in (3, 4, 8) and rank == number % 2:
            torch._dynamo.reset()  # its next two calls are a warm-up and a capture
        if number == 6 and rank == 1:
            compiled = compile_piecewise(f, region="minimal", check="full")
        seen.append(compiled(torch.full((2,), float(number + rank)))[0].item())
    return seen


@pytest.mark.exhaustive
def test_ranks_may_be_in_different_phases():
    expected = [2.0 * (2 * number + 1) + 1 for number in range(12)]
    assert values_of(in_processes(in_phases)) == [expected, expected]


def test_with_a_full_check_each_runs_once_all_the_same(group):
    compiled = compile_piecewise(all_reduce, check="full")
    for number in range(3):
        with torch.profiler.profile() as profile:
            compiled(torch.arange(4.0) + number)
        assert sum(event.name.startswith("c10d::allreduce") for event in profile.events()) == 1


def raised(function: Callable[[], object]) -> CollectiveError:
    with torch.no_grad(), pytest.raises(CollectiveError) as caught:
        function()
    return caught.value


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_that_fails_says_which_it_is_and_where(group, options, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4\nmore")

    compiled = compile_piecewise(all_reduce, **options)
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(CollectiveCall, "op", property(lambda call: fail, lambda call, op: None), raising=False)
            patch.setattr(collective_call, "op_name", lambda op: "_c10d_functional::all_reduce.default")
            message = str(raised(lambda: compiled(torch.arange(4.0)))).partition("\n\n")[0]
        assert re.fullmatch(
            r"_c10d_functional::all_reduce.default of group \S+ failed on rank 0 of 1 "
            r"\(\S+test_collectives.py:\d+ in all_reduce: return fc.all_reduce\(.*\) \+ 1\): "
            r"RuntimeError: Connection closed by peer \[127.0.0.1\]:4. Another rank has failed, has ended, or calls "
            r"other collectives than this one: look at what the others say first. A rank waits for the others as long "
            r"as its process group does \(init_process_group\(timeout=...\), 120 s here\)",
            message,
        )
        assert torch.equal(compiled(torch.arange(4.0)), torch.arange(4.0) * 2 + 1)
