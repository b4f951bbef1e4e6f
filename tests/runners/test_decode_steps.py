"""The runners say which steps are uniform decode, and a model with capturable split ops replays those as one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paging import tiny_config
from runner_helpers import RUNNERS, Recorder, make_prompts, make_runner

import dsv4_compile
from dsv4_compile import counters, uniform_query_len
from dsv4_compile.models.deepseek_v4 import AttentionStack
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
