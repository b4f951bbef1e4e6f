"""Each rule is needed: engines that lack one fail an example.

A lax engine is the host engine with one rule taken out. Without these tests an example could hold for the wrong
reason, and say nothing.
"""

import contextlib
import gc

import pytest
import torch
from engine_examples import EXAMPLES
from engine_streams import EXAMPLES as STREAMS
from engine_surroundings import EXAMPLES as SURROUNDINGS

from dsv4_compile.errors import CaptureError, StreamRaceError
from dsv4_compile.runtime.engines import capture_state
from dsv4_compile.runtime.engines.base import LaunchRecord
from dsv4_compile.runtime.engines.host import engine as host
from dsv4_compile.runtime.engines.host.engine import HostEngine
from dsv4_compile.runtime.engines.host.launch import Operand
from dsv4_compile.runtime.engines.host.op_kinds import OpKind
from dsv4_compile.runtime.engines.host.pool import HostPool
from dsv4_compile.runtime.engines.host.recorder import Recorder

RULES = EXAMPLES | SURROUNDINGS | STREAMS
LAX = []


def lacks(*rules):
    """File an engine class together with the examples that it has to fail."""

    def register(engine_class):
        LAX.extend(pytest.param(engine_class, rule, id=f"{engine_class.__name__}-{rule}") for rule in rules)
        return engine_class

    return register


@pytest.mark.parametrize(("engine_class", "rule"), LAX)
def test_a_lax_engine_fails_the_example(engine_class, rule):
    with pytest.raises((AssertionError, pytest.fail.Exception, StreamRaceError)):
        RULES[rule](engine_class())


class OneBlockForAllStreams(HostPool):
    def take(self, nbytes, stream=0):
        return super().take(nbytes)


@lacks("a_stream_does_not_get_memory_that_another_stream_still_uses")
class StreamsShareMemory(HostEngine):
    """The race checker sees it, too."""

    def make_pool(self):
        return OneBlockForAllStreams()


@lacks("streams_are_offered_to_a_capture_that_asks_for_them_and_to_nobody_else")
class OffersNoStreams(HostEngine):
    def capture(self, run, pool, *, name, streams=0):
        return super().capture(run, pool, name=name)


class LaxRecorder(HostEngine):
    """A host engine with another recorder."""

    recorder_class = Recorder

    def make_recorder(self, pool, name):
        return self.recorder_class(pool, name, self._meta_cache)


@lacks(
    "a_replay_runs_the_work_of_all_streams",
    "the_next_graph_sees_the_work_of_all_streams",
    "two_graphs_use_the_same_streams",
)
class ForgetsSideStreams(LaxRecorder):
    class recorder_class(Recorder):  # noqa: N801
        def _add(self, launch):
            if self.streams.current == 0:
                super()._add(launch)


@lacks("a_warm_up_on_streams_runs_the_work")
class WarmsUpOnlyInOrder(HostEngine):
    def warm_up(self, run, *, streams=0):
        if not streams:
            run()


@lacks(
    "no_kernel_runs_at_capture",
    "a_value_is_not_there_before_the_replay",
    "a_mutation_happens_once_per_replay",
    "recording_draws_no_random_numbers",
)
class RunsAtCapture(HostEngine):
    def capture(self, run, pool, *, name, streams=0):
        recorder = self.make_recorder(pool, name)
        recorder.run(run)
        graph = LaunchRecord(name, recorder.finish(), recorder.used_blocks())
        graph.replay()
        return graph


@lacks(
    "host_code_runs_once",
    "branches_are_frozen",
    "branches_inside_python_ops_are_frozen",
    "work_inside_python_ops_is_recorded",
    "numbers_are_baked",
    "addresses_are_baked",
    "a_tensor_that_moves_is_not_followed",
)
class RunsPythonAtReplay(HostEngine):
    def capture(self, run, pool, *, name, streams=0):
        super().capture(run, pool, name=name)
        return LaunchRecord(name, [run], [])


@lacks("branches_inside_python_ops_are_frozen", "work_inside_python_ops_is_recorded")
class KeepsPythonOpsWhole(LaxRecorder):
    class recorder_class(Recorder):  # noqa: N801
        def _check(self, func, args, kwargs):
            kind = super()._check(func, args, kwargs)
            return OpKind.LAUNCH if kind is OpKind.PYTHON else kind


@lacks("copies_that_look_like_views_are_recorded")
class TakesCompositeOpsForViews(LaxRecorder):
    class recorder_class(Recorder):  # noqa: N801
        def _check(self, func, args, kwargs):
            kind = super()._check(func, args, kwargs)
            return OpKind.METADATA if kind is OpKind.COMPOSITE and func._opname == "reshape" else kind


@lacks("values_read_on_the_host_are_refused", "sizes_that_depend_on_data_are_refused")
class BakesWhatIsReadBack(LaxRecorder):
    class recorder_class(Recorder):  # noqa: N801
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)


@lacks("lists_read_on_the_host_are_refused")
class WatchesOnlyTheDispatcher(LaxRecorder):
    class recorder_class(Recorder):  # noqa: N801
        def run(self, function):
            with self:
                return function()


@lacks("a_refusal_cannot_be_swallowed")
class ForgetsRefusals(LaxRecorder):
    class recorder_class(Recorder):  # noqa: N801
        def finish(self):
            self._failure = self._guard.failure = None
            return super().finish()


@lacks("a_tensor_that_moves_is_not_followed", "later_changes_of_sizes_do_not_matter")
class KeepsTensorsInsteadOfAliases(LaxRecorder):
    class recorder_class(Recorder):  # noqa: N801
        def _operand(self, tensor):
            operand = super()._operand(tensor)
            return operand if operand.block else Operand(tensor)


