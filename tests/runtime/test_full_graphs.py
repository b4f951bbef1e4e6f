"""A call of uniform decode replays the whole step as one graph; all others run piece by piece."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_ops import NOTED, Decoder, DecodeTrial, batch, decode, register
from runtime_helpers import Allocations, owners
from runtime_helpers import allocations as allocations
from torch import Tensor

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.graph.partitioned import InputRole
from dsv4_compile.runtime.captured import CapturedCallable


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def both() -> tuple[CapturedCallable, CapturedCallable]:
    """What serves pieces, and what serves the whole step, of the graph that was compiled last."""
    serving = owners()[-2:]
    full, pieces = sorted(serving, key=lambda owner: owner._full is not None)
    assert pieces._full is full
    return pieces, full


@pytest.mark.parametrize("layers", [3, pytest.param(61, marks=pytest.mark.exhaustive)])
def test_a_decode_step_is_one_graph_and_mixed_batches_are_not(layers: int) -> None:
    trial = DecodeTrial(layers)
    with counters.expect(graphs_compiled=1, captures=2, uncaptured_calls=2):
        trial.times(2, 4)
        trial.times(2, 4, query_len=1)
    with counters.expect(full_replays=3, replays=3, captures=0, uncaptured_calls=0, eager_op_calls=0):
        trial.times(3, 4, query_len=1)
    with counters.expect(full_replays=0, replays=2, captures=0, uncaptured_calls=0, eager_op_calls=2 * layers):
        trial.times(2, 4)
    with counters.expect(full_replays=2, replays=4, captures=0, uncaptured_calls=0, eager_op_calls=2 * layers):
        for query_len in (1, None, 1, None):
            trial.call(4, query_len)
    pieces, full = both()
    assert [len(entry.program.captured) for entry in full._cache._programs.values()] == [1]
    assert [len(entry.program.captured) for entry in pieces._cache._programs.values()] == [layers + 1]


def test_the_warm_up_of_one_does_not_count_for_the_other() -> None:
    trial = DecodeTrial()
    trial.call(4)
    with counters.expect(uncaptured_calls=1, captures=0):
        trial.call(4, query_len=1)
    with counters.expect(uncaptured_calls=0, captures=1, full_replays=1):
        trial.call(4, query_len=1)
    with counters.expect(uncaptured_calls=0, captures=1, full_replays=0):
        trial.call(4)


def test_each_query_len_has_captures_of_its_own() -> None:
    trial = DecodeTrial()
    with counters.expect(captures=2, full_replays=4, uncaptured_calls=2):
        for query_len in (1, 2):
            trial.times(3, 4, query_len)
    with counters.expect(captures=0, full_replays=4):
        for query_len in (2, 1, 2, 1):
            trial.call(4, query_len)
    assert sorted(entry.bucket[-1] for entry in both()[1]._cache._programs.values()) == [1, 2]


def test_dynamo_does_not_see_the_block() -> None:
    trial = DecodeTrial()
    with torch._dynamo.config.patch(error_on_recompile=True), counters.expect(graphs_compiled=1):
        for tokens in (4, 6, 4):
            for query_len in (None, 1, 2, None, 1):
                trial.call(tokens, query_len)


# with how many of 6 calls of uniform decode of each of two sizes are replays: all but the first
OPTIONS: list[tuple[dict[str, Any], int]] = [
    ({"decode": "full", "check": "full", "aux_streams": 2}, 10),
    ({"region": "wide"}, 10),
    ({"region": "minimal"}, 10),
    ({"check": "full"}, 10),
    ({"capture_sizes": [4, 6], "max_captures": 1}, 5),
    ({"check": "off", "static_outputs": True, "pool": "bucket"}, 10),
    ({"max_tokens": 8}, 10),
    ({"capture_sizes": [6]}, 5),
    ({"aux_streams": 3, "region": "minimal", "piece_compiler": "aot_eager"}, 10),
    ({"engine": "off"}, 0),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("options", "replays"), OPTIONS, ids=str)
def test_it_is_right_with_other_options(options: dict[str, Any], replays: int) -> None:
    trial = DecodeTrial(**options)
    for tokens in (4, 4, 6, 4, 6, 6):
        for query_len in (1, None, 1):
            trial.call(tokens, query_len)
    assert counters.full_replays == replays


@pytest.mark.inductor
@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [{}, {"aux_streams": 2, "check": "full"}], ids=str)
def test_it_is_right_in_kernels_of_inductor(more: dict[str, Any]) -> None:
    trial = DecodeTrial(2, piece_compiler="inductor", **more)
    with counters.expect(full_replays=4, uncompiled_pieces=0):
        for query_len in (1, None, 1, None, 1, 1, 1):
            trial.call(4, query_len)


def test_piecewise_asks_for_no_second_plan() -> None:
    trial = DecodeTrial(decode="piecewise")
    with counters.expect(full_replays=0, replays=2, captures=1):
        trial.times(3, 4, query_len=1)


def test_one_arena_holds_both_and_is_made_once(allocations: Allocations) -> None:
    trial = DecodeTrial(max_tokens=8)
    for query_len in (1, None):  # the whole step needs less, and comes first
        trial.times(2, 4, query_len)
    for query_len in (None, 1):
        trial.times(2, 8, query_len)
    assert len(allocations.sizes) == 1
    pieces, full = both()
    assert pieces._memory is full._memory


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 8},
        pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"aux_streams": 2, "check": "full"}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_two_models_with_two_plans_each_in_one_pool(options: dict[str, Any]) -> None:
    """Four plans have one workspace, in which each overwrites what the others left there; results stay."""
    pool = dsv4_compile.MemoryPool()
    trials = [DecodeTrial(layers, pool=pool, **options) for layers in (2, 3)]
    sizes = (6, 4)
    with counters.expect(graphs_compiled=2, captures=8, recaptures=0, full_replays=12, replays=24, uncaptured_calls=8):
        kept: list[tuple[Tensor, Tensor]] = []
        for turn in range(4):
            for tokens in sizes:
                for query_len in (None, 1) if turn % 2 else (1, None):
                    for trial in trials:
                        result = trial.call(tokens, query_len)
                        kept.append((result, result.clone()))
        for result, before in kept:
            assert torch.equal(result, before)
    serving = owners()[-4:]
    assert sorted(owner._full is not None for owner in serving) == [False, False, True, True]
    assert len({id(owner._memory.arenas) for owner in serving}) == 1


def test_what_needs_more_in_the_whole_step_fits_too(allocations: Allocations) -> None:
    """In pieces `big` is seen by the region alone, and passed on; a graph needs it copied to a place of its own."""

    def step(x: Tensor, big: Tensor) -> Tensor:
        out = torch.empty_like(big)
        decode.fill(big, out)
        return x + out[:, :8]

    options = {"engine": "host", "max_tokens": 8}
    compiled = torch.compile(step, backend="dsv4_piecewise", dynamic=True, options=options)
    with torch.no_grad():
        for query_len in (None, None, 1, 1, 1):
            x, big = torch.randn(8, 8), torch.randn(8, 512)
            if query_len is None:
                assert torch.equal(compiled(x, big), step(x, big))
            else:
                with dsv4_compile.uniform_decode(query_len):
                    assert torch.equal(compiled(x, big), step(x, big))
    assert len(allocations.sizes) == 1
    assert counters.full_replays == 2


def test_captures_ahead_of_serving() -> None:
    model = Decoder(2)
    compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True, options={"engine": "host"})
    dsv4_compile.capture(compiled, lambda n: batch(n, 0), [4, 6], progress=False)
    with dsv4_compile.uniform_decode():
        dsv4_compile.capture(compiled, lambda n: batch(n, 0), [4, 6], progress=False)
    assert not model.get_buffer("cache_0").any()
    with torch.no_grad(), counters.expect(captures=0, uncaptured_calls=0, full_replays=2, replays=4):
        for tokens in (4, 6):
            compiled(*batch(tokens, 1))
            with dsv4_compile.uniform_decode():
                compiled(*batch(tokens, 1))


@pytest.mark.parametrize("tokens", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_one_token_or_none(tokens: int) -> None:
    """Both are graphs of their own; a batch of none is never captured."""
    trial = DecodeTrial()
    with counters.expect(full_replays=2 * tokens, graphs_compiled=1):
        for query_len in (1, None) * 3:
            trial.call(tokens, query_len)


def test_caches_that_move_are_copied_in_and_out() -> None:
    """As arguments that are not static, new in every call; in pieces only the eager op sees them."""

    def step(x: Tensor, slots: Tensor, cache: Tensor, lens: Tensor) -> Tensor:
        out = torch.empty_like(x)
        decode.insert(x, slots, cache)
        decode.attend(x, cache, lens, out)
        return out

    compiled = torch.compile(step, backend="dsv4_piecewise", dynamic=True, options={"engine": "host"})
    kept = []  # no address comes again
    with torch.no_grad():
        for call in range(16):
            x, slots, lens = batch(4, call)
            cache = torch.randn(16, 8)
            kept += [cache, expected := cache.clone()]
            with dsv4_compile.uniform_decode() if call % 2 else nullcontext():
                wanted = step(x, slots, expected, lens)
                assert torch.equal(compiled(x, slots, cache, lens), wanted)
            assert torch.equal(cache, expected)
    assert counters.full_replays == 7
    assert InputRole.COPIED_OUT in both()[1]._roles.values()


@pytest.mark.exhaustive
def test_a_weight_that_moves_is_captured_again_in_both() -> None:
    trial = DecodeTrial()
    for query_len in (1, None):
        trial.times(2, 4, query_len)
    trial.model.down[0].data = trial.model.down[0].data.clone()
    for query_len in (1, None):
        with counters.expect(recaptures=1):
            trial.times(2, 4, query_len)


def test_an_op_that_declares_no_effect_may_promise_too() -> None:
    """What it writes through a global has its place in the program."""
    register(note="always")

    def step(x: Tensor) -> Tensor:
        decode.note(x + 1)
        return x * 2

    compiled = torch.compile(step, backend="dsv4_piecewise", dynamic=True, options={"engine": "host"})
    with torch.no_grad(), dsv4_compile.uniform_decode(), counters.expect(full_replays=2):
        for _ in range(3):
            x = torch.randn(4, 8)
            assert torch.equal(compiled(x), x * 2)
            assert torch.equal(NOTED[:4], x + 1)


def test_reset_frees_both() -> None:
    trial = DecodeTrial()
    for query_len in (1, None):
        trial.times(3, 4, query_len)
    programs = [weakref.ref(entry.program.captured[0]) for each in both() for entry in each._cache._programs.values()]
    torch._dynamo.reset()
    assert [program() for program in programs] == [None, None]
    with counters.expect(captures=2):
        for query_len in (1, None):
            trial.times(2, 4, query_len)


def test_nothing_of_it_waits_for_the_garbage_collector() -> None:
    trial = DecodeTrial()
    for query_len in (1, None):
        trial.times(3, 4, query_len)
    alive = [weakref.ref(each) for each in both()]
    gc.collect()
    gc.disable()
    try:
        del trial
        torch._dynamo.reset()
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.exhaustive
def test_a_profiler_tells_which_graph_served() -> None:
    trial = DecodeTrial()
    trial.times(3, 4, query_len=1)
    with torch.profiler.profile() as profiler:
        trial.call(4, query_len=1)
    names = {event.key for event in profiler.key_averages()}
    assert "whole_step" in names
    assert any(name.startswith("full graph ") and name.endswith(", 1)") for name in names)


def test_a_dump_has_both_programs(tmp_path: Path) -> None:
    trial = DecodeTrial(dump_dir=str(tmp_path))
    for query_len in (1, None):
        trial.times(3, 4, query_len)
    folder = tmp_path / "graph_0"
    programs = sorted(path.name for path in folder.glob("program_*.py"))
    assert len(programs) == 2
    assert programs[1].startswith("program_full_4_")
    assert (folder / programs[1]).read_text().count("_replay()") == 1
    assert "attend" in (folder / "whole_step.py").read_text()
