"""Serving through compiled and captured pieces: tokens of eager, logits as near as rounding allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runner_helpers import make_prompts
from serving import CONFIG, Served, Traffic

from dsv4_compile import counters

INDUCTOR = pytest.param("inductor", marks=pytest.mark.inductor)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("streams", [0, 3])
@pytest.mark.parametrize("setup", ["v1 wide", "v1 minimal", "v2 narrow"])
@pytest.mark.parametrize("compiler", ["aot_eager", INDUCTOR])
def test_random_traffic_is_as_near_to_eager_as_rounding_allows(compiler: str, setup: str, streams: int) -> None:
    options: dict[str, Any] = {"piece_compiler": compiler, "aux_streams": streams}
    served = Served(setup, compiler_options=options, tolerance=1e-5)
    traffic = Traffic(served, seed=1)
    with counters.expect(graphs_compiled=1, recaptures=0, uncompiled_pieces=0):
        for _ in range(30):
            traffic.step()
    assert counters.replays > 15
    served.compare_caches()


@pytest.mark.inductor
def test_bfloat16_stack_within_the_rounding_of_its_layers() -> None:
    """Every block is selected at these lengths; where they are not, rounding flips scores that are nearly equal."""
    served = Served("v2 narrow", torch.bfloat16, compiler_options={"piece_compiler": "inductor"})
    for prompt in make_prompts(3, 17, 4 * CONFIG.index_topk - 6):
        served.add_request(prompt, 4)
    for _ in range(3):
        for runner in served.runners:
            runner.step()
        ours, theirs = (model.logits for model in served.models)
        assert ours is not None
        assert theirs is not None
        assert (ours.double() - theirs.double()).norm() / theirs.double().norm() < 0.01
