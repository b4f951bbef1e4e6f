"""Runners of several ranks: the same steps, the tokens of rank 0, and errors that say which rank differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from paging import tiny_config
from runner_helpers import make_prompts

from dsv4_compile.errors import RunnerError
from dsv4_compile.models.deepseek_v4 import AttentionStack
from dsv4_compile.runners import ModelRunner, ModelRunnerV2
from dsv4_compile.runners.lockstep import Lockstep
from dsv4_compile.runners.sampling import Drafts

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")

if dist.is_available():
    from processes import free_port, gloo_group, in_processes, values_of

LIMITS = {"max_num_reqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
CPU = torch.device("cpu")


def make_runner(**options: Any) -> ModelRunner:
    config = tiny_config((0, 4))
    return ModelRunnerV2(AttentionStack(config, seed=0), config, **LIMITS, **options)


def test_without_a_group_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Lockstep(None, CPU)
    ranks.check(())
    assert ranks.agreed_tokens([]) == []
    assert ranks.agreed_drafts({3: Drafts((7,))}) == {3: Drafts((7,))}


def test_a_group_of_one_serves_as_ever() -> None:
    prompts = make_prompts(3, 20)
    alone = make_runner().generate(prompts, 4)
    with gloo_group(0, 1, free_port()):
        assert make_runner(group=dist.group.WORLD).generate(prompts, 4) == alone


def test_the_group_of_the_model_is_taken() -> None:
    config = tiny_config((0,))
    stack: Any = AttentionStack(config, seed=0)
    with gloo_group(0, 1, free_port()):
        stack.process_group = dist.group.WORLD
        assert ModelRunnerV2(stack, config, **LIMITS)._ranks._group is dist.group.WORLD


def test_a_failed_exchange_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer\nmore")

    with gloo_group(0, 1, free_port()):
        runner = make_runner(group=dist.group.WORLD)
        runner.add_request([1, 2], 2)
        monkeypatch.setattr(dist, "all_gather", fail)
        message = (
            "^rank 0 of 1 got no answer from the others in a step: RuntimeError: Connection closed by peer. Another "
            "rank has failed, has ended, or steps no more"
        )
        with pytest.raises(RunnerError, match=message):
            runner.step()
        monkeypatch.undo()
        assert runner.step().new_tokens.keys() == {0}  # nothing had happened


def serve(rank: int) -> list[Any]:
    """Rank 1 has other weights, so it would sample other tokens; then it is given another request."""
    torch.manual_seed(0)
    config = tiny_config((0, 4))
    model = AttentionStack(config, seed=rank)
    runner = ModelRunnerV2(model, config, group=dist.group.WORLD, **LIMITS)
    tokens = runner.generate(make_prompts(3, 20), 4)
    alone = ModelRunnerV2(AttentionStack(config, seed=rank), config, **LIMITS).generate(make_prompts(3, 20), 4)
    runner.add_request([1, 2, 3 + rank], 2)
    try:
        runner.step()
    except RunnerError as error:
        return [tokens, alone, str(error), runner.num_active]
    return [tokens, alone]


@pytest.mark.exhaustive
def test_tokens_are_those_of_rank_0_and_another_request_is_noticed() -> None:
    first, second = values_of(in_processes(serve))
    assert first[0] == first[1] == second[0]
    assert second[1] != second[0]
    assert first[2:] == second[2:]
    assert "the ranks are about to run different steps. rank 0: request 2 [0, 3) (digest" in first[2]
    assert first[3] == 1
