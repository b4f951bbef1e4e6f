"""The happens-before checker: what it reports is what reachability by brute force finds, and every event counts.

Random programs are made with no more events than they need, so taking away any one of them must be noticed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_logs import log_of

from dsv4_compile.errors import StreamRaceError
from dsv4_compile.runtime.engines.host.race_checker import (
    LogEntry,
    RecordEvent,
    StreamLaunch,
    WaitEvent,
    check_races,
    shuffled,
)

A, B = (0, 64), (64, 128)
FORK = [RecordEvent(stream=0, event=0), WaitEvent(stream=1, event=0)]
JOIN = [RecordEvent(stream=1, event=9), WaitEvent(stream=0, event=9)]


def launch(name: str, stream: int, *, reads: Sequence[tuple[int, int]] = (), writes: Sequence[tuple[int, int]] = ()):
    return StreamLaunch(name=name, stream=stream, reads=tuple(reads), writes=tuple(writes))


# --- one example for each thing that can be wrong ---


@pytest.mark.parametrize(
    ("first", "second", "did"),
    [
        ({"writes": [A]}, {"reads": [A]}, "writes bytes 0x0 to 0x40"),
        ({"reads": [A]}, {"writes": [A]}, "reads bytes 0x0 to 0x40"),
        ({"writes": [A]}, {"writes": [A]}, "writes bytes 0x0 to 0x40"),
        ({"writes": [(0, 40)]}, {"reads": [(39, 80)]}, "writes bytes 0x27 to 0x28"),
        ({"reads": [(0, 128)]}, {"writes": [(8, 16)]}, "reads bytes 0x8 to 0x10"),
    ],
)
def test_two_conflicting_launches_without_an_event(first: dict, second: dict, did: str) -> None:
    log = [*FORK, launch("gemm", 0, **first), launch("insert", 1, **second), *JOIN]
    expected = (
        f"gemm on stream 0 {did}, which insert on stream 1 touches as well, and nothing orders the two: record an "
        "event on stream 0 after gemm and let stream 1 wait for it before insert"
    )
    with pytest.raises(StreamRaceError, match=f"^{expected}$"):
        check_races(log)
    event = [RecordEvent(stream=0, event=1), WaitEvent(stream=1, event=1)]
    check_races([*FORK, launch("gemm", 0, **first), *event, launch("insert", 1, **second), *JOIN])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"reads": [A]}, {"reads": [A]}),
        ({"writes": [A]}, {"writes": [B]}),
        ({"writes": [(0, 128)]}, {"reads": [(5, 5)]}),
        ({"writes": [(5, 5)]}, {"reads": [(0, 128)]}),
    ],
)
def test_what_does_not_conflict_needs_no_event(first: dict, second: dict) -> None:
    check_races([*FORK, launch("gemm", 0, **first), launch("insert", 1, **second), *JOIN])


def test_a_read_behind_other_reads_is_still_a_race_with_a_later_write() -> None:
    readers = [launch("one", 1, reads=[A]), launch("other", 0, reads=[A])]
    with pytest.raises(StreamRaceError, match=r"^one on stream 1 reads .* touches as well"):
        check_races([*FORK, *readers, launch("writer", 0, writes=[A]), *JOIN])


def test_a_launch_does_not_race_with_itself() -> None:
    check_races([launch("add_", 0, reads=[A], writes=[A, (32, 80)]), launch("add_", 0, reads=[A], writes=[A])])


def test_a_stream_that_is_not_joined() -> None:
    expected = (
        "stream 1 is not joined into stream 0: insert may still run when the piece has ended; record an event on "
        "stream 1 after it and let stream 0 wait for it"
    )
    with pytest.raises(StreamRaceError, match=f"^{expected}$"):
        check_races([*FORK, launch("insert", 1, writes=[A])])


def test_a_launch_behind_the_join() -> None:
    with pytest.raises(StreamRaceError, match="stream 1 is not joined into stream 0: late may still run"):
        check_races([*FORK, launch("early", 1), *JOIN, launch("late", 1)])


def test_a_stream_joined_by_way_of_another() -> None:
    log = [RecordEvent(stream=0, event=0), WaitEvent(stream=1, event=0), WaitEvent(stream=2, event=0), launch("far", 2)]
    log += [RecordEvent(stream=2, event=1), WaitEvent(stream=1, event=1), *JOIN]
    check_races(log)


def test_a_stream_that_is_not_forked() -> None:
    expected = (
        "insert runs on stream 1, which is not forked from stream 0: record an event on stream 0 and let stream 1 wait "
        "for it before its first launch"
    )
    with pytest.raises(StreamRaceError, match=f"^{expected}$"):
        check_races([launch("insert", 1), *JOIN])


@pytest.mark.parametrize("check", [check_races, lambda log: shuffled(log, 0)])
def test_a_wait_for_an_event_that_was_never_recorded(check) -> None:
    expected = (
        "stream 1 waits for event 7, which was not recorded before: record it first, "
        "on the stream that is to be waited for"
    )
    with pytest.raises(StreamRaceError, match=f"^{expected}$"):
        check([WaitEvent(stream=1, event=7), RecordEvent(stream=0, event=7)])


def test_an_event_stands_for_what_was_there_when_the_wait_was_issued() -> None:
    write, read = launch("write", 0, writes=[A]), launch("read", 1, reads=[A])
    again = RecordEvent(stream=0, event=0)
    check_races([*FORK, write, again, WaitEvent(stream=1, event=0), read, *JOIN])
    with pytest.raises(StreamRaceError, match="write on stream 0 writes"):
        check_races([*FORK, write, again, read, *JOIN])


# --- random programs with as few events as they need ---


def conflict(one: StreamLaunch, other: StreamLaunch) -> bool:
    def meet(some: Sequence[tuple[int, int]], more: Sequence[tuple[int, int]]) -> bool:
        return any(max(a, c) < min(b, d) for a, b in some for c, d in more)

    return meet(one.writes, (*other.reads, *other.writes)) or meet(one.reads, other.writes)


def with_events(launches: Sequence[StreamLaunch]) -> list[LogEntry]:
    """The log in which each launch waits for those it conflicts with, unless another one it waits for does."""
    waits: list[set[int]] = []
    before: list[set[int]] = []  # by launch: the ones that have run for certain, itself included; -1 is the start
    latest: dict[int, set[int]] = {0: {-1}}
    for position, op in enumerate(launches):
        known = latest.get(op.stream, set())
        needed = {i for i in range(position) if conflict(launches[i], op)} - known
        needed = {i for i in needed if not any(i in before[j] for j in needed if j != i)}
        if not known and not needed:
            needed = {-1}
        waits.append(needed)
        before.append(known.union({position}, *(before[i] if i >= 0 else {-1} for i in needed)))
        latest[op.stream] = before[position]
    ends = {
        max(positions)
        for stream in latest
        if (positions := [i for i, op in enumerate(launches) if op.stream == stream])
    }
    ends -= latest[0]
    joins = {i for i in ends if not any(i in before[j] for j in ends if j != i)}
    return log_of(launches, waits, joins)


ranges = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)).map(lambda r: (r[0], r[0] + r[1])), max_size=3)
launches = st.lists(st.tuples(st.integers(0, 3), ranges, ranges), min_size=1, max_size=14).map(
    lambda ops: [launch(f"op{i}", stream, reads=r, writes=w) for i, (stream, r, w) in enumerate(ops)]
)


@given(launches)
def test_taking_away_any_one_event_is_noticed(ops: list[StreamLaunch]) -> None:
    log = with_events(ops)
    check_races(log)
    for index, entry in enumerate(log):
        if not isinstance(entry, StreamLaunch):
            with pytest.raises(StreamRaceError):
                check_races(log[:index] + log[index + 1 :])


# --- against reachability by brute force ---

START, END = "start", "end"


def edges_of(log: Sequence[LogEntry]) -> dict[object, set[object]] | None:
    """Who comes after whom directly, entries by position; None if an event is not recorded before it is awaited."""
    edges: dict[object, set[object]] = {START: set(), END: set(), **{i: set() for i in range(len(log))}}
    latest: dict[int, object] = {0: START}
    recorded: dict[int, int] = {}
    for position, entry in enumerate(log):
        if entry.stream in latest:
            edges[latest[entry.stream]].add(position)
        latest[entry.stream] = position
        if isinstance(entry, RecordEvent):
            recorded[entry.event] = position
        if isinstance(entry, WaitEvent):
            if entry.event not in recorded:
                return None
            edges[recorded[entry.event]].add(position)
    edges[latest[0]].add(END)
    return edges


def reachable(edges: dict[object, set[object]], origin: object) -> set[object]:
    found: set[object] = set()
    pending = [origin]
    while pending:
        for after in edges[pending.pop()] - found:
            found.add(after)
            pending.append(after)
    return found


def is_ordered(log: Sequence[LogEntry]) -> bool:
    edges = edges_of(log)
    if edges is None:
        return False
    after = {place: reachable(edges, place) for place in edges}
    places = [i for i, entry in enumerate(log) if isinstance(entry, StreamLaunch)]
    forked_and_joined = all(i in after[START] and END in after[i] for i in places)
    pairs = ((i, j) for i in places for j in places if i < j and conflict(log[i], log[j]))
    return forked_and_joined and all(j in after[i] for i, j in pairs)


def verdict(log: Sequence[LogEntry]) -> bool:
    try:
        check_races(log)
    except StreamRaceError:
        return False
    return True


syncs = st.tuples(st.sampled_from([RecordEvent, WaitEvent]), st.integers(0, 3), st.integers(0, 4))
sync_points = syncs.map(lambda sync: sync[0](stream=sync[1], event=sync[2]))
narrow = st.lists(st.integers(0, 9).map(lambda at: (at, at + 1)), max_size=1)
entries = st.one_of(
    sync_points,
    st.tuples(st.integers(0, 3), narrow, narrow).map(lambda op: launch("op", op[0], reads=op[1], writes=op[2])),
)


@given(st.lists(entries, max_size=16))
def test_any_log_is_judged_as_brute_force_does(log: list[LogEntry]) -> None:
    assert verdict(log) == is_ordered(log)


@given(launches, st.data())
def test_a_damaged_program_is_judged_as_brute_force_does(ops: list[StreamLaunch], data: st.DataObject) -> None:
    """Entries gone, swapped, or put in; many of these logs are still in order."""
    log = with_events(ops)
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(log) - 1))
        change = data.draw(st.sampled_from(["drop", "swap", "add"]))
        if change == "drop" and len(log) > 1:
            del log[place]
        elif change == "swap":
            log[place - 1], log[place] = log[place], log[place - 1]
        elif change == "add":
            log.insert(place, data.draw(sync_points))
    assert verdict(log) == is_ordered(log)


# --- shuffled orders ---


@given(launches, st.integers(0, 1000))
def test_shuffled_orders_keep_what_streams_and_events_order(ops: list[StreamLaunch], seed: int) -> None:
    log = with_events(ops)
    order = shuffled(log, seed)
    assert sorted(order, key=ops.index) == ops
    edges = edges_of(log)
    assert edges is not None
    place = {op: i for i, op in enumerate(order)}
    for i, entry in enumerate(log):
        if isinstance(entry, StreamLaunch):
            later = [log[j] for j in reachable(edges, i) if j != END and isinstance(log[j], StreamLaunch)]
            assert all(place[entry] < place[other] for other in later)


@given(launches, st.integers(0, 1000))
def test_equal_seeds_give_equal_orders(ops: list[StreamLaunch], seed: int) -> None:
    log = with_events(ops)
    assert shuffled(log, seed) == shuffled(log, seed)


def test_every_order_that_is_allowed_comes_up() -> None:
    """Two streams of two launches that share nothing: 6 orders; two of them chosen in 2 of 4 free choices."""
    log = [*FORK, launch("a", 0), launch("b", 0), launch("c", 1), launch("d", 1), *JOIN]
    seen = Counter("".join(op.name for op in shuffled(log, seed)) for seed in range(800))
    assert set(seen) == {"abcd", "acbd", "acdb", "cabd", "cadb", "cdab"}
    # abcd and cdab need 2 free choices (1/4 each), the other four need 3 (1/8 each)
    assert min(seen["abcd"], seen["cdab"]) > 800 // 6 > max(seen[order] for order in ("acbd", "acdb", "cabd", "cadb"))


def test_a_long_log_on_four_streams() -> None:
    draw = random.Random(0)
    ops = []
    for i in range(400):
        start = draw.randrange(4000)
        ops.append(launch(f"op{i}", i % 4, reads=[(start, start + 100)], writes=[(start + 50, start + 60)]))
    log = with_events(ops)
    check_races(log)
    assert shuffled(log, 1) != shuffled(log, 2)
    del log[next(i for i, entry in enumerate(log) if isinstance(entry, WaitEvent) and i > len(log) // 2)]
    with pytest.raises(StreamRaceError):
        check_races(log)
