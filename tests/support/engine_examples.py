"""One small example for each rule of recording and replaying, as a function of an engine.

They hold on a GPU and on the host engine alike: the tests of both engines run the same ones.
`engine_surroundings.py` has the rules about threads, modes, exceptions and memory of the caller.
"""

import contextlib

import torch
from engine_tools import capture, device_of, random_state, refusal_of, register_into, tensor

from dsv4_compile.errors import CaptureError
from dsv4_compile.runtime.engines.capture_state import is_capturing

EXAMPLES = {}
example = register_into(EXAMPLES)
CONTEXT = {"scale": None}
_library = torch.library.Library("engine_examples", "DEF")
_library.define("scale_by_context(Tensor x, Tensor(a!) out) -> ()")
_library.impl("scale_by_context", lambda x, out: _scale_by_context(x, out), "CompositeExplicitAutograd")


def _scale_by_context(x, out):
    if CONTEXT["scale"] is not None:
        out.copy_(x * CONTEXT["scale"])


@example
def no_kernel_runs_at_capture(engine):
    x, out = tensor(engine, 1, 2), tensor(engine, 0, 0)
    graph = capture(engine, lambda: out.copy_(x.add_(1)))
    assert (x.tolist(), out.tolist()) == ([1, 2], [0, 0])
    graph.replay()
    assert (x.tolist(), out.tolist()) == ([2, 3], [2, 3])


@example
def a_value_is_not_there_before_the_replay(engine):
    x, out, kept = tensor(engine, 1, 2), tensor(engine, 0, 0), []
    graph = capture(engine, lambda: kept.append(x * 7) or out.copy_(kept[0]))
    assert kept[0].tolist() != [7, 14]
    graph.replay()
    assert kept[0].tolist() == [7, 14]


@example
def host_code_runs_once(engine):
    x, out, calls = tensor(engine, 1, 2), tensor(engine, 0, 0), []
    graph = capture(engine, lambda: calls.append(1) or out.copy_(x))
    for _ in range(3):
        graph.replay()
    assert len(calls) == 1


@example
def branches_are_frozen(engine):
    x, out, double = tensor(engine, 1, 2), tensor(engine, 0, 0), [False]
    graph = capture(engine, lambda: out.copy_(x * 2 if double[0] else x))
    double[0] = True
    graph.replay()
    assert out.tolist() == [1, 2]


@example
def branches_inside_python_ops_are_frozen(engine):
    x, out, scaled = tensor(engine, 1, 2), tensor(engine, 0, 0), tensor(engine, 0, 0)
    run = lambda: (out.copy_(x), torch.ops.engine_examples.scale_by_context(x, scaled))  # noqa: E731
    graph = capture(engine, run)  # there is no context yet, so the op does nothing, and never will
    with scale_in_context(3.0):
        graph.replay()
    assert (out.tolist(), scaled.tolist()) == ([1, 2], [0, 0])


@example
def work_inside_python_ops_is_recorded(engine):
    x, scaled = tensor(engine, 1, 2), tensor(engine, 0, 0)
    with scale_in_context(3.0):
        graph = capture(engine, lambda: torch.ops.engine_examples.scale_by_context(x, scaled))
    with scale_in_context(5.0):
        graph.replay()
    assert scaled.tolist() == [3, 6]


@contextlib.contextmanager
def scale_in_context(scale):
    CONTEXT["scale"] = scale
    try:
        yield
    finally:
        CONTEXT["scale"] = None


@example
def numbers_are_baked(engine):
    x, out, scale = tensor(engine, 1, 2), tensor(engine, 0, 0), [2.0]
    graph = capture(engine, lambda: out.copy_(x * scale[0]))
    scale[0] = 3.0
    graph.replay()
    assert out.tolist() == [2, 4]


@example
def addresses_are_baked(engine):
    inputs, out = [tensor(engine, 1, 2)], tensor(engine, 0, 0)
    first, graph = inputs[0], capture(engine, lambda: out.copy_(inputs[0] + 1))
    inputs[0] = tensor(engine, 7, 7)
    first.copy_(tensor(engine, 3, 4))
    graph.replay()
    assert out.tolist() == [4, 5]


@example
def a_tensor_that_moves_is_not_followed(engine):
    x, out = tensor(engine, 1, 2), tensor(engine, 0, 0)
    before, graph = x.detach(), capture(engine, lambda: out.copy_(x + 1))
    x.data = tensor(engine, 7, 7)
    before.copy_(tensor(engine, 3, 4))
    graph.replay()
    assert out.tolist() == [4, 5]


@example
def later_changes_of_sizes_do_not_matter(engine):
    x, out = tensor(engine, 1, 2, 3, 4).view(2, 2), tensor(engine, 0, 0, 0, 0).view(2, 2)
    graph = capture(engine, lambda: out.copy_(x + 1))
    x.t_()
    out.unsqueeze_(0)
    graph.replay()
    assert out.tolist() == [[[2, 3], [4, 5]]]


@example
def a_mutation_happens_once_per_replay(engine):
    cache, x, slots = tensor(engine, 0, 0, 0), tensor(engine, 5), torch.tensor([1], device=device_of(engine))
    graph = capture(engine, lambda: cache.index_add_(0, slots, x))
    graph.replay()
    slots.fill_(2)
    graph.replay()
    assert cache.tolist() == [0, 5, 5]