class LaxPool(HostEngine):
    """A host engine with another pool."""

    pool_class = HostPool

    def make_pool(self):
        return self.pool_class()


@lacks("dead_temporaries_are_reused_by_the_next_capture")
class NeverReusesMemory(LaxPool):
    class pool_class(HostPool):  # noqa: N801
        def is_reusable(self, block):
            return False


@lacks("living_temporaries_are_left_alone", "views_keep_a_temporary_alive")
class ReusesMemoryInUse(LaxPool):
    class pool_class(HostPool):  # noqa: N801
        def is_reusable(self, block):
            return block not in self.taken and not self.taken.append(block)

        def __init__(self):
            super().__init__()
            self.taken = []


@lacks("random_numbers_are_fresh_in_every_replay", "random_numbers_follow_the_generator")
class RepeatsRandomNumbers(HostEngine):
    def capture(self, run, pool, *, name):
        graph, state = super().capture(run, pool, name=name), torch.get_rng_state()

        def replay():
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                graph.replay()

        return LaunchRecord(name, [replay], [graph])


@lacks("random_numbers_follow_the_generator")
class DrawsInReverse(HostEngine):
    def capture(self, run, pool, *, name):
        graph = super().capture(run, pool, name=name)
        draws = [index for index, launch in enumerate(graph._launches) if is_draw(launch)]
        launches = list(graph._launches)
        launches[draws[0]], launches[draws[1]] = launches[draws[1]], launches[draws[0]]
        return LaunchRecord(name, launches, [graph])


def is_draw(launch):
    return any(name in str(launch) for name in ("rand", "bernoulli", "normal", "uniform"))


@lacks("a_generator_of_the_user_is_drawn_from")
class DrawsFromTheDefaultGenerator(LaxRecorder):
    class recorder_class(Recorder):  # noqa: N801
        def _make_results(self, kind, func, args, kwargs):
            kwargs = {name: None if name == "generator" else value for name, value in kwargs.items()}
            return super()._make_results(kind, func, args, kwargs)


@lacks("garbage_collection_is_left_as_it_was")
class AlwaysEnablesCollection(HostEngine):
    def capture(self, run, pool, *, name):
        try:
            return super().capture(run, pool, name=name)
        finally:
            gc.enable()


@lacks("a_released_graph_refuses_to_replay")
class ReplaysAfterRelease(HostEngine):
    def capture(self, run, pool, *, name):
        graph = super().capture(run, pool, name=name)
        return LaunchRecord(name, _Unclearable(graph._launches), [graph])


class _Unclearable(list):
    def __setitem__(self, key, value):
        pass


@lacks("a_graph_without_kernels_is_warned_about")
class SaysNothingOfEmptyGraphs(LaxRecorder):
    class recorder_class(Recorder):  # noqa: N801
        def finish(self):
            return super().finish() or [int]


@lacks("allocated_memory_is_aligned_poisoned_and_writable_in_any_mode")
class AllocatesInTheModeOfTheCaller(HostEngine):
    def allocate(self, nbytes, device):
        return super().allocate(nbytes, device).clone()


@lacks("allocated_memory_is_aligned_poisoned_and_writable_in_any_mode")
class AllocatesZeros(HostEngine):
    def allocate(self, nbytes, device):
        return super().allocate(nbytes, device).zero_()


@lacks("warming_up_runs_for_real")
class RecordsTheWarmUp(HostEngine):
    def warm_up(self, run):
        self.capture(run, self.make_pool(), name="the warm-up")


class SharedByThreads:
    """What is thread local in the package."""

    name = recorder = streams = None


PATCHED = {
    "garbage_is_not_collected_while_recording": (capture_state, "_paused_gc", contextlib.nullcontext),
    "autocast_keeps_no_cast_of_a_recording": (capture_state, "_no_autocast_cache", contextlib.nullcontext),
    "captures_of_two_threads_exclude_each_other": (capture_state, "_capture_lock", contextlib.nullcontext()),
    "only_the_recording_thread_is_capturing": (capture_state, "_recorded", SharedByThreads()),
    "autocast_is_recorded_and_not_applied_twice": (host, "HostLaunchRecord", LaunchRecord),
}


@pytest.mark.parametrize("rule", PATCHED)
def test_an_engine_in_lax_surroundings_fails_the_example(rule, monkeypatch):
    monkeypatch.setattr(*PATCHED[rule])
    with pytest.raises((AssertionError, CaptureError)):
        RULES[rule](HostEngine())


@contextlib.contextmanager
def careless_recording(name, recorder):
    """What surrounds a capture without care for nesting and exceptions."""
    capture_state._recorded.name = name
    gc.disable()
    yield
    capture_state._recorded.name = None
    gc.enable()


CARELESS = [
    "a_capture_inside_a_capture_is_refused",
    "after_a_refusal_the_next_capture_works",
    "an_exception_leaves_nothing_half_made",
]


@pytest.mark.parametrize("rule", CARELESS)
def test_a_careless_engine_fails_the_example(rule, monkeypatch):
    monkeypatch.setattr(host, "recording", careless_recording)
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            RULES[rule](HostEngine())
    finally:
        capture_state._recorded.name = None
        gc.enable()


def test_a_graph_recorded_with_grad_ties_its_results_to_autograd(monkeypatch):
    monkeypatch.setattr(torch, "no_grad", contextlib.nullcontext)
    with pytest.raises((AssertionError, RuntimeError)):
        RULES["a_graph_replays_in_any_mode"](HostEngine())


def test_every_example_fails_on_some_lax_engine():
    on_lax_engines = {rule for case in LAX for rule in case.values[1:]}
    assert on_lax_engines | set(PATCHED) | set(CARELESS) | {"a_graph_replays_in_any_mode"} == set(RULES)
