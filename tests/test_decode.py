"""`uniform_decode` says of a batch what no argument does: for one thread, until its block ends, however that ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from interrupts import Interrupts
from torch import Tensor

import dsv4_compile
from dsv4_compile import uniform_decode, uniform_query_len
from dsv4_compile.errors import ArgumentError

BLOCK = uniform_decode(3)


def test_blocks_are_nested_and_may_be_entered_again() -> None:
    assert uniform_query_len() is None
    with BLOCK:
        assert uniform_query_len() == 3
        with uniform_decode():
            assert uniform_query_len() == 1
            with BLOCK, BLOCK:
                assert uniform_query_len() == 3
            assert uniform_query_len() == 1
        assert uniform_query_len() == 3
    assert uniform_query_len() is None


def test_a_block_is_of_one_thread() -> None:
    seen: list[int | None] = []

    def look() -> None:
        seen.append(uniform_query_len())
        with BLOCK:
            seen.append(uniform_query_len())

    with uniform_decode(2):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert uniform_query_len() == 2
    assert seen == [None, 3]


def test_an_exit_stack_and_calls_by_hand() -> None:
    with ExitStack() as stack:
        stack.enter_context(uniform_decode(4))
        stack.enter_context(BLOCK)
        assert uniform_query_len() == 3
    assert uniform_query_len() is None
    block = uniform_decode(2)
    block.__enter__()
    with BLOCK:
        assert uniform_query_len() == 3
    assert uniform_query_len() == 2
    block.__exit__(None, None, None)
    block.__exit__(None, None, None)
    assert uniform_query_len() is None


def test_a_block_may_end_in_another_thread() -> None:
    """A generator that holds it is resumed there."""

    def steps() -> Iterator[None]:
        with uniform_decode():
            yield

    generator = steps()
    next(generator)
    assert uniform_query_len() == 1
    thread = threading.Thread(target=lambda: next(generator, None))
    thread.start()
    thread.join()
    assert uniform_query_len() is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_a_block_ends_it(error: type[BaseException]) -> None:
    with pytest.raises(error), uniform_decode(2), uniform_decode():
        raise error
    assert uniform_query_len() is None


@contextmanager
def kept(errors: list[BaseException]) -> Iterator[None]:
    """Keeps what a block raises, and with it all frames of its traceback, as a debugger would."""
    try:
        yield
    except KeyboardInterrupt as error:
        errors.append(error)


@pytest.mark.parametrize("starts", ["__enter__", "_leave", "__get__", "uniform_decode"])
def test_an_interrupt_at_any_bytecode_leaves_no_block_behind(starts: str) -> None:
    def enter_and_leave() -> None:
        with BLOCK, uniform_decode(2):
            assert uniform_query_len() == 2

    counting = Interrupts(starts, lines=True, opcodes=True)
    counting.run(enter_and_leave)
    assert len(counting.places) > 3
    errors: list[BaseException] = []
    for at in range(len(counting.places)):
        with kept(errors):
            Interrupts(starts, lines=True, opcodes=True, at=at).run(enter_and_leave)
        assert len(errors) == at + 1
        assert uniform_query_len() is None, counting.places[at]
        with BLOCK:
            assert uniform_query_len() == 3
        assert uniform_query_len() is None, counting.places[at]


@pytest.mark.parametrize("query_len", [0, -1, True, False, 1.0, "1", None, [1]])
def test_a_wrong_query_len_is_refused(query_len: Any) -> None:
    with pytest.raises(ArgumentError, match=r"query_len is .*; it must be an integer of at least 1"):
        uniform_decode(query_len)
    assert uniform_query_len() is None


def says(x: Tensor) -> Tensor:
    y = x + 1
    with uniform_decode():
        return y * 2


def asks(x: Tensor) -> Tensor:
    return x * (uniform_query_len() or 2)


def enters(x: Tensor) -> Tensor:
    BLOCK.__enter__()
    return x + 1


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("function", [says, asks, enters])
def test_in_a_compiled_function_it_is_refused(function: Callable[[Tensor], Tensor], fullgraph: bool) -> None:
    """What is said of one batch would be kept with the graph."""
    compiled = torch.compile(function, backend="dsv4_piecewise", fullgraph=fullgraph)
    with pytest.raises(ArgumentError, match=r"uniform_\w+ is called inside of a compiled function"):
        compiled(torch.ones(3))
    assert uniform_query_len() is None


def test_a_graph_break_lets_a_block_in() -> None:
    """One that was made outside is entered by Python, between two graphs."""

    def function(x: Tensor) -> Tensor:
        y = torch.ops.toy.fresh(x + 1)
        torch._dynamo.graph_break()
        return y * 2

    compiled = torch.compile(function, backend="dsv4_piecewise", options={"split_ops": ["toy::fresh"]})
    with uniform_decode(), dsv4_compile.counters.expect(graphs_compiled=2):
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 8.0))