@example
def values_read_on_the_host_are_refused(engine):
    x, out = tensor(engine, 1, 2), tensor(engine, 0, 0)
    for read in (torch.Tensor.sum, torch.Tensor.any):
        message = refusal_of(lambda read=read: capture(engine, lambda: out.copy_(x * read(x).item())))
        assert "the example" in message
        assert "engine_examples.py" in message
    refusal_of(lambda: capture(engine, lambda: out.copy_(x if x.any() else -x)))
    refusal_of(lambda: capture(engine, lambda: out.copy_(x * float(torch.equal(x, out)))))


@example
def lists_read_on_the_host_are_refused(engine):
    x, out = tensor(engine, 1, 2), tensor(engine, 0, 0)
    message = refusal_of(lambda: capture(engine, lambda: out.copy_(x * x.tolist()[1])))
    assert "engine_examples.py" in message


@example
def sizes_that_depend_on_data_are_refused(engine):
    x, out = tensor(engine, 1, 2), tensor(engine, 0, 0)
    for select in (lambda: x[x > 1], lambda: x.nonzero(), lambda: x.masked_select(x > 1), lambda: x.unique()):
        refusal_of(lambda select=select: capture(engine, lambda: out.copy_(select()[:1])))


@example
def a_refusal_cannot_be_swallowed(engine):
    x, out = tensor(engine, 1, 2), tensor(engine, 0, 0)

    def run():
        out.copy_(x)
        with contextlib.suppress(CaptureError, RuntimeError):
            out.mul_(x.sum().item())

    refusal_of(lambda: capture(engine, run))


@example
def after_a_refusal_the_next_capture_works(engine):
    x, out, pool = tensor(engine, 1, 2), tensor(engine, 0, 0), engine.make_pool()
    refusal_of(lambda: capture(engine, lambda: out.copy_(x * x.sum().item()), pool))
    assert not is_capturing()
    capture(engine, lambda: out.copy_(x * 2), pool).replay()
    assert out.tolist() == [2, 4]


@example
def dead_temporaries_are_reused_by_the_next_capture(engine):
    x, out, pool, addresses = tensor(engine, 1, 2), tensor(engine, 0, 0), engine.make_pool(), []

    def run():
        temporary = x * 2
        addresses.append(temporary.data_ptr())
        out.copy_(temporary + 1)

    graphs = [capture(engine, run, pool) for _ in range(2)]
    assert addresses[0] == addresses[1]
    for graph in graphs:
        graph.replay()
        assert out.tolist() == [3, 5]


@example
def living_temporaries_are_left_alone(engine):
    x, out, pool, kept = tensor(engine, 1, 2), tensor(engine, 0, 0), engine.make_pool(), []
    first = capture(engine, lambda: kept.append(x * 2) or out.copy_(kept[0]), pool)
    second = capture(engine, lambda: out.copy_((x * 3) + 1), pool)
    first.replay()
    second.replay()
    assert (kept[0].tolist(), out.tolist()) == ([2, 4], [4, 7])


@example
def views_keep_a_temporary_alive(engine):
    x, out, pool, kept = tensor(engine, 1, 2), tensor(engine, 0, 0), engine.make_pool(), []
    first = capture(engine, lambda: kept.append((x * 2)[1:]) or out.copy_(x), pool)
    second = capture(engine, lambda: out.copy_((x * 3) + 1), pool)
    first.replay()
    second.replay()
    assert kept[0].tolist() == [4]


@example
def random_numbers_are_fresh_in_every_replay(engine):
    out = tensor(engine, 0, 0, 0, 0)
    graph, seen = capture(engine, lambda: out.copy_(torch.rand_like(out))), []
    for _ in range(3):
        graph.replay()
        seen.append(tuple(out.tolist()))
    assert len(set(seen)) == 3


@example
def random_numbers_follow_the_generator(engine):
    out = tensor(engine, 0, 0, 0, 0)
    run = lambda: out.copy_(torch.dropout(torch.rand_like(out), 0.5, True) + torch.randn_like(out))  # noqa: E731
    graph, results = capture(engine, run), []
    for call in (run, graph.replay):
        torch.manual_seed(3)
        call()
        results.append((out.tolist(), torch.rand(1, device=out.device).item()))
    assert results[0] == results[1]


@example
def recording_draws_no_random_numbers(engine):
    out, before = tensor(engine, 0, 0), random_state(engine)
    capture(engine, lambda: out.uniform_().add_(torch.rand_like(out)))
    assert torch.equal(random_state(engine), before)


@example
def a_generator_of_the_user_is_drawn_from(engine):
    generator, out = torch.Generator(device_of(engine)), tensor(engine, 0, 0)
    if engine.name == "cuda":
        engine.generators.append(generator)
    generator.manual_seed(5)
    graph = capture(engine, lambda: out.copy_(torch.rand(2, generator=generator, device=out.device)))
    graph.replay()
    replayed = out.clone()
    assert torch.equal(replayed, torch.rand(2, generator=generator.manual_seed(5), device=out.device))
