"""The runners: any schedule gives the tokens of one full prefill, and a bad request harms nobody else."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import tiny_config
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_compile.errors import InvalidRequestError, OutOfBlocksError, RunnerError
from dsv4_compile.models.deepseek_v4 import AttentionStack, DeepseekV4Attention, StepState
from dsv4_compile.runners import ModelRunner, ModelRunnerV1, ModelRunnerV2, StepResult
from dsv4_compile.runners.batch import TOKEN_PADDING, BatchBuilder, block_groups
from dsv4_compile.runners.block_allocator import BlockAllocator
from dsv4_compile.runners.limits import RunnerLimits
from dsv4_compile.runners.progress import progress_bar
from dsv4_compile.runners.requests import Request
from dsv4_compile.runners.scheduler import Chunk, Scheduler

RUNNERS = (ModelRunnerV1, ModelRunnerV2)
VOCAB = tiny_config().vocab_size


@pytest.fixture(scope="module")
def stack() -> AttentionStack:
    return AttentionStack(tiny_config(sliding_window=128))


def make_runner(model: nn.Module, runner: type[ModelRunner] = ModelRunnerV1, **options: object) -> ModelRunner:
    defaults = {"max_num_reqs": 3, "max_num_batched_tokens": 48, "max_model_len": 400}
    return runner(model, model.config, **{**defaults, **options})


def make_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def finish(runner: ModelRunner) -> dict[int, list[int]]:
    finished: dict[int, list[int]] = {}
    while runner.num_active:
        finished.update(runner.step().finished)
    return finished


def assert_all_blocks_free(runner: ModelRunner) -> None:
    for group, total in runner.blocks.num_blocks.items():
        assert runner.blocks.free_blocks(group) == total


class Recorder(nn.Module):
    """Keeps the logits and the inputs of every call of the model it wraps; `before` may break a call."""

    def __init__(self, model: nn.Module, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.model, self.config, self.before = model, model.config, before
        self.logits: list[Tensor] = []
        self.inputs: list[tuple[Tensor, Tensor, StepState]] = []

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepState) -> Tensor:
        self.before()
        self.inputs.append((input_ids, positions, step))
        self.logits.append(self.model(input_ids, positions, step))
        return self.logits[-1]


def one_prefill(model: nn.Module, tokens: list[int]) -> Tensor:
    """Logits [len(tokens), vocab] of a single step over all tokens."""
    recorder = Recorder(model)
    runner = make_runner(recorder, max_num_batched_tokens=512, max_model_len=512)
    runner.add_request(tokens, 1)
    runner.step()
    return recorder.logits[0]


# one request's logits do not depend on what runs beside it, on chunking, padding, or on which blocks it has


@pytest.mark.parametrize("buckets", [None, (16, 48)])
@pytest.mark.parametrize("runner_type", RUNNERS)
@pytest.mark.parametrize(
    ("seed", "sizes"),
    [
        (0, {}),
        (1, {"sliding_window": 10, "swa_block_size": 4, "compressed_block_size": 128}),
        (2, {"ratios": (128, 4, 4), "swa_block_size": 32}),
    ],
)
def test_any_schedule_equals_one_full_prefill(
    seed: int, sizes: dict[str, object], runner_type: type[ModelRunner], buckets: tuple[int, ...] | None
) -> None:
    rng = random.Random(seed)
    recorder = Recorder(AttentionStack(tiny_config(**{"sliding_window": 128, **sizes}), seed=seed))
    budget = 48 if buckets else rng.choice([7, 33, 100])
    runner = make_runner(recorder, runner_type, max_num_batched_tokens=budget, buckets=buckets)
    prompts = make_prompts(*(rng.choice([1, 3, 4, 8, 60, 127, 128, 129, 255, 290]) for _ in range(5)), seed=seed)
    arrivals = sorted((rng.randrange(12), index) for index in range(5))
    logits: dict[int, list[Tensor]] = {}
    answers: dict[int, list[int]] = {}
    of_prompt: dict[int, int] = {}
    for step_number in range(1000):
        while arrivals and arrivals[0][0] <= step_number:
            index = arrivals.pop(0)[1]
            of_prompt[runner.add_request(prompts[index], rng.randrange(1, 20))] = index
        runner.blocks.shuffle(rng)
        result = runner.step()
        start = 0
        for request, first, end in result.scheduled:
            logits.setdefault(request, []).append(recorder.logits[-1][start : start + end - first].clone())
            start += end - first
        answers.update(result.finished)
        if not arrivals and not runner.num_active:
            break
    assert len(answers) == 5
    assert_all_blocks_free(runner)
    for request, answer in answers.items():
        tokens = prompts[of_prompt[request]] + answer[:-1]  # the last one was never fed back
        torch.testing.assert_close(torch.cat(logits[request]), one_prefill(recorder.model, tokens), rtol=0, atol=1e-5)


def test_the_fields_of_a_step_say_what_the_block_tables_say() -> None:
    config = tiny_config(swa_block_size=8, compressed_block_size=128)
    groups = block_groups(config)
    blocks = BlockAllocator(groups, {group.name: 200 for group in groups}, 3, 400)
    blocks.shuffle(random.Random(0))
    decode = Request(0, list(range(40, 60)), 18, 5, num_computed=19, row=blocks.open_row())
    prefill = Request(1, list(range(90)) * 3, 270, 5, num_computed=120, row=blocks.open_row())
    chunks = (Chunk(decode, 19, 20), Chunk(prefill, 120, 140))
    for chunk in chunks:
        blocks.extend(chunk.request.row, chunk.end)
    fields = {name: value.tolist() for name, value in BatchBuilder(config, blocks, 3).build(chunks).items()}

    tokens = [(chunk.request, p) for chunk in chunks for p in range(chunk.start, chunk.end)]
    assert fields["input_ids"] == [request.tokens[p] for request, p in tokens]
    assert fields["positions"] == [p for _, p in tokens]
    assert fields["token_to_req"] == [request.id for request, _ in tokens]
    assert (fields["query_start_loc"], fields["seq_lens"]) == ([0, 1, 21, 21], [20, 140, 0])
    for name, group, size in (
        ("swa", "swa", 8),
        ("c4_state", "c4_state", config.c4_state_block_size),
        ("c128_state", "c128_state", config.c128_state_block_size),
    ):
        table = blocks.table(group)
        slots = [int(table[request.row, p // size]) * size + p % size for request, p in tokens]
        assert fields[f"{name}_slot_mapping"] == slots
        assert fields[f"{name}_block_table"] == [*table[[decode.row, prefill.row]].tolist(), [-1] * table.shape[1]]
    for ratio, closing in ((4, {19, 123, 127, 131, 135, 139}), (128, {127})):
        table, size = blocks.table("compressed"), 128 // ratio
        slots = [int(table[r.row, p // 128]) * size + p % 128 // ratio if p in closing else -1 for r, p in tokens]
        assert fields[f"c{ratio}_slot_mapping"] == slots


def test_padded_steps_have_the_size_of_their_bucket(stack: AttentionStack) -> None:
    recorder = Recorder(stack)
    runner = make_runner(recorder, max_num_batched_tokens=100, buckets=(40, 4, 20))
    runner.generate(make_prompts(90, 3), 3)
    assert {len(input_ids) for input_ids, _, _ in recorder.inputs} == {93, 4}  # 93 > 40: unpadded; 2 decodes: 4


def test_decodes_come_first_and_the_budget_holds(stack: AttentionStack) -> None:
    runner = make_runner(stack, max_num_batched_tokens=20)
    decoding = runner.add_request([1, 2], 30)
    runner.step()
    prefilling = runner.add_request([3] * 50, 2)
    scheduled = [runner.step().scheduled for _ in range(3)]
    assert scheduled == [
        ((decoding, 2, 3), (prefilling, 0, 19)),
        ((decoding, 3, 4), (prefilling, 19, 38)),
        ((decoding, 4, 5), (prefilling, 38, 50)),
    ]


def test_a_request_joins_only_with_blocks_for_its_whole_chunk(stack: AttentionStack) -> None:
    runner = make_runner(stack, num_blocks={"c4_state": 10})
    first, second = runner.add_request([1] * 20, 2), runner.add_request([2] * 40, 2)
    # 5 blocks of 4 tokens are left, and a chunk of 48 - 20 tokens needs 7; later 47 tokens need 10, and 3 are held
    assert [runner.step().scheduled for _ in range(3)] == [((first, 0, 20),), ((first, 20, 21),), ((second, 0, 40),)]


def test_a_prompt_that_is_not_complete_yields_no_token(stack: AttentionStack) -> None:
    runner = make_runner(stack, max_num_batched_tokens=10)
    request = runner.add_request([1] * 25, 2)
    assert [runner.step().new_tokens.keys() for _ in range(4)] == [set(), set(), {request}, {request}]


def test_stop_tokens_end_an_answer_and_belong_to_it(stack: AttentionStack) -> None:
    prompts = make_prompts(5, 9)
    full = make_runner(stack).generate(prompts, 20)
    stop = full[0][4]
    expected = [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in full]
    assert make_runner(stack).generate(prompts, 20, stop_tokens=[stop]) == expected


# what differs between the two


def test_v1_makes_new_tensors_every_step(stack: AttentionStack) -> None:
    recorder = Recorder(stack)
    make_runner(recorder, ModelRunnerV1, buckets=(4, 48)).generate(make_prompts(40, 3), 5)
    steps = [step for _, _, step in recorder.inputs]
    for field in fields(StepState):
        assert len({getattr(step, field.name).data_ptr() for step in steps}) == len(steps)
        assert not any(hasattr(getattr(step, field.name), "_dynamo_static_input_type") for step in steps)


def test_v2_refills_the_same_static_buffers(stack: AttentionStack) -> None:
    recorder = Recorder(stack)
    make_runner(recorder, ModelRunnerV2, buckets=(4, 48)).generate(make_prompts(40, 3), 5)
    assert {len(input_ids) for input_ids, _, _ in recorder.inputs} == {4, 48}
    steps = [step for _, _, step in recorder.inputs]
    for field in fields(StepState):
        assert len({getattr(step, field.name).data_ptr() for step in steps}) == 1
        assert all(getattr(step, field.name)._dynamo_static_input_type == "unguarded" for step in steps)


def test_v2_keeps_the_padding_value_behind_a_short_step(stack: AttentionStack) -> None:
    recorder = Recorder(stack)
    runner = make_runner(recorder, ModelRunnerV2)
    runner.add_request(make_prompts(40)[0], 2)
    runner.step()
    runner.step()
    input_ids, positions, step = recorder.inputs[-1]
    assert len(input_ids) == 1
    for name, padding in TOKEN_PADDING.items():
        tensor = {"input_ids": input_ids, "positions": positions}.get(name, getattr(step, name, None))
        whole = torch.as_strided(tensor, (48,), (1,), 0)
        assert (whole[1:] == padding).all(), name


@pytest.mark.parametrize("runner_type", RUNNERS)
def test_a_step_of_padding_writes_nothing(stack: AttentionStack, runner_type: type[ModelRunner]) -> None:
    runner = make_runner(stack, runner_type)
    runner.add_request(make_prompts(30)[0], 4)
    runner.step()
    before = {name: buffer.clone() for name, buffer in stack.named_buffers() if "cache" in name}
    inputs = runner.padding_inputs(7)
    assert (inputs.step.token_to_req == -1).all()
    with torch.no_grad():
        stack(inputs.input_ids, inputs.positions, inputs.step)
    after = dict(stack.named_buffers())
    assert all(torch.equal(buffer, after[name]) for name, buffer in before.items())


@pytest.mark.parametrize("runner_type", RUNNERS)
def test_a_compiled_model_is_one_graph_for_all_token_counts(
    stack: AttentionStack, runner_type: type[ModelRunner]
) -> None:
    prompts = make_prompts(40, 130, 2)
    expected = make_runner(stack).generate(prompts, 6)
    graphs: list[list[object]] = []

    def keep(graph: fx.GraphModule, inputs: list[object]) -> fx.GraphModule:
        graphs.append(inputs)
        return graph

    compiled = torch.compile(stack, backend=keep, fullgraph=True, dynamic=True)
    limits = {"max_num_reqs": 3, "max_num_batched_tokens": 48, "max_model_len": 400}
    runner = runner_type(compiled, stack.config, **limits, attention=stack)
    assert runner.generate(prompts, 6) == expected
    assert len(graphs) == 1
    assert sum(isinstance(value, torch.SymInt) for value in graphs[0]) == 1  # the token count is all that varies


# errors: clear, and nobody else notices


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
        if not len(scheduler):
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


# memory and progress


class PeakMemory(TorchDispatchMode):
    """Bytes of the tensors that are alive at once, counting those made while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return made


