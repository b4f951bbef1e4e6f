"""Collectives run on the host, once a call, in the order of the program."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from decode_ops import decode, register
from eager_twin import check_calls, compile_piecewise

import dsv4_compile
from dsv4_compile import counters, uniform_decode
from dsv4_compile.errors import FullGraphError

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*single:FutureWarning"),  # of 2.13, new in it
]


def start(rank: int, size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def group() -> Iterator[None]:
    start(0, 1, free_port())
    yield
    dist.destroy_process_group()


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


def in_a_process(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    start(rank, size, port)
    for program in PROGRAMS:
        check_calls(program, calls(rank), region="minimal")
    dist.destroy_process_group()


@pytest.mark.exhaustive
def test_two_processes():
    context = torch.multiprocessing.get_context("spawn")
    port = free_port()
    processes = [context.Process(target=in_a_process, args=(rank, 2, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]


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
