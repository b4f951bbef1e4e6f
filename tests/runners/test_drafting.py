"""Drafts change how many steps an answer takes, and nothing else: no state of a rejected token is ever read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from drafting import DraftingStack, Script, WithStreams, drafting_config, poison_what_is_not_computed
from paging import tiny_config
from runner_helpers import RUNNERS, Recorder, assert_all_blocks_free, make_prompts, make_runner, one_prefill

from dsv4_compile.errors import RunnerError
from dsv4_compile.models.deepseek_v4 import AttentionStack
from dsv4_compile.runners import DraftCounts, ModelRunner, ModelRunnerV2
from dsv4_compile.runners.drafting import Verified
from dsv4_compile.runners.scheduler import Chunk, Scheduler

# small windows and blocks of them, so that rows leave them soon
SMALL = {"sliding_window": 11, "swa_block_size": 4, "compressed_block_size": 128}
REQUESTS = list(zip(make_prompts(100, 3, 1, 29, 126, 5), (40, 9, 30, 17, 12, 1), strict=True))


@pytest.fixture(scope="module")
def stack() -> DraftingStack:
    return DraftingStack(drafting_config(**SMALL))


@pytest.fixture(scope="module")
def expected(stack: DraftingStack) -> list[list[int]]:
    """Answers without drafts."""
    return serve(make_runner(stack))[0]


def serve(runner: ModelRunner) -> tuple[list[list[int]], int]:
    """Answers of `REQUESTS`, of which one joins in each step, and how many were preempted.

    Between steps no cache holds anything but what computed tokens wrote.
    """
    arrivals, ids, answers, starts = list(REQUESTS), [], {}, 0
    while arrivals or runner.num_active:
        if arrivals:
            ids.append(runner.add_request(*arrivals.pop(0)))
        runner.blocks.shuffle(random.Random(len(answers)))
        poison_what_is_not_computed(runner)
        result = runner.step()
        starts += sum(start == 0 for _, start, _ in result.scheduled)
        answers.update(result.finished)
    assert_all_blocks_free(runner)
    return [answers[request] for request in ids], starts - len(ids)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("runner_type", RUNNERS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_reqs": 6},
        {"buckets": (4, 12, 48)},
        {"max_num_batched_tokens": 5},
        {"num_blocks": {"swa": 8}},
        {"num_blocks": {"compressed": 2}},
        {"num_blocks": {"c4_state": 6}},
        {"num_blocks": {"c128_state": 24}},
    ],
    ids=str,
)
def test_answers_of_ragged_batches_are_those_without_drafts(
    stack: DraftingStack,
    expected: list[list[int]],
    runner_type: type[ModelRunner],
    count: int,
    options: dict[str, object],
) -> None:
    runner = make_runner(stack, runner_type, drafter=stack.drafter, num_draft_tokens=count, **options)
    answers, preempted = serve(runner)
    assert answers == expected
    assert (preempted > 0) == ("num_blocks" in options)
    counts = runner.draft_counts
    assert 0 < counts.accepted == sum(counts.accepted_by_place) < counts.drafted
    assert len(counts.accepted_by_place) == count


# which drafts hit, position by position


@pytest.fixture(scope="module")
def plain() -> WithStreams:
    return WithStreams(AttentionStack(tiny_config(**SMALL)))


@pytest.fixture(scope="module")
def known(plain: WithStreams) -> Callable[[int], list[int]]:
    """Prompt of a length and its answer of 150 tokens, without drafts."""
    made: dict[int, list[int]] = {}

    def tokens(length: int) -> list[int]:
        if length not in made:
            (prompt,) = make_prompts(length, seed=length)
            made[length] = prompt + make_runner(plain).generate([prompt], 150)[0]
        return made[length]

    return tokens


def check_misses(
    plain: WithStreams, tokens: Sequence[int], length: int, num_new: int, count: int, misses: Callable[[int], bool]
) -> list[int]:
    """Serve one request whose drafts miss at some positions: answer and logits are those of one prefill.

    Returns:
        How many tokens each step brought.
    """
    recorder = Recorder(plain)
    script = Script(tokens, misses, plain.config.vocab_size)
    runner = make_runner(recorder, drafter=script, num_draft_tokens=count)
    runner.add_request(tokens[:length], num_new)
    kept, brought, position = [], [], 0
    while runner.num_active:
        poison_what_is_not_computed(runner)
        result = runner.step()
        new = len(result.new_tokens.get(0, ()))
        brought += [new] if new else []
        ((_, start, end),) = result.scheduled
        assert start == position
        position = length + sum(brought) - 1 if new else end
        kept.append(recorder.logits[-1][0][: position - start].clone())
    assert result.finished == {0: tokens[length : length + num_new]}
    torch.testing.assert_close(torch.cat(kept), one_prefill(plain.model, tokens[:position]), rtol=0, atol=1e-5)
    return brought


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 2])
def test_hits_save_steps_and_misses_cost_none(
    plain: WithStreams, known: Callable[[int], list[int]], count: int
) -> None:
    always = check_misses(plain, known(9), 9, 24, count, lambda place: False)
    assert always == [1, *[1 + count] * (23 // (1 + count)), *([23 % (1 + count)] if 23 % (1 + count) else [])]
    assert check_misses(plain, known(9), 9, 24, count, lambda place: True) == [1] * 24


@pytest.mark.sampled(11)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("length", [6, 7, 8])
@pytest.mark.parametrize("phase", range(4))
def test_a_rejection_at_each_phase_of_a_block_of_4(
    plain: WithStreams, known: Callable[[int], list[int]], phase: int, length: int, count: int
) -> None:
    brought = check_misses(plain, known(length), length, 40, count, lambda place: place % 4 == phase)
    assert 1 in brought[1:]  # a first draft that missed
    assert count + 1 in brought or phase % 4  # all of them hit


@pytest.mark.sampled(51)
@pytest.mark.parametrize("phase", range(128))
def test_a_rejection_at_each_phase_of_a_block_of_128(
    plain: WithStreams, known: Callable[[int], list[int]], phase: int
) -> None:
    """Over the end of two blocks, so that the entry of the block with the rejection is read."""
    count = 1 + phase // 4 % 2  # both of them at each phase of a block of 4
    check_misses(plain, known(110), 110, 150, count, lambda place: place % 128 == phase)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("seed", range(20))
def test_rejections_at_random(plain: WithStreams, known: Callable[[int], list[int]], seed: int) -> None:
    rng = random.Random(seed)
    missed = {place for place in range(300) if rng.random() < rng.choice([0.1, 0.5, 0.9])}
    check_misses(plain, known(110), 110, 150, rng.choice([1, 2]), missed.__contains__)


# what the tests above would not let pass


def test_tokens_that_count_as_computed_though_they_were_rejected(
    plain: WithStreams, known: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verified, "num_rejected", 0)
    with pytest.raises((AssertionError, IndexError)):
        check_misses(plain, known(7), 7, 40, 2, lambda place: place % 4 == 1)


def test_blocks_that_go_back_by_the_position_of_rejected_drafts(
    plain: WithStreams, known: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Scheduler.commit

    def hasty(self: Scheduler, chunk: Chunk, num_rejected: int = 0) -> None:
        commit(self, chunk, num_rejected)
        self.blocks.release_before(chunk.request.row, chunk.end)

    monkeypatch.setattr(Scheduler, "commit", hasty)
    with pytest.raises(AssertionError):
        check_misses(plain, known(7), 7, 40, 2, lambda place: True)


@pytest.mark.parametrize("cache", ["state_cache", "kv_cache", "k_cache", "swa_cache"])
def test_a_row_of_a_rejected_token_that_is_not_written_anew(
    plain: WithStreams, known: Callable[[int], list[int]], cache: str
) -> None:
    """Each cache has such rows: one that keeps them, here because they are NaN, gives other logits."""
    tokens = known(7)
    before = {}

    class Stubborn(WithStreams):
        """Puts NaN back into rows that were NaN before the step."""

        def forward(self, input_ids: object, positions: object, step: object) -> object:
            caches = [(n, b) for n, b in self.model.named_buffers() if n.endswith(f".{cache}") and b is not None]
            before.update({name: buffer.isnan() for name, buffer in caches})
            result = super().forward(input_ids, positions, step)
            for name, buffer in caches:
                buffer[before[name]] = torch.nan
            return result

    with pytest.raises(AssertionError):
        check_misses(Stubborn(plain.model), tokens, 7, 40, 2, lambda place: place % 4 == 1)


# requests and steps


def test_verification_batches_are_uniform(stack: DraftingStack) -> None:
    recorder = Recorder(stack)
    runner = make_runner(recorder, ModelRunnerV2, drafter=stack.drafter, num_draft_tokens=2, buckets=(3, 6, 9, 48))
    runner.generate(make_prompts(40, 3, 1), 9)
    assert {48, 9} <= {len(ids) for ids, _, _ in recorder.inputs} <= {48, 9, 6, 3}
    v1 = Recorder(stack)
    runner = make_runner(v1, drafter=stack.drafter, num_draft_tokens=2)
    runner.generate(make_prompts(10, 3, 1), 9)
    for ids, positions, step in v1.inputs[1:]:
        active = int((step.seq_lens > 0).sum())
        assert step.query_start_loc.tolist() == [min(3 * row, 3 * active) for row in range(4)]
        assert len(ids) == 3 * active
        for row in range(active):
            live = step.token_to_req[3 * row : 3 * row + 3] == row
            assert live[0]
            assert (live | (step.token_to_req[3 * row : 3 * row + 3] == -1)).all()
            end = int(step.seq_lens[row])
            assert positions[3 * row : 3 * row + 3][live].tolist() == list(range(end - int(live.sum()), end))


def test_stop_tokens_end_an_answer_in_the_middle_of_its_drafts(
    plain: WithStreams, known: Callable[[int], list[int]]
) -> None:
    tokens = known(9)
    for count, stop in ((1, tokens[14]), (2, tokens[15]), (2, tokens[16])):
        script = Script(tokens, lambda place: False, plain.config.vocab_size)
        runner = make_runner(plain, drafter=script, num_draft_tokens=count)
        answer = tokens[9 : tokens.index(stop, 9) + 1]
        assert runner.generate([tokens[:9]], 40, stop_tokens=[stop]) == [answer]
        assert_all_blocks_free(runner)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("broken", ["model", "drafter"])
@pytest.mark.parametrize("runner_type", RUNNERS)
def test_a_step_that_fails_is_repeated(
    stack: DraftingStack, expected: list[list[int]], runner_type: type[ModelRunner], broken: str
) -> None:
    """Every third call of one of the two raises, the second call of the drafter in a step as well."""
    calls = 0

    def fail_sometimes() -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyError("on purpose")

    def drafter(*arguments: object) -> object:
        if broken == "drafter":
            fail_sometimes()
        return stack.drafter(*arguments)

    model = Recorder(stack, before=fail_sometimes if broken == "model" else lambda: None)
    runner = make_runner(model, runner_type, drafter=drafter, num_draft_tokens=2)
    ids = [runner.add_request(*request) for request in REQUESTS]
    answers: dict[int, list[int]] = {}
    failed = 0
    while runner.num_active:
        try:
            answers.update(runner.step().finished)
        except KeyError:
            failed += 1
    assert failed > 5
    assert [answers[request] for request in ids] == expected
    assert_all_blocks_free(runner)


def test_cancelled_requests_take_their_drafts_along(stack: DraftingStack, expected: list[list[int]]) -> None:
    runner = make_runner(stack, drafter=stack.drafter, num_draft_tokens=2)
    ids = [runner.add_request(*request) for request in REQUESTS[:3]]
    for _ in range(4):
        runner.step()
    runner.cancel_request(ids[0])
    answers: dict[int, list[int]] = {}
    while runner.num_active:
        answers.update(runner.step().finished)
    assert answers.get(ids[2]) == expected[2]
    assert_all_blocks_free(runner)


# bad input


def no_streams(*arguments: object) -> torch.Tensor:
    return torch.zeros(len(arguments[0]), 97)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 2}, "num_draft_tokens is 2 and drafter is None: give both a drafter and how many"),
        ({"drafter": no_streams}, "num_draft_tokens is 0 and drafter is given: give both"),
        ({"drafter": 3, "num_draft_tokens": 1}, "drafter is a int; it must be callable, such as an MTPBlock"),
        ({"drafter": no_streams, "num_draft_tokens": 3}, "num_draft_tokens is 3; it must be an int, from 0 to 2"),
        ({"drafter": no_streams, "num_draft_tokens": True}, "num_draft_tokens is True; it must be an int"),
        (
            {"drafter": no_streams, "num_draft_tokens": 2, "max_num_batched_tokens": 2},
            "max_num_batched_tokens is 2; it must be an int, from 3 to 512",
        ),
    ],
)
def test_a_drafter_that_makes_no_sense_is_refused(
    stack: DraftingStack, options: dict[str, object], message: str
) -> None:
    with pytest.raises(RunnerError, match=message):
        make_runner(stack, **options)


def test_a_model_without_streams_cannot_have_drafts_verified() -> None:
    model = AttentionStack(drafting_config())
    runner = make_runner(model, drafter=DraftingStack(model.config).drafter, num_draft_tokens=1)
    with pytest.raises(RunnerError, match="the model returned logits alone, and a drafter needs the streams beside"):
        runner.generate([[1]], 2)
    with pytest.raises(RunnerError, match="the model returned logits alone"):
        runner.run_padding(4)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda ids, streams: torch.zeros(len(ids), 97), "the drafter returned logits alone; it must return"),
        (
            lambda ids, streams: (torch.zeros(len(ids), 97), streams[1:]),
            r"drafter returned streams of shape \(2, 1, 1\)",
        ),
        (
            lambda ids, streams: (torch.zeros(1, 97), streams),
            r"drafter returned logits of shape \(1, 97\) for 3 tokens",
        ),
        (lambda ids, streams: None, "the drafter returned a NoneType as logits; it must return logits"),
        (lambda ids, streams: (torch.zeros(len(ids), 97), 3), "the drafter returned a int as streams"),
    ],
)
def test_what_a_drafter_may_not_return(plain: WithStreams, answer: Callable[..., object], message: str) -> None:
    runner = make_runner(plain, drafter=lambda ids, positions, step, streams: answer(ids, streams), num_draft_tokens=2)
    with pytest.raises(RunnerError, match=message):
        runner.generate([[1]], 4)


def test_a_model_with_streams_is_served_without_a_drafter(stack: DraftingStack) -> None:
    runner = make_runner(stack)
    assert len(runner.generate([[1]], 4)[0]) == 4
    assert runner.draft_counts == DraftCounts()
