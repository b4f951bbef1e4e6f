"""Copies that the host engine leaves out: each condition is kept, and each is needed."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dsv4_compile.runtime.engines.host import copy_elision as host_elide
from dsv4_compile.runtime.engines.host.engine import HostEngine

ENGINE = HostEngine()


def capture(run):
    return ENGINE.capture(run, ENGINE.make_pool(), name="the example")


def numbers(count=4):
    return torch.arange(1.0, count + 1)


def test_a_value_is_born_where_it_is_copied_to():
    x, out = numbers(), torch.zeros(4)
    graph = capture(lambda: out.copy_((x * 2).add_(1)))
    graph.replay()
    assert (out.tolist(), len(graph)) == ([3, 5, 7, 9], 2)  # mul, add_


def test_readers_before_the_copy_follow_the_value():
    x, out, other = numbers(), torch.zeros(4), torch.zeros(2)

    def run():
        value = x * 2
        other.copy_(value[2:] + 1)
        out.copy_(value)

    graph = capture(run)
    graph.replay()
    assert (out.tolist(), other.tolist(), len(graph)) == ([2, 4, 6, 8], [7, 9], 2)  # mul, add


def test_a_chain_of_copies_goes():
    x, out = numbers(), torch.zeros(4)
    graph = capture(lambda: out.copy_(torch.empty(4).copy_((x * 2).clone())))
    graph.replay()
    assert (out.tolist(), len(graph)) == ([2, 4, 6, 8], 1)  # mul


def test_of_two_copies_the_last_goes():
    x, outs = numbers(), torch.zeros(2, 32)

    def run():
        value = x * 2
        outs[0, :4].copy_(value)
        outs[1, :4].copy_(value)

    graph = capture(run)
    graph.replay()
    assert (outs[:, :4].tolist(), len(graph)) == ([[2, 4, 6, 8]] * 2, 2)  # mul, copy_


def test_a_copy_of_another_dtype_stays():
    x, out = numbers(), torch.zeros(4, dtype=torch.float64)
    assert replayed(lambda: out.copy_(x * 2), out) == [2, 4, 6, 8]


def test_a_copy_of_other_strides_stays():
    x, out = numbers().view(2, 2), torch.zeros(2, 2)
    assert replayed(lambda: out.copy_((x * 2).t()), out) == [[2, 6], [4, 8]]


def test_a_copy_of_a_conjugate_stays():
    x, out = torch.tensor([1 + 2j]), torch.zeros(1, dtype=torch.complex64)
    assert replayed(lambda: out.copy_((x * 2).conj()), out) == [2 - 4j]


def test_a_copy_of_a_part_stays():
    x, out = numbers(), torch.zeros(4)
    assert replayed(lambda: out[:2].copy_((x * 2)[:2]), out) == [2, 4, 0, 0]


def test_a_copy_of_what_is_filled_in_part_stays():
    x, out = numbers(), torch.zeros(4)

    def run():
        value = torch.empty(4)
        value[:2].copy_(x[:2])
        out.copy_(value)

    assert str(replayed(run, out)) == "[1.0, 2.0, nan, nan]"


def test_a_copy_of_what_is_used_later_stays():
    x, out, other = numbers(), torch.zeros(4), torch.zeros(4)

    def run():
        value = x * 2
        out.copy_(value)
        out.add_(1)
        other.copy_(value.flip(0))

    assert replayed(run, other) == [8, 6, 4, 2]


def test_a_copy_of_what_is_held_outside_stays():
    x, out, kept = numbers(), torch.zeros(4), []

    def run():
        kept.append(x * 2)
        out.copy_(kept[-1])

    replayed(run, out)
    assert kept[0].tolist() == [2, 4, 6, 8]


def test_a_copy_to_what_is_read_in_between_stays():
    x, out, other = numbers(), torch.full((4,), 5.0), torch.zeros(4)

    def run():
        value = x * 2
        other.copy_(out.flip(0))
        out.copy_(value)

    assert replayed(run, other) == [5, 5, 5, 5]


def test_a_copy_to_what_the_kernel_reads_stays():
    # torch refuses to gather into what it gathers from, whatever the processor; a matrix product may come out right
    state, turn = numbers(), torch.tensor([1, 0, 3, 2])
    assert replayed(lambda: state.copy_(state.gather(0, turn)), state) == [2, 1, 4, 3]


def test_a_copy_to_what_overlaps_a_reader_stays():
    x, memory, other = numbers(), torch.full((32,), 5.0), torch.zeros(4)

    def run():
        value = x * 2
        other.copy_(memory[18:22].flip(0))
        memory[16:20].copy_(value)

    assert replayed(run, other) == [5, 5, 5, 5]


def test_a_copy_to_an_odd_address_stays():
    x, memory = numbers(), torch.zeros(32)
    at_start = capture(lambda: memory[16:20].copy_(x * 2))
    odd = capture(lambda: memory[1:5].copy_(x * 2))
    odd.replay()
    assert (memory[:6].tolist(), len(at_start), len(odd)) == ([0, 2, 4, 6, 8, 0], 1, 2)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the opaque kernel used here is oneDNN's")
def test_a_copy_across_an_opaque_kernel_stays():
    x, weight, outs = torch.ones(2, 2), torch.eye(2), torch.zeros(2, 2, 2)

    def run():
        value = x * 2
        outs[1].copy_(torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
        outs[0].copy_(value)

    graph = capture(run)
    graph.replay()
    assert (outs[0].tolist(), outs[1].tolist()) == ([[2, 2], [2, 2]], [[1, 1], [1, 1]])
    assert len(graph) == 4  # mul, linear, and both copies: the second slot is at an odd address


def replayed(run, out):
    capture(run).replay()
    return out.tolist()


NEEDED = {
    "differs_in_layout": [
        test_a_copy_of_another_dtype_stays,
        test_a_copy_of_other_strides_stays,
        test_a_copy_of_a_conjugate_stays,
    ],
    "is_part": [test_a_copy_of_a_part_stays],
    "is_born_in_part": [test_a_copy_of_what_is_filled_in_part_stays],
    "is_used_later": [test_a_copy_of_what_is_used_later_stays],
    "is_held_outside": [test_a_copy_of_what_is_held_outside_stays],
    "slot_is_touched": [
        test_a_copy_to_what_is_read_in_between_stays,
        test_a_copy_to_what_the_kernel_reads_stays,
        test_a_copy_to_what_overlaps_a_reader_stays,
        test_a_copy_across_an_opaque_kernel_stays,
    ],
    "slot_is_misaligned": [test_a_copy_to_an_odd_address_stays],
}


def test_every_condition_has_a_case():
    assert [check.__name__ for check in host_elide.CONDITIONS] == list(NEEDED)


@pytest.mark.parametrize(
    ("condition", "case"),
    [pytest.param(name, case, id=case.__name__) for name, cases in NEEDED.items() for case in cases],
)
def test_without_its_condition_a_copy_is_missed(condition, case, monkeypatch):
    rest = tuple(check for check in host_elide.CONDITIONS if check.__name__ != condition)
    monkeypatch.setattr(host_elide, "CONDITIONS", rest)
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        case()


STEPS = st.lists(
    st.tuples(st.sampled_from(["mix", "mul", "view", "copy", "add", "fill", "relu", "drop"]), *[st.integers(0, 9)] * 3)
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_any_program_gives_what_eager_code_gives(steps):
    torch.manual_seed(0)
    eager_memory = torch.randn(4, 64)
    memory = eager_memory.clone()
    graph = None
    for _ in range(2):
        try:
            run_program(steps, eager_memory)
        except RuntimeError:  # writes that overlap what they read
            assume(False)
        graph = graph or capture(lambda: run_program(steps, memory))
        graph.replay()
        torch.testing.assert_close(memory, eager_memory, rtol=0, atol=0, equal_nan=True)


def run_program(steps, memory):
    """Interpret steps over 4x4 values; some of them lie in `memory`, at places that overlap."""
    places = [memory[0, :16], memory[0, 16:32], memory[1, :16], memory[1, 8:24], memory[2, 3:19]]
    values = [place.view(4, 4) for place in places]
    slots = list(values)
    memory[3, :16].copy_((values[0] * 0.5).flatten())  # so that there is a kernel in every program
    for kind, i, j, k in steps:
        a, b, slot = values[i % len(values)], values[j % len(values)], slots[k % len(slots)]
        if kind == "mix":
            values.append(a * 0.5 + b)
        elif kind == "mul":
            values.append(torch.mm(a, b))
        elif kind == "view":
            values.append(a.t())
        elif kind == "copy":
            slot.copy_(a)
        elif kind == "add":
            a.add_(b)
        elif kind == "fill":
            values.append(torch.empty(4, 4).copy_(a))
        elif kind == "relu":
            values.append(torch.relu(a))
        elif len(values) > len(slots):
            del values[len(slots) + i % (len(values) - len(slots))]
        del a, b
