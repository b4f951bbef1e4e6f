"""Lanes and events of ops known by number alone: small pieces to check by hand, then random ones.

Weights are in the unit of `EVENT` (1): 4 is a kernel worth a lane, 1 one that is not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lane_logs import happens_before, log_of

from dsv4_compile.errors import LaneRaceError
from dsv4_compile.lane_schedule import EVENT, START, Events, estimate, events_of, schedule
from dsv4_compile.runtime.host_lanes import LaneLaunch, check_races

Before = Sequence[Collection[int]]


@pytest.mark.parametrize("side_lanes", [0, 1, 3])
def test_a_lone_chain_stays_on_one_lane(side_lanes: int) -> None:
    assert schedule([[], [0], [1], [2]], [4, 4, 4, 4], side_lanes) == (0, 0, 0, 0)


def test_two_chains_get_a_lane_each() -> None:
    assert schedule([[], [], [0], [1]], [4, 4, 4, 4], 3) == (0, 1, 0, 1)


def test_without_side_lanes_nothing_forks() -> None:
    assert schedule([[], [], [], []], [9, 9, 9, 9], 0) == (0, 0, 0, 0)


def test_a_piece_without_ops() -> None:
    assert schedule([], [], 3) == ()


def test_no_more_side_lanes_than_allowed() -> None:
    before: Before = [[]] * 6
    assert set(schedule(before, [4] * 6, 2)) == {0, 1, 2}


def test_a_branch_no_heavier_than_two_events_stays() -> None:
    assert schedule([[], [], [], [], [0, 1, 2, 3]], [2, 2, 2, 2, 4], 3) == (0, 0, 0, 0, 0)
    assert len(set(schedule([[], [], [], [], [0, 1, 2, 3]], [3, 3, 3, 3, 4], 3))) > 1


def test_a_piece_that_would_not_end_earlier_stays() -> None:
    """With the last op on a side lane it would end at 11: 4 and 1, an event, 4, and the join."""
    before: Before = [[], [], [1]]
    assert estimate(before, [4, 1, 4], (0, 0, 1)) == 4 + 1 + EVENT + 4 + EVENT
    assert schedule(before, [4, 1, 4], 1) == (0, 0, 0)


def test_the_longest_path_has_lane_0() -> None:
    assert schedule([[], [], [1], [2]], [4, 4, 4, 9], 3) == (1, 0, 0, 0)


def test_side_lanes_are_numbered_by_their_work() -> None:
    assert schedule([[], [], [], []], [9, 4, 6, 5], 3) == (0, 3, 1, 2)


def test_equal_ones_go_by_program_order() -> None:
    assert schedule([[], [], []], [4, 4, 4], 3) == (0, 1, 2)


def test_a_join_comes_back_to_lane_0() -> None:
    """Gate and up projection of an MLP: what needs both goes on where the piece began."""
    assert schedule([[], [], [0], [2, 1], [3]], [4, 4, 1, 1, 4], 3) == (0, 1, 0, 0, 0)


def test_the_way_to_a_side_lane_and_back_counts() -> None:
    """Ops 1 and 2 fill lane 1 from 1 to 4; op 3 could start at 4 on both lanes, and is joined already on lane 0."""
    assert schedule([[], [], [], [1]], [4, 1, 2, 1], 1) == (0, 1, 1, 0)


def test_what_follows_an_op_stays_with_it() -> None:
    """On lane 0 ops 1 and 3 would be late by an event, or behind the heavy op."""
    assert schedule([[], [0], [], [0]], [1, 1, 4, 1], 2) == (1, 1, 0, 1)


def test_each_branch_of_a_lane_pays_for_its_own_events() -> None:
    """Op 3, worth a lane, does not bring op 1 along: they would be two branches, as op 3 waits for op 0."""
    assert schedule([[], [], [0], [0]], [1, 2, 4, 4], 1) == (0, 0, 0, 1)


def test_an_op_is_put_beside_what_its_successor_needs_too() -> None:
    """Op 4 may run on either side lane; op 5 needs it and op 2."""
    before: Before = [[], [], [], [0], [0], [4, 2]]
    assert schedule(before, [4, 4, 4, 9, 4, 4], 2) == (0, 2, 1, 0, 1, 1)


def test_events_of_a_fork_in_the_middle() -> None:
    #    0 -- 1 -- 3    lane 0: 0 1 3
    #      \- 2 -/      lane 1: 2
    assert events_of([[], [0], [0], [1, 2]], (0, 0, 1, 0)) == Events(waits=((), (), (0,), (2,)), joins=())


def test_events_of_a_lane_from_start_to_end() -> None:
    assert events_of([[], []], (0, 1)) == Events(waits=((), (START,)), joins=(1,))


def test_what_is_behind_another_wait_is_not_waited_for() -> None:
    # 2 on lane 2 needs 0 (lane 0) and 1 (lane 1), which waits for 0 itself
    assert events_of([[], [0], [0, 1]], (0, 1, 2)) == Events(waits=((), (0,), (1,)), joins=(2,))


def test_a_lane_waits_for_another_only_once() -> None:
    assert events_of([[], [0], [0]], (0, 1, 1)).waits == ((), (0,), ())


def test_a_lane_forked_by_way_of_another() -> None:
    # lane 2 starts behind an op of lane 1, which was forked from lane 0
    assert events_of([[], [], [1]], (0, 1, 2)) == Events(waits=((), (START,), (1,)), joins=(2,))


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[set[int]], list[int]]:
    size = draw(st.integers(1, 12))
    before = [draw(st.sets(st.integers(0, op - 1), max_size=3)) if op else set() for op in range(size)]
    return before, draw(st.lists(st.sampled_from([1, 2, 4, 5, 9]), min_size=size, max_size=size))


@given(pieces(), st.integers(0, 3))
def test_lanes_and_events_keep_every_edge(piece: tuple[list[set[int]], list[int]], side_lanes: int) -> None:
    before, weights = piece
    lanes = schedule(before, weights, side_lanes)
    past = happens_before(lanes, events_of(before, lanes))
    assert all(earlier <= past[op] for op, earlier in enumerate(before))


@given(pieces(), st.integers(0, 3))
def test_a_schedule_is_never_longer_than_one_lane(piece: tuple[list[set[int]], list[int]], side_lanes: int) -> None:
    before, weights = piece
    lanes = schedule(before, weights, side_lanes)
    assert lanes == schedule(before, weights, side_lanes)
    assert sorted(set(lanes)) == list(range(max(lanes) + 1))
    assert max(lanes) <= side_lanes
    assert estimate(before, weights, lanes) < sum(weights) or not any(lanes)


@given(pieces(), st.data())
def test_any_lanes_are_ordered_by_events_of_which_none_can_go(
    piece: tuple[list[set[int]], list[int]], data: st.DataObject
) -> None:
    """Lanes at random, not only scheduled ones. An op writes what it makes, and reads what those before it made."""
    before, _ = piece
    lanes = data.draw(st.lists(st.integers(0, 3), min_size=len(before), max_size=len(before)))
    launches = [
        LaneLaunch(name=str(op), lane=lane, reads=tuple((i, i + 1) for i in sorted(before[op])), writes=((op, op + 1),))
        for op, lane in enumerate(lanes)
    ]
    events = events_of(before, lanes)
    log = log_of(launches, events.waits, events.joins)
    check_races(log)
    for place, entry in enumerate(log):
        if not isinstance(entry, LaneLaunch):
            with pytest.raises(LaneRaceError):
                check_races(log[:place] + log[place + 1 :])


def test_estimate_by_hand() -> None:
    # lane 0: 0-4, then 4-8 and the join of lane 1; lane 1: fork at 1, 1-5, waits for op 0 until 5, 5-9
    assert estimate([[], [], [0], [0, 1]], [4, 4, 4, 4], (0, 1, 0, 1)) == 9 + EVENT
