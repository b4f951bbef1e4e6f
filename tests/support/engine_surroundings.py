"""One small example for each rule about what surrounds a capture, as a function of an engine; see `engine_examples`."""

import functools
import gc
import itertools
import threading
import warnings

import pytest
import torch
from engine_tools import capture, device_of, random_state, refusal_of, register_into, tensor

from dsv4_compile.runtime.engines.capture_state import is_capturing

EXAMPLES = {}
example = register_into(EXAMPLES)


@example
def garbage_is_not_collected_while_recording(engine):
    x, out, seen = tensor(engine, 1, 2), tensor(engine, 0, 0), []
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        capture(engine, lambda: (make_cycle(seen), [[] for _ in range(5000)], out.copy_(x)))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert seen == [False]


class _Finalised:
    def __init__(self, seen):
        self.seen, self.itself = seen, self

    def __del__(self):
        self.seen.append(is_capturing())


def make_cycle(seen):
    _Finalised(seen)


@example
def garbage_collection_is_left_as_it_was(engine):
    x, out = tensor(engine, 1, 2), tensor(engine, 0, 0)
    assert gc.isenabled()
    capture(engine, lambda: out.copy_(x))
    assert gc.isenabled()
    gc.disable()
    try:
        capture(engine, lambda: out.copy_(x))
        assert not gc.isenabled()
    finally:
        gc.enable()


@example
def an_exception_leaves_nothing_half_made(engine):
    x, out, pool, modes = tensor(engine, 1, 2), tensor(engine, 0, 0), engine.make_pool(), modes_of(engine)

    def fail():
        out.copy_(x * 2)
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        capture(engine, fail, pool)
    assert modes_of(engine) == modes
    assert not is_capturing()
    capture(engine, lambda: out.copy_(x * 3), pool).replay()
    assert out.tolist() == [3, 6]


def modes_of(engine):
    modes = (
        gc.isenabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
    )
    return modes, random_state(engine).tolist()


@example
def only_the_recording_thread_is_capturing(engine):
    x, out, seen = tensor(engine, 1, 2), tensor(engine, 0, 0), []
    in_thread = lambda: call_in_thread(lambda: seen.append(is_capturing()))  # noqa: E731
    capture(engine, lambda: (seen.append(is_capturing()), in_thread(), out.copy_(x)))
    assert [*seen, is_capturing()] == [True, False, False]


def call_in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@example
def a_capture_inside_a_capture_is_refused(engine):
    x, out = tensor(engine, 1, 2), tensor(engine, 0, 0)
    inner = lambda: engine.capture(lambda: out.copy_(x), engine.make_pool(), name="the inner one")  # noqa: E731
    message = refusal_of(lambda: capture(engine, lambda: (out.mul_(x), inner())))
    assert "cannot capture the inner one: this thread is recording the example" in message
    assert not is_capturing()


@example
def captures_of_two_threads_exclude_each_other(engine):
    x, active, overlaps = tensor(engine, 1, 2), [], []
    outs = [tensor(engine, 0, 0) for _ in range(2)]
    ready = threading.Barrier(2)

    def record(out):
        ready.wait()
        graphs.append(capture(engine, lambda: run(out)))

    def run(out):
        active.append(out)
        threading.Event().wait(0.05)
        overlaps.append(len(active))
        out.copy_(x * 2)
        active.pop()

    graphs = []
    threads = [threading.Thread(target=record, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for graph in graphs:
        graph.replay()
    assert (overlaps, [out.tolist() for out in outs]) == ([1, 1], [[2, 4], [2, 4]])


@example
def a_graph_replays_in_any_mode(engine):
    modes = (torch.no_grad, torch.inference_mode, torch.enable_grad)
    for recorded, replayed in itertools.product(modes, modes):
        out = engine.allocate(8, device_of(engine)).view(torch.float32)
        with recorded():
            x, weight = tensor(engine, 1, 2), torch.nn.Parameter(tensor(engine, 2, 2))
            graph = capture(engine, functools.partial(count_and_scale, x, weight, out))
        with replayed():
            graph.replay()
        assert (x.tolist(), out.tolist(), out.requires_grad) == ([2, 3], [4, 6], False)


def count_and_scale(x, weight, out):
    x.add_(1)  # an inference tensor at times: the graph does not care
    out.copy_((x.view(1, 2).t().reshape(2) * weight).relu_().to(torch.float64))


@example
def copies_that_look_like_views_are_recorded(engine):
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x, out = tensor(engine, 1, 2, 3, 4).view(2, 2), tensor(engine, 0, 0, 0, 0)
            graph = capture(engine, lambda x=x, out=out: out.copy_(x.t().reshape(4)))
            x.copy_(tensor(engine, 5, 6, 7, 8).view(2, 2))
            graph.replay()
        assert out.tolist() == [5, 7, 6, 8]


@example
def autocast_is_recorded_and_not_applied_twice(engine):
    device = device_of(engine)
    x, out = torch.full((1, 2, 2), 1.001, device=device), torch.zeros(2, 2, device=device)
    for recorded, replayed in ((True, True), (False, True), (True, False)):
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=recorded):
            expected = torch.addbmm(x[0], x, x).float()
            graph = capture(engine, lambda: out.copy_(torch.addbmm(x[0], x, x)))
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=replayed):
            graph.replay()
        assert torch.equal(out, expected)


@example
def autocast_keeps_no_cast_of_a_recording(engine):
    weight = torch.nn.Parameter(torch.eye(2, device=device_of(engine)))
    x, out = torch.ones(2, 2, device=device_of(engine)), torch.zeros(2, 2, device=device_of(engine))
    with torch.autocast(x.device.type, torch.bfloat16):
        graph = capture(engine, lambda: out.copy_(torch.mm(x, weight)))
        with torch.no_grad():
            assert torch.mm(x, weight).tolist() == [[1, 1], [1, 1]]
            weight.mul_(2)
    graph.replay()
    assert out.tolist() == [[2, 2], [2, 2]]


@example
def allocated_memory_is_aligned_poisoned_and_writable_in_any_mode(engine):
    with torch.inference_mode():
        memory = engine.allocate(1000, device_of(engine))
    assert (memory.dtype, memory.shape, memory.data_ptr() % 256) == (torch.uint8, (1000,), 0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert memory.view(dtype).isnan().all()
    assert (memory[:992].view(torch.int64) > 1 << 48).all()
    assert (memory.view(torch.int32) > 1 << 24).all()
    assert not memory.is_inference()
    memory.zero_()
    assert not memory.any()


@example
def a_released_graph_refuses_to_replay(engine):
    x, out = tensor(engine, 1, 2), tensor(engine, 0, 0)
    graph = capture(engine, lambda: out.copy_(x))
    replay = graph.replay
    graph.release()
    graph.release()
    for call in (replay, graph.replay):
        assert "the example was replayed after its release" in refusal_of(call)
    assert out.tolist() == [0, 0]


@example
def a_graph_without_kernels_is_warned_about(engine):
    x = tensor(engine, 1, 2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        capture(engine, lambda: x.view(1, 2))
    assert any("is empty" in str(warning.message) for warning in seen)


@example
def warming_up_runs_for_real(engine):
    x, out = tensor(engine, 1, 2), tensor(engine, 0, 0)
    engine.warm_up(lambda: out.copy_(x * 2))
    assert out.tolist() == [2, 4]