@pytest.mark.parametrize("runner_type", RUNNERS)
def test_peak_memory_does_not_grow_with_finished_requests(
    stack: AttentionStack, runner_type: type[ModelRunner]
) -> None:
    runner = make_runner(stack, runner_type)
    prompts = make_prompts(40, 3)
    peaks = []
    with PeakMemory() as memory:
        for _ in range(25):  # 50 requests
            memory.peak = 0
            runner.generate(prompts, 3)
            peaks.append(memory.peak)
    assert 0 < peaks[0] <= peaks[1]  # a cache counts from when it is first written
    assert len(set(peaks[1:])) == 1
    assert (runner.num_active, len(runner._scheduler)) == (0, 0)


def test_progress_is_shown_on_request_only(stack: AttentionStack, capsys: pytest.CaptureFixture[str]) -> None:
    runner = make_runner(stack)
    runner.generate([[1]], 2)
    assert capsys.readouterr().err == ""  # not a terminal
    runner.generate([[1]], 2, progress=True)
    assert "0/2 [00:00<?, ?tok/s]" in capsys.readouterr().err


def test_progress_needs_no_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress_bar(2, "tok", show=True) as advance:
        advance(2)
    assert capsys.readouterr().err == ""


def test_bfloat16_caches_follow_the_model() -> None:
    model = AttentionStack(tiny_config(sliding_window=128)).to(torch.bfloat16)
    answers = make_runner(model, ModelRunnerV2).generate(make_prompts(140, 9), 5)
    assert [len(answer) for answer in answers] == [5, 5]
    layer = next(layer for layer in model.modules() if isinstance(layer, DeepseekV4Attention) and layer.compressor)
    assert layer.swa_cache.dtype == layer.kv_cache.dtype == torch.bfloat16
    assert layer.compressor.state_cache.dtype == torch.float32
