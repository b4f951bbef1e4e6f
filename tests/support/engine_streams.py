"""One small example for each rule of streams, as a function of an engine; see `engine_examples.py`."""

import torch
from engine_tools import capture, register_into, tensor

from dsv4_compile.runtime.engines.capture_state import current_streams

EXAMPLES = {}
example = register_into(EXAMPLES)
SIDE_STREAMS = 2


def capture_on_streams(engine, run, pool=None):
    return engine.capture(run, pool or engine.make_pool(), name="the example", streams=SIDE_STREAMS)


def branch_and_join(work, main_work):
    """Give each function of `work` to a side stream, beside `main_work` on stream 0."""
    streams = current_streams()
    start = streams.record(0)
    kept = []
    for stream, run in enumerate(work, 1):
        streams.wait(stream, start)
        with streams.on(stream):
            kept.append(run())
    kept.append(main_work())
    for stream in range(1, len(work) + 1):
        streams.wait(0, streams.record(stream))
    return kept


@example
def streams_are_offered_to_a_capture_that_asks_for_them_and_to_nobody_else(engine):
    x, offered = tensor(engine, 1, 2), []
    run = lambda: offered.append(current_streams()) or x.add_(1)  # noqa: E731
    run()
    capture(engine, run)
    engine.warm_up(run)
    capture_on_streams(engine, run)
    run()
    assert [streams is not None for streams in offered] == [False, False, False, True, False]


@example
def a_replay_runs_the_work_of_all_streams(engine):
    x, out = tensor(engine, 1, 2), tensor(engine, 0, 0)

    def run():
        doubled = x * 2
        first, second, third = branch_and_join([lambda: doubled + 1, lambda: doubled + 10], lambda: doubled + 100)
        out.copy_(first + second + third)

    graph = capture_on_streams(engine, run)
    assert out.tolist() == [0, 0]
    for value in (1.0, 5.0, -3.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [6 * value + 111] * 2


@example
def the_next_graph_sees_the_work_of_all_streams(engine):
    x, sides, out = tensor(engine, 1, 2), [tensor(engine, 0, 0) for _ in range(2)], tensor(engine, 0, 0)
    many = torch.ones(256, 256, device=x.device)

    def slowly_fill(side):
        value = many
        for _ in range(20):
            value = (value @ many) / 256
        side.copy_(value[0, :2] * x)

    def run():
        branch_and_join([lambda side=side: slowly_fill(side) for side in sides], out.zero_)

    pool = engine.make_pool()
    first = capture_on_streams(engine, run, pool)
    second = capture(engine, lambda: out.copy_(sides[0] + sides[1]), pool)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        first.replay()
        second.replay()
        assert out.tolist() == [2 * value] * 2


@example
def a_stream_does_not_get_memory_that_another_stream_still_uses(engine):
    """Temporaries die as soon as they are made; both streams want blocks of one size."""
    x, sides = tensor(engine, *range(64)), [torch.zeros_like(tensor(engine, *range(64))) for _ in range(2)]

    def run():
        def work(side, amount):
            value = x
            for _ in range(10):
                value = value * 1.0 + amount
            side.copy_(value)

        branch_and_join([lambda: work(sides[0], 1), lambda: work(sides[1], 2)], lambda: None)

    graph = capture_on_streams(engine, run)
    for _ in range(20):
        graph.replay()
        assert [side.tolist() for side in sides] == [(x + 10).tolist(), (x + 20).tolist()]


@example
def two_graphs_use_the_same_streams(engine):
    """Each has events of its own."""
    x, outs, pool = tensor(engine, 1, 2), [tensor(engine, 0, 0) for _ in range(2)], engine.make_pool()

    def run(out, amount):
        first, second, _ = branch_and_join([lambda: x + amount, lambda: x * amount], lambda: None)
        out.copy_(first + second)

    graphs = [capture_on_streams(engine, lambda out=out, n=n: run(out, n), pool) for n, out in enumerate(outs, 2)]
    for graph in (graphs[0], graphs[1], graphs[1], graphs[0]):
        graph.replay()
    assert [out.tolist() for out in outs] == [[1 + 2 + 2, 2 + 2 + 4], [1 + 3 + 3, 2 + 3 + 6]]


@example
def a_warm_up_on_streams_runs_the_work(engine):
    x, out = tensor(engine, 1, 2), tensor(engine, 0, 0)

    def run():
        if current_streams() is None:  # an engine may warm up in order
            out.copy_(x + 1)
        else:
            (first, _) = branch_and_join([lambda: x + 1], lambda: None)
            out.copy_(first)

    engine.warm_up(run, streams=SIDE_STREAMS)
    assert out.tolist() == [2, 3]
