"""The runners say which steps are uniform decode, and a model with capturable split ops replays those as one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafting import DraftingStack, Script, WithStreams, drafting_config
from paging import tiny_config
from runner_helpers import RUNNERS, VOCAB, Recorder, finish, make_prompts, make_runner
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile import counters, uniform_query_len
from dsv4_compile.errors import CaptureError
from dsv4_compile.models.deepseek_v4 import AttentionStack, StepState
from dsv4_compile.runners import ModelRunner, ModelRunnerV2

WINDOW_ONLY = tiny_config((0, 0))  # no compressed entries, whose number `forward_mqa` asks the device for
STEP_STATE = ("token_to_req", "swa_block_table", "block_table")


@pytest.mark.parametrize("runner_class", RUNNERS)
def test_a_step_is_said_to_be_decode_where_each_request_has_one_token(runner_class: type[ModelRunner]) -> None:
    said: list[int | None] = []
    model = Recorder(AttentionStack(WINDOW_ONLY), before=lambda: said.append(uniform_query_len()))
    runner = make_runner(model, runner_class)
    steps = []
    for prompt in make_prompts(5, 1, 3):
        runner.add_request(prompt, 4)
        steps.append(runner.step())
    while runner.num_active:
        steps.append(runner.step())
    wanted = [1 if all(end - start == 1 for _, start, end in step.scheduled) else None for step in steps]
    assert said == wanted
    assert said[:3] == [None, 1, None]  # a prompt of one token beside a decode is no other work
    assert said[3] == 1
    assert uniform_query_len() is None


class Said(nn.Module):
    """A model or drafter, and what was said of each of its calls."""

    def __init__(self, called: Any, config: Any = None) -> None:
        super().__init__()
        self.called, self.config = called, config
        self.said: list[int | None] = []

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepState, *streams: Tensor) -> Any:
        self.said.append(uniform_query_len())
        return self.called(input_ids, positions, step, *streams)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("runner_class", RUNNERS)
def test_a_step_with_drafts_is_decode_in_all_its_calls(runner_class: type[ModelRunner], count: int) -> None:
    """Each request has rows for all drafts, also where one missed; its second draft is made from one row."""
    model = Said(WithStreams(AttentionStack(WINDOW_ONLY)), WINDOW_ONLY)
    drafter = Said(Script([*range(60)], lambda place: place % 5 == 0, VOCAB))
    options = {"drafter": drafter, "num_draft_tokens": count, "attention": model.called.model}
    runner = make_runner(model, runner_class, **options)
    runner.add_request(make_prompts(7)[0], 12)
    runner.step()  # 7 rows of a prompt
    second = [1] if count == 2 else []
    assert (model.said, drafter.said) == ([None], [None, *second])
    runner.add_request([3], 5)
    model.said.clear()
    drafter.said.clear()
    finish(runner)
    assert set(model.said) == {1 + count}
    assert set(drafter.said) == {1 + count, *second}
    assert drafter.said.count(1 + count) == len(model.said)
    runner.add_request(make_prompts(9)[0], 6)
    runner.add_request([3], 6)
    runner.step()  # a prompt beside it
    assert (model.said[-1], drafter.said[-1 - len(second)]) == (None, None)
    assert uniform_query_len() is None


def test_nothing_is_said_after_a_step_that_failed() -> None:
    def fail() -> None:
        assert uniform_query_len() == 1
        raise KeyError("on purpose")

    model = Recorder(AttentionStack(WINDOW_ONLY), before=fail)
    runner = make_runner(model)
    runner.add_request([1], 2)
    with pytest.raises(KeyError):
        runner.step()
    assert uniform_query_len() is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"check": "full", "region": "minimal", "aux_streams": 2}], ids=str)
def test_served_tokens_are_those_of_eager(options: dict[str, Any]) -> None:
    dsv4_compile.register_op(
        "dsv4::forward_mqa", role="split", step_state=STEP_STATE, tokens="q", capturable={"cpu": "decode"}
    )
    stack, prompts = AttentionStack(WINDOW_ONLY, seed=3), make_prompts(3, 11, 1, 20)
    limits = {"max_num_reqs": 3, "max_num_batched_tokens": 16, "max_model_len": 64}
    expected = ModelRunnerV2(stack, WINDOW_ONLY, **limits).generate(prompts, 6, progress=False)
    torch._dynamo.reset()
    given = {"engine": "host", "runner": "mrv2", "decode": "full", "max_tokens": 16, **options}
    compiled = torch.compile(stack, backend="dsv4_piecewise", dynamic=True, fullgraph=True, options=given)
    runner = ModelRunnerV2(compiled, WINDOW_ONLY, attention=stack, buckets=(4, 16), **limits)

    def inputs_for(num_tokens: int) -> tuple[Any, ...]:
        inputs = runner.padding_inputs(num_tokens)
        return inputs.input_ids, inputs.positions, inputs.step

    dsv4_compile.capture(compiled, inputs_for, [4, 16], progress=False)
    with dsv4_compile.uniform_decode():
        dsv4_compile.capture(compiled, inputs_for, [4], progress=False)
    before = counters.snapshot()
    with counters.expect(captures=0, uncaptured_calls=0, recaptures=0):
        assert runner.generate(prompts, 6, progress=False) == expected
    replays = counters.replays - before["replays"]
    full = counters.full_replays - before["full_replays"]
    assert 0 < full < replays
    assert counters.eager_op_calls - before["eager_op_calls"] == 2 * (replays - full)  # two layers


@pytest.mark.exhaustive
def test_the_op_in_torch_would_break_the_promise_of_its_kernels() -> None:
    """It asks the device for the number of compressed entries, which the capture refuses and names."""
    dsv4_compile.register_op(
        "dsv4::forward_mqa", role="split", step_state=STEP_STATE, tokens="q", capturable={"cpu": "decode"}
    )
    config = tiny_config((128,))
    stack = AttentionStack(config)
    given = {"engine": "host", "runner": "mrv2"}
    compiled = torch.compile(stack, backend="dsv4_piecewise", dynamic=True, fullgraph=True, options=given)
    runner = ModelRunnerV2(
        compiled, config, attention=stack, max_num_reqs=3, max_num_batched_tokens=16, max_model_len=64
    )
    with pytest.raises(
        CaptureError,
        match=r"split op dsv4::forward_mqa\.default is registered with capturable='decode', but .*in attend",
    ):
        runner.generate(make_prompts(3, 5), 6, progress=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 2])
def test_steps_with_drafts_replay_as_one_graph_each(count: int) -> None:
    """Verification and draft have rows for all drafts, the second draft has one row for each request."""
    dsv4_compile.register_op(
        "dsv4::forward_mqa", role="split", step_state=STEP_STATE, tokens="q", capturable={"cpu": "decode"}
    )
    config = drafting_config(compress_ratios=(0, 0), num_hidden_layers=1)
    stack, prompts = DraftingStack(config), make_prompts(3, 11, 1, 20)
    limits: dict[str, Any] = {"max_num_reqs": 3, "max_num_batched_tokens": 24, "max_model_len": 64}
    expected = ModelRunnerV2(stack, config, **limits).generate(prompts, 8, progress=False)
    torch._dynamo.reset()
    given = {"engine": "host", "runner": "mrv2", "decode": "full", "max_tokens": 24, "pool": dsv4_compile.MemoryPool()}
    model, drafter = (
        torch.compile(module, backend="dsv4_piecewise", dynamic=True, fullgraph=True, options=given)
        for module in (stack, stack.drafter)
    )
    told_model, told_drafter = Said(model), Said(drafter)
    drafting = {"drafter": told_drafter, "num_draft_tokens": count}
    buckets = (3, 6, 9, 24)
    runner = ModelRunnerV2(told_model, config, attention=stack, buckets=buckets, **drafting, **limits)

    def capture(sizes: tuple[int, ...]) -> None:
        dsv4_compile.capture(runner.run_padding, lambda size: (size,), sizes, progress=False)

    capture(buckets)
    for query_len in (1 + count, 1):
        with dsv4_compile.uniform_decode(query_len):
            capture(buckets)
    told_model.said.clear()
    told_drafter.said.clear()
    before = counters.snapshot()
    with counters.expect(captures=0, uncaptured_calls=0, recaptures=0):
        assert runner.generate(prompts, 8, progress=False) == expected
    said = [*told_model.said, *told_drafter.said]
    full = counters.full_replays - before["full_replays"]
    assert full == sum(query_len is not None for query_len in said)
    assert 0 < full < len(said) == counters.replays - before["replays"]
    assert {1 + count, 1} & set(said) == {1 + count} | ({1} if count == 2 else set())
