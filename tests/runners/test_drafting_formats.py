"""Drafts beside packed caches: answers are those without drafts, and no byte of a rejected token is ever read."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from drafting import DraftingStack, Script, WithStreams, drafting_config, poison_what_is_not_computed
from paging import tiny_config
from runner_helpers import RUNNERS, assert_all_blocks_free, make_prompts, make_runner
from runtime_helpers import compile_host
from serving import SETUPS

import dsv4_compile
from dsv4_compile import MemoryPool, counters
from dsv4_compile.models.deepseek_v4 import AttentionStack
from dsv4_compile.runners import ModelRunner

FORMATS = [("fp8_ds_mla", "mxfp4"), ("fp8_ds_mla", "fp8"), ("auto", "mxfp4"), ("bf16", "fp8")]
# over the end of a block of 128, and many of 4; the second leaves after its first token
REQUESTS = list(zip(make_prompts(121, 3, 29, 5), (14, 1, 12, 9), strict=True))
SMALL = {"sliding_window": 11, "swa_block_size": 4, "compressed_block_size": 128}
BUCKETS = (12, 24)
LIMITS = {"max_num_reqs": 4, "max_num_batched_tokens": 24, "max_model_len": 160}


def words(formats: tuple[str, str]) -> dict[str, str]:
    return dict(zip(("kv_cache_dtype", "index_cache_dtype"), formats, strict=True))


def serve(runner: ModelRunner, between: Callable[[ModelRunner], None] = lambda runner: None) -> list[list[int]]:
    """Answers of `REQUESTS`, of which one joins in each step."""
    arrivals, ids, answers = list(REQUESTS), [], {}
    while arrivals or runner.num_active:
        if arrivals:
            ids.append(runner.add_request(*arrivals.pop(0)))
        runner.blocks.shuffle(random.Random(len(answers)))
        between(runner)
        answers.update(runner.step().finished)
    assert_all_blocks_free(runner)
    return [answers[request] for request in ids]


@pytest.fixture(scope="module")
def stack() -> DraftingStack:
    return DraftingStack(drafting_config(index_topk=7, **SMALL))


@pytest.fixture(scope="module")
def expected(stack: DraftingStack) -> Callable[[tuple[str, str]], list[list[int]]]:
    """Answers of the eager model without drafts, by formats."""
    made: dict[tuple[str, str], list[list[int]]] = {}

    def answers(formats: tuple[str, str]) -> list[list[int]]:
        if formats not in made:
            made[formats] = serve(RUNNERS[0](stack, stack.config, **LIMITS, **words(formats)))
        return made[formats]

    return answers


def assert_some_stayed(runner: ModelRunner) -> None:
    counts = runner.draft_counts
    assert 0 < counts.accepted < counts.drafted


@pytest.mark.sampled(11)
@pytest.mark.parametrize("formats", FORMATS, ids="+".join)
@pytest.mark.parametrize("runner_type", RUNNERS)
@pytest.mark.parametrize("options", [{}, {"num_blocks": {"swa": 9}}], ids=["", "preempted"])
def test_no_packed_row_of_a_rejected_token_is_read(
    stack: DraftingStack,
    expected: Callable[[tuple[str, str]], list[list[int]]],
    runner_type: type[ModelRunner],
    formats: tuple[str, str],
    options: dict[str, Any],
) -> None:
    wanted = expected(formats)
    runner = runner_type(
        stack, stack.config, drafter=stack.drafter, num_draft_tokens=2, **LIMITS, **words(formats), **options
    )
    assert serve(runner, poison_what_is_not_computed) == wanted
    assert_some_stayed(runner)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("formats", FORMATS[:2], ids="+".join)
@pytest.mark.parametrize("setup", ["v2 narrow", "v1 wide", "v1 minimal", "v2 minimal"])
def test_captured_steps_with_drafts_answer_as_eager_without(
    stack: DraftingStack, expected: Callable[[tuple[str, str]], list[list[int]]], setup: str, formats: tuple[str, str]
) -> None:
    wanted = expected(formats)
    runner_type, options = SETUPS[setup]
    pool = MemoryPool()
    model, drafter = (compile_host(one, pool=pool, max_tokens=24, **options) for one in (stack, stack.drafter))
    runner = runner_type(
        model,
        stack.config,
        attention=stack,
        drafter=drafter,
        num_draft_tokens=2,
        buckets=BUCKETS,
        **LIMITS,
        **words(formats),
    )
    dsv4_compile.capture(runner.run_padding, lambda size: (size,), BUCKETS, progress=False)
    with counters.expect(graphs_compiled=0, captures=0, recaptures=0, uncaptured_calls=0, traced_graph_calls=0):
        assert serve(runner, poison_what_is_not_computed) == wanted
    assert_some_stayed(runner)


@pytest.mark.exhaustive
@pytest.mark.parametrize("formats", FORMATS[:2], ids="+".join)
@pytest.mark.parametrize("phase", range(4))
def test_a_rejection_at_each_phase_of_a_block_of_4(phase: int, formats: tuple[str, str]) -> None:
    model = WithStreams(AttentionStack(tiny_config(**SMALL)))
    (prompt,) = make_prompts(110, seed=phase)
    answer = make_runner(model, **words(formats)).generate([prompt], 40)[0]
    script = Script(prompt + answer, lambda place: place % 4 == phase, model.config.vocab_size)
    runner = make_runner(model, drafter=script, num_draft_tokens=2, **words(formats))
    runner.add_request(prompt, 40)
    finished: dict[int, list[int]] = {}
    while runner.num_active:
        poison_what_is_not_computed(runner)
        finished.update(runner.step().finished)
    assert finished == {0: answer}
