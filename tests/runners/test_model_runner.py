"""The runners: any schedule gives the logits of one full prefill, in step tensors and memory as promised."""

from __future__ import annotations

import random
import sys
from dataclasses import fields

import pytest
import torch
from paging import tiny_config
from runner_helpers import (
    RUNNERS,
    Recorder,
    assert_all_blocks_free,
    make_prompts,
    make_runner,
    one_prefill,
)
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_compile.errors import RunnerError
from dsv4_compile.log import progress_bar
from dsv4_compile.models.deepseek_v4 import AttentionStack, DeepseekV4Attention, StepState
from dsv4_compile.runners import ModelRunner, ModelRunnerV1, ModelRunnerV2
from dsv4_compile.runners.batch import TOKEN_PADDING, BatchBuilder, block_groups
from dsv4_compile.runners.block_allocator import BlockAllocator
from dsv4_compile.runners.requests import Request
from dsv4_compile.runners.scheduler import Chunk


@pytest.fixture(scope="module")
def stack() -> AttentionStack:
    return AttentionStack(tiny_config(sliding_window=128))


# one request's logits do not depend on what runs beside it, on chunking, padding, or on which blocks it has


@pytest.mark.sampled(5)
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
    host = BatchBuilder(config, blocks, 3).build([chunk.span() for chunk in chunks])
    fields = {name: value.tolist() for name, value in host.items()}

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
    for too_many in (-1, runner.limits.max_num_batched_tokens + 1):
        with pytest.raises(RunnerError, match=rf"padding_inputs\({too_many}\): a step has at most \d+ tokens"):
            runner.padding_inputs(too_many)
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


@pytest.mark.sampled(2)
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
    assert (runner.num_active, runner._scheduler._waiting, runner._scheduler._running) == (0, [], [])


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
