"""What is added up: copies as the program of a bucket makes them, room on a GPU, models of sliding windows alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stages import stages_of
from toy_ops import SPLIT

from benchmarks.attention_stack import stack_of
from dsv4_compile.config import Config
from dsv4_compile.models.deepseek_v4 import DeepseekV4Config
from dsv4_compile.plan_model.figures import BucketMemory, EngineFigures, ModelPlan, StepLaunches
from dsv4_compile.plan_model.make import Question, bytes_of_requests, estimate_capture, plan_model, step_launches

ENGINE = EngineFigures(engine="host", pieces=3, ops=10, seconds_an_op=0.5, bytes_an_op=100.0, pool_factor=1.5)


def copies_in_program(fn: Callable[..., Any], args: tuple[Any, ...], folder: Path, **options: Any) -> int:
    """Copies that the straight-line program of a bucket makes."""
    given: dict[str, Any] = {**options, "dump_dir": str(folder)}
    compiled = torch.compile(fn, backend="dsv4_piecewise", dynamic=True, options=given)
    with torch.no_grad():
        for _ in range(2):
            compiled(*args)
    (program,) = folder.rglob("program_*.py")
    return len(re.findall(r"_(?:copy_in|keep|clone|copy)\(|\.copy_\(", program.read_text().partition("def program")[2]))


def mixed(x: torch.Tensor, written: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.ops.toy.fresh(x + 1)
    written.add_(y)
    return y.sin(), torch.ops.toy.fresh(y * 2)


def test_copies_are_those_of_the_program(tmp_path: Path) -> None:
    args = (torch.ones(5, 4), torch.zeros(5, 4))
    _, graph, _ = stages_of(mixed, *args, split_ops=SPLIT)
    counted = step_launches(graph)
    torch._dynamo.reset()
    assert counted.copies == copies_in_program(mixed, args, tmp_path, split_ops=list(SPLIT))
    assert (counted.by_hand, counted.graphs) == (2, len([unit for unit in graph.units if unit.kind == "piece"]))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("runner", "region"), [("mrv2", "narrow"), ("mrv1", "wide"), ("mrv1", "minimal")])
def test_copies_of_a_stack_are_those_of_its_program(runner: str, region: str, tmp_path: Path) -> None:
    stack, inputs = stack_of((0, 4, 128), 8)
    options: dict[str, Any] = {"runner": runner, "region": region}
    _, graph, _ = stages_of(stack, *inputs, **options)
    counted = step_launches(graph)
    torch._dynamo.reset()
    assert counted.copies == copies_in_program(stack, inputs, tmp_path, **options)


def test_an_estimate_by_hand() -> None:
    launches = StepLaunches(by_hand=1, graphs=2, copies=3, captured_ops=20, duplicates=0)
    bucket = BucketMemory(
        tokens=8, workspace=0, lower_bound=0, unshared=0, outputs=0, eager=0, temporaries=1000, inside=400
    )
    one = estimate_capture(ENGINE, launches, bucket)
    assert (one.pool, one.graphs, one.seconds) == (1200, 2000, 10.0)
    assert estimate_capture(replace(ENGINE, pool_factor=0.4), launches, bucket).pool == 1000  # never less than planned


def test_windows_and_states_by_hand() -> None:
    config = DeepseekV4Config.tiny((0,))
    # a window of 16 - 1 tokens may lie in 1 block of 64, two more in part; a step of 100 tokens in 2
    assert bytes_of_requests(config, torch.float32, 3, 100) == (3 * (1 + 2) + 2) * 64 * config.head_dim * 4


@pytest.fixture
def without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_compile.plan_model.make.measure_host_engine", lambda config: ENGINE)


def asked(ratios: tuple[int, ...], **fields: Any) -> ModelPlan:
    question = Question(
        model="tiny",
        config=DeepseekV4Config.tiny(ratios, index_head_dim=17),
        tokens=(1, 300),
        options=Config(runner="mrv2", piece_compiler="eager"),
        dtype=torch.bfloat16,
        weights_dtype=torch.bfloat16,
        parameters=None,
        requests=2,
        gpu_memory=1 << 30,
        launch_us=2.5,
    )
    return plan_model(replace(question, **fields))


def test_windows_alone_take_no_context_and_what_does_not_fit_is_missing(without_measuring: None) -> None:
    plan = asked((0,), parameters=1 << 40)
    assert plan.room.left < 0
    assert {cache.tokens for cache in plan.room.caches} == {None}
    assert [(cache.kv_cache_dtype, cache.index_cache_dtype) for cache in plan.room.caches] == [
        ("bf16", "bf16"),
        ("fp8_ds_mla", "fp8"),
    ]
    assert plan.notes == ("index_cache_dtype 'mxfp4' needs an even index_head_dim, not 17",)
    # 300 tokens are more than the configuration has rows for in its buffer of selected blocks
    assert [bucket.tokens for bucket in plan.buckets] == [1, 300]
    assert plan.step_us == plan.launches.total * 2.5
