"""Requests join, wait, are preempted, cancelled or refused: clear errors, and nobody else notices."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import tiny_config
from runner_helpers import (
    RUNNERS,
    VOCAB,
    Recorder,
    assert_all_blocks_free,
    finish,
    make_prompts,
    make_runner,
)
from torch import Tensor, nn

from dsv4_compile.errors import InvalidRequestError, OutOfBlocksError, RunnerError
from dsv4_compile.models.deepseek_v4 import AttentionStack, StepState
from dsv4_compile.runners import ModelRunner, ModelRunnerV1, ModelRunnerV2, StepResult
from dsv4_compile.runners.batch import block_groups
from dsv4_compile.runners.block_allocator import BlockAllocator
from dsv4_compile.runners.limits import RunnerLimits
from dsv4_compile.runners.requests import Request
from dsv4_compile.runners.scheduler import Scheduler


@pytest.fixture(scope="module")
def stack() -> AttentionStack:
    return AttentionStack(tiny_config(sliding_window=128))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("prompt", "new_tokens", "message"),
    [
        ([], 1, "request 2: the prompt is empty"),
        ([1] * 399, 2, "request 2: the prompt has 399 tokens and 2 new ones.* max_model_len is 400"),
        ([1, VOCAB], 1, r"request 2: prompt\[1\] is 97; token ids go from 0 to 96"),
        ([1, 2, -1], 1, r"request 2: prompt\[2\] is -1; token ids go from 0 to 96"),
        ([1.0], 1, r"request 2: prompt\[0\] is 1.0 of type float; token ids must be ints"),
        ([True], 1, r"request 2: prompt\[0\] is True of type bool"),
        (["a"], 1, r"request 2: prompt\[0\] is 'a' of type str"),
        (torch.tensor([1, 2]), 1, r"request 2: prompt\[0\] is tensor\(1\) of type Tensor"),
        ([1], 0, "request 2: max_new_tokens is 0; it must be an int of at least 1"),
        ([1], True, "request 2: max_new_tokens is True"),
    ],
)
@pytest.mark.parametrize("runner_type", RUNNERS)
def test_a_bad_request_is_refused_and_the_others_go_on(
    stack: AttentionStack, runner_type: type[ModelRunner], prompt: list[int], new_tokens: int, message: str
) -> None:
    good = make_prompts(20, 60)
    expected = make_runner(stack, runner_type).generate(good, 4)
    runner = make_runner(stack, runner_type)
    ids = [runner.add_request(tokens, 4) for tokens in good]
    runner.step()
    free = {group: runner.blocks.free_blocks(group) for group in runner.blocks.num_blocks}
    with pytest.raises(InvalidRequestError, match=message):
        runner.add_request(prompt, new_tokens)
    assert free == {group: runner.blocks.free_blocks(group) for group in free}
    answers = finish(runner)
    assert [answers[request] for request in ids] == expected


def test_a_request_that_no_pool_could_hold_is_refused(stack: AttentionStack) -> None:
    runner = make_runner(stack, num_blocks={"compressed": 1})
    good = runner.add_request([1] * 10, 3)
    with pytest.raises(OutOfBlocksError, match="request 1 needs 2 compressed blocks of 256 tokens, and the pool has 1"):
        runner.add_request([1] * 255, 3)
    runner.add_request([1] * 255, 2)  # 256 tokens are cached: the last one of the answer is not
    assert finish(runner).keys() == {good, 2}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("runner_type", "num_blocks", "lengths"),
    [
        (ModelRunnerV1, {"swa": 6}, (100, 120, 110, 70, 90)),
        (ModelRunnerV2, {"compressed": 4}, (230, 220, 235, 240, 20)),
        (ModelRunnerV1, {"c4_state": 7}, (2, 3, 1, 2, 3)),
        (ModelRunnerV2, {"c128_state": 40}, (100, 120, 110, 70, 90)),
    ],
)
def test_without_blocks_the_youngest_waits_and_recomputes(
    stack: AttentionStack, runner_type: type[ModelRunner], num_blocks: dict[str, int], lengths: tuple[int, ...]
) -> None:
    prompts = make_prompts(*lengths)
    expected = make_runner(stack).generate(prompts, 60)
    runner = make_runner(stack, runner_type, num_blocks=num_blocks)
    ids = [runner.add_request(prompt, 60) for prompt in prompts]
    answers: dict[int, list[int]] = {}
    restarts: list[int] = []
    running: set[int] = set()
    while runner.num_active:
        result = runner.step()
        started = [request for request, start, _ in result.scheduled if start == 0]
        assert not running.intersection(started)  # a preempted request sits out at least one step
        running = {request for request, _, _ in result.scheduled} - result.finished.keys()
        restarts += started
        answers.update(result.finished)
    assert [answers[request] for request in ids] == expected
    assert len(restarts) > len(ids)  # somebody was preempted
    assert restarts.count(ids[0]) == 1  # but never the earliest
    assert_all_blocks_free(runner)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_every_request_ends_in_any_pool_that_holds_one(data: st.DataObject) -> None:
    config = tiny_config(sliding_window=16, swa_block_size=8, compressed_block_size=128)
    groups = block_groups(config)
    counts = {group.name: group.peak_blocks(160) + data.draw(st.integers(0, 6)) for group in groups}
    blocks = BlockAllocator(groups, counts, 3, 160)
    scheduler = Scheduler(blocks, max_num_reqs=3, max_num_batched_tokens=data.draw(st.integers(1, 50)))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 60)), min_size=1, max_size=6))
    requests = [Request(id, [0] * prompt, prompt, new) for id, (prompt, new) in enumerate(sizes)]
    for request in requests:
        scheduler.add(request)
    for _ in range(10_000):
        chunks = scheduler.schedule()
        assert 0 < sum(chunk.num_tokens for chunk in chunks) <= scheduler.max_num_batched_tokens
        assert len({chunk.request.row for chunk in chunks}) == len(chunks)
        assert [chunk.num_tokens > 1 for chunk in chunks] == sorted(chunk.num_tokens > 1 for chunk in chunks)
        for chunk in chunks:
            last = chunk.is_last
            scheduler.commit(chunk)
            chunk.request.tokens += [0] * last
            if chunk.request.is_finished:
                scheduler.remove(chunk.request)
        if not (scheduler._waiting or scheduler._running):
            break
    assert all(request.is_finished for request in requests)
    assert all(blocks.free_blocks(name) == count for name, count in counts.items())


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 80), st.integers(0, 9999))
def test_the_default_pools_never_run_out(window: int, max_tokens: int, seed: int) -> None:
    rng = random.Random(seed)
    config = tiny_config(sliding_window=window, swa_block_size=8)
    groups = block_groups(config)
    limits = RunnerLimits(config=config, max_num_reqs=3, max_num_batched_tokens=max_tokens, max_model_len=300)
    blocks = BlockAllocator(groups, limits.count_blocks(groups, {}), 3, 300)
    lengths = {blocks.open_row(): 0 for _ in range(3)}
    while min(lengths.values()) < 300:
        budget = max_tokens
        for row, length in lengths.items():
            chunk = min(rng.randint(0, max_tokens), budget, 300 - length)
            assert blocks.tokens_that_fit(row, length, chunk) == chunk
            blocks.extend(row, length + chunk)
            lengths[row], budget = length + chunk, budget - chunk
        for row, length in lengths.items():
            blocks.release_before(row, length)


@pytest.mark.parametrize("runner_type", RUNNERS)
def test_a_failing_model_call_changes_no_request(stack: AttentionStack, runner_type: type[ModelRunner]) -> None:
    prompts = make_prompts(70, 20, 5)
    expected = make_runner(stack).generate(prompts, 8)
    calls = iter(range(1000))

    def fail_sometimes() -> None:
        if next(calls) % 3 == 1:
            raise FloatingPointError("a kernel failed")

    runner = make_runner(Recorder(stack, fail_sometimes), runner_type)
    ids = [runner.add_request(prompt, 8) for prompt in prompts]
    answers: dict[int, list[int]] = {}
    failures = 0
    while runner.num_active:
        try:
            answers.update(runner.step().finished)
        except FloatingPointError:
            failures += 1
    assert failures > 2
    assert [answers[request] for request in ids] == expected
    assert_all_blocks_free(runner)


def test_a_cancelled_request_gives_its_blocks_back(stack: AttentionStack) -> None:
    prompts = make_prompts(20, 60, 30, 10)
    expected = make_runner(stack).generate(prompts, 10)
    runner = make_runner(stack)
    ids = [runner.add_request(prompt, 10) for prompt in prompts]
    for _ in range(4):
        runner.step()
    runner.cancel_request(ids[1])  # it runs
    answers = finish(runner)
    assert {ids.index(request): answer for request, answer in answers.items()} == {
        index: expected[index] for index in (0, 2, 3)
    }
    assert_all_blocks_free(runner)
    with pytest.raises(InvalidRequestError, match="request 1 is not active"):
        runner.cancel_request(ids[1])


def test_a_waiting_request_can_be_cancelled(stack: AttentionStack) -> None:
    runner = make_runner(stack)
    ids = [runner.add_request([1, 2], 2) for _ in range(5)]
    runner.step()
    runner.cancel_request(ids[4])
    assert finish(runner).keys() == set(ids[:4])


def test_generate_refuses_a_bad_prompt_before_it_runs_any(stack: AttentionStack) -> None:
    recorder = Recorder(stack)
    runner = make_runner(recorder)
    with pytest.raises(InvalidRequestError, match=r"prompt 1: prompt\[0\] is 97"):
        runner.generate([[1, 2], [VOCAB]], 3)
    assert (recorder.logits, runner.num_active) == ([], 0)
    assert len(runner.generate([[1, 2]], 3)[0]) == 3


def test_generate_needs_an_idle_runner(stack: AttentionStack) -> None:
    runner = make_runner(stack)
    runner.add_request([1], 2)
    with pytest.raises(RunnerError, match="generate needs an idle runner, and 1 requests are active"):
        runner.generate([[1]], 1)
    assert len(finish(runner)) == 1


def test_generate_leaves_an_idle_runner_when_the_model_fails(stack: AttentionStack) -> None:
    def fail() -> None:
        raise FloatingPointError("a kernel failed")

    runner = make_runner(Recorder(stack, fail))
    with pytest.raises(FloatingPointError, match="a kernel failed"):
        runner.generate(make_prompts(20, 30, 4, 5), 3)
    assert runner.num_active == 0
    assert_all_blocks_free(runner)


def test_an_idle_runner_does_nothing(stack: AttentionStack) -> None:
    recorder = Recorder(stack)
    assert make_runner(recorder).step() == StepResult(scheduled=(), new_tokens={}, finished={})
    assert make_runner(recorder).generate([], 3) == []
    assert recorder.logits == []


def test_a_second_runner_on_the_model_is_noticed_by_the_first(stack: AttentionStack) -> None:
    first = make_runner(stack)
    first.add_request([1, 2, 3], 2)
    second = make_runner(stack)
    with pytest.raises(RunnerError, match="no longer have this runner's caches"):
        first.step()
    assert len(second.generate([[1, 2, 3]], 2)[0]) == 2


def test_a_model_without_our_layers_is_refused() -> None:
    with pytest.raises(RunnerError, match="no DeepseekV4Attention layer in Linear"):
        ModelRunnerV1(nn.Linear(2, 2), tiny_config(), max_num_reqs=2, max_num_batched_tokens=8, max_model_len=8)


def test_logits_of_the_wrong_shape_are_refused(stack: AttentionStack) -> None:
    class LastOnly(Recorder):
        def forward(self, input_ids: Tensor, positions: Tensor, step: StepState) -> Tensor:
            return super().forward(input_ids, positions, step)[-1:]

    runner = make_runner(LastOnly(stack))
    runner.add_request([1, 2, 3], 2)
    with pytest.raises(RunnerError, match=r"logits of shape \(1, 97\) for 3 tokens"):
        runner.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_reqs": 1}, r"max_num_reqs is 1; it must be an int, at least 2 \(a request dimension"),
        ({"max_num_batched_tokens": 513}, "max_num_batched_tokens is 513; it must be an int, from 1 to 512"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_model_len": 1025}, "max_model_len is 1025; .* from 2 to 1024 .*max_position_embeddings"),
        ({"max_model_len": "9"}, "max_model_len is '9'"),
        ({"buckets": (8, 64)}, "bucket is 64; it must be an int, from 1 to 48"),
        ({"num_blocks": {"sva": 3}}, "unknown group 'sva'; the groups are swa, compressed, c4_state, c128_state"),
        ({"num_blocks": {"swa": 0}}, r"num_blocks\['swa'\] is 0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(stack: AttentionStack, options: dict[str, object], message: str) -> None:
    with pytest.raises(RunnerError, match=message):
        make_runner(stack, **options)
