"""Streams and events of ops known by number alone: small pieces to check by hand, then random ones.

Weights are in the unit of `EVENT` (1): 4 is a kernel worth a stream, 1 one that is not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_logs import happens_before, log_of

from dsv4_compile.analysis.stream_schedule import EVENT, START, Events, estimate, events_of, schedule
from dsv4_compile.errors import StreamRaceError
from dsv4_compile.runtime.engines.host.race_checker import StreamLaunch, check_races

Before = Sequence[Collection[int]]


@pytest.mark.parametrize("side_streams", [0, 1, 3])
def test_a_lone_chain_stays_on_one_stream(side_streams: int) -> None:
    assert schedule([[], [0], [1], [2]], [4, 4, 4, 4], side_streams) == (0, 0, 0, 0)


def test_two_chains_get_a_stream_each() -> None:
    assert schedule([[], [], [0], [1]], [4, 4, 4, 4], 3) == (0, 1, 0, 1)


def test_without_side_streams_nothing_forks() -> None:
    assert schedule([[], [], [], []], [9, 9, 9, 9], 0) == (0, 0, 0, 0)


def test_a_piece_without_ops() -> None:
    assert schedule([], [], 3) == ()


def test_no_more_side_streams_than_allowed() -> None:
    before: Before = [[]] * 6
    assert set(schedule(before, [4] * 6, 2)) == {0, 1, 2}


def test_a_branch_no_heavier_than_two_events_stays() -> None:
    assert schedule([[], [], [], [], [0, 1, 2, 3]], [2, 2, 2, 2, 4], 3) == (0, 0, 0, 0, 0)
    assert len(set(schedule([[], [], [], [], [0, 1, 2, 3]], [3, 3, 3, 3, 4], 3))) > 1


def test_a_piece_that_would_not_end_earlier_stays() -> None:
    """With the last op on a side stream it would end at 11: 4 and 1, an event, 4, and the join."""
    before: Before = [[], [], [1]]
    assert estimate(before, [4, 1, 4], (0, 0, 1)) == 4 + 1 + EVENT + 4 + EVENT
    assert schedule(before, [4, 1, 4], 1) == (0, 0, 0)


def test_the_longest_path_has_stream_0() -> None:
    assert schedule([[], [], [1], [2]], [4, 4, 4, 9], 3) == (1, 0, 0, 0)


def test_side_streams_are_numbered_by_their_work() -> None:
    assert schedule([[], [], [], []], [9, 4, 6, 5], 3) == (0, 3, 1, 2)


def test_equal_ones_go_by_program_order() -> None:
    assert schedule([[], [], []], [4, 4, 4], 3) == (0, 1, 2)


def test_a_join_comes_back_to_stream_0() -> None:
    """Gate and up projection of an MLP: what needs both goes on where the piece began."""
    assert schedule([[], [], [0], [2, 1], [3]], [4, 4, 1, 1, 4], 3) == (0, 1, 0, 0, 0)


def test_the_way_to_a_side_stream_and_back_counts() -> None:
    """Ops 1 and 2 fill stream 1 from 1 to 4; op 3 could start at 4 on both, and is joined already on stream 0."""
    assert schedule([[], [], [], [1]], [4, 1, 2, 1], 1) == (0, 1, 1, 0)


def test_what_follows_an_op_stays_with_it() -> None:
    """On stream 0 ops 1 and 3 would be late by an event, or after the heavy op."""
    assert schedule([[], [0], [], [0]], [1, 1, 4, 1], 2) == (1, 1, 0, 1)


def test_each_branch_of_a_stream_pays_for_its_own_events() -> None:
    """Op 3, worth a stream, does not bring op 1 along: they would be two branches, as op 3 waits for op 0."""
    assert schedule([[], [], [0], [0]], [1, 2, 4, 4], 1) == (0, 0, 0, 1)


def test_an_op_is_put_beside_what_its_successor_needs_too() -> None:
    """Op 4 may run on either side stream; op 5 needs it and op 2."""
    before: Before = [[], [], [], [0], [0], [4, 2]]
    assert schedule(before, [4, 4, 4, 9, 4, 4], 2) == (0, 2, 1, 0, 1, 1)


def test_events_of_a_fork_in_the_middle() -> None:
    #    0 -- 1 -- 3    stream 0: 0 1 3
    #      \- 2 -/      stream 1: 2
    assert events_of([[], [0], [0], [1, 2]], (0, 0, 1, 0)) == Events(waits=((), (), (0,), (2,)), joins=())


def test_events_of_a_stream_from_start_to_end() -> None:
    assert events_of([[], []], (0, 1)) == Events(waits=((), (START,)), joins=(1,))


def test_what_is_behind_another_wait_is_not_waited_for() -> None:
    # 2 on stream 2 needs 0 (stream 0) and 1 (stream 1), which waits for 0 itself
    assert events_of([[], [0], [0, 1]], (0, 1, 2)) == Events(waits=((), (0,), (1,)), joins=(2,))


def test_a_stream_waits_for_another_only_once() -> None:
    assert events_of([[], [0], [0]], (0, 1, 1)).waits == ((), (0,), ())


def test_a_stream_forked_by_way_of_another() -> None:
    # stream 2 starts after an op of stream 1, which was forked from stream 0
    assert events_of([[], [], [1]], (0, 1, 2)) == Events(waits=((), (START,), (1,)), joins=(2,))


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[set[int]], list[int]]:
    size = draw(st.integers(1, 12))
    before = [draw(st.sets(st.integers(0, op - 1), max_size=3)) if op else set() for op in range(size)]
    return before, draw(st.lists(st.sampled_from([1, 2, 4, 5, 9]), min_size=size, max_size=size))


@given(pieces(), st.integers(0, 3))
def test_streams_and_events_keep_every_edge(piece: tuple[list[set[int]], list[int]], side_streams: int) -> None:
    before, weights = piece
    streams = schedule(before, weights, side_streams)
    past = happens_before(streams, events_of(before, streams))
    assert all(earlier <= past[op] for op, earlier in enumerate(before))


@given(pieces(), st.integers(0, 3))
def test_a_schedule_is_never_longer_than_one_stream(piece: tuple[list[set[int]], list[int]], side_streams: int) -> None:
    before, weights = piece
    streams = schedule(before, weights, side_streams)
    assert streams == schedule(before, weights, side_streams)
    assert sorted(set(streams)) == list(range(max(streams) + 1))
    assert max(streams) <= side_streams
    assert estimate(before, weights, streams) < sum(weights) or not any(streams)


@given(pieces(), st.data())
def test_any_streams_are_ordered_by_events_of_which_none_can_go(
    piece: tuple[list[set[int]], list[int]], data: st.DataObject
) -> None:
    """Streams at random, not only scheduled ones. An op writes what it makes, and reads what those before it made."""
    before, _ = piece
    streams = data.draw(st.lists(st.integers(0, 3), min_size=len(before), max_size=len(before)))
    launches = [
        StreamLaunch(
            name=str(op), stream=stream, reads=tuple((i, i + 1) for i in sorted(before[op])), writes=((op, op + 1),)
        )
        for op, stream in enumerate(streams)
    ]
    events = events_of(before, streams)
    log = log_of(launches, events.waits, events.joins)
    check_races(log)
    for place, entry in enumerate(log):
        if not isinstance(entry, StreamLaunch):
            with pytest.raises(StreamRaceError):
                check_races(log[:place] + log[place + 1 :])


def test_estimate_by_hand() -> None:
    # stream 0: 0-4, then 4-8 and the join of stream 1; stream 1: fork at 1, 1-5, waits for op 0 until 5, 5-9
    assert estimate([[], [], [0], [0, 1]], [4, 4, 4, 4], (0, 1, 0, 1)) == 9 + EVENT
