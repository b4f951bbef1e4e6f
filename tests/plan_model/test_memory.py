"""Bytes of a captured token count: scratch as a GPU's plan has it, temporaries counted by hand."""

from __future__ import annotations

import pytest
import torch
from stages import stages_of
from toy_ops import SPLIT

from dsv4_compile.analysis.sizes import Sizes
from dsv4_compile.config import Config
from dsv4_compile.errors import PlanError
from dsv4_compile.models.deepseek_v4 import DeepseekV4Config
from dsv4_compile.ops.kernels import scratch
from dsv4_compile.plan_model import memory
from dsv4_compile.plan_model.fake_stack import read_stack
from dsv4_compile.plan_model.figures import BucketMemory
from dsv4_compile.plan_model.memory import bucket_memory, sizes_for, temporary_bytes

TOKENS = (1, 8, 300)


def planned(ratios: tuple[int, ...], device: str, options: Config) -> list[BucketMemory]:
    config = DeepseekV4Config.tiny(ratios)
    return read_stack(
        config,
        torch.bfloat16,
        2,
        options,
        lambda _, graph: [bucket_memory(graph, config, tokens) for tokens in TOKENS],
        device,
    )


POLICIES = [
    pytest.param(ratios, *policy, marks=[] if policy == ("mrv1", "wide") and ratios == (4,) else pytest.mark.exhaustive)
    for ratios in ((0,), (4,), (128, 4, 0))
    for policy in (("mrv2", "narrow"), ("mrv1", "wide"), ("mrv1", "minimal"))
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ratios", "runner", "region"), POLICIES)
def test_a_plan_of_the_cpu_with_scratch_is_that_of_a_gpu_with_kernels(
    ratios: tuple[int, ...], runner: str, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Config.from_options({"runner": runner, "region": region, "piece_compiler": "eager"})
    here = planned(ratios, "cpu", options)
    for module in (scratch, memory):
        monkeypatch.setattr(module, "KERNELS_SERVE", True)
    assert planned(ratios, "cuda:0", options) == here
    most = [scratch.SCORES * 4] if 4 in ratios else [scratch.partials_size(1, 64 * 152, 16) * 4]
    assert all(0 <= bucket.eager - most[0] < 1 << 20 for bucket in here)


def test_temporaries_of_a_piece_by_hand() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        a = x + 1  # 2048 bytes, gone after the next line
        b = torch.cat([a, a], dim=1)  # 4096, until it is doubled
        m = b[:, 1:].sin().mean()  # 4064, which take 4096, and a scalar, which takes 256 and is used to the end
        doubled = torch.cat([b, b], dim=1)  # 8192
        result: torch.Tensor = torch.ops.toy.fresh(doubled * m)  # 8192, which leave the piece
        return result

    _, graph, _ = stages_of(f, torch.ones(8, 64), split_ops=SPLIT)
    piece = graph.units[0]
    sizes = Sizes(graph.traced.traced_sizes)
    assert temporary_bytes(graph, piece, sizes, leaving=False) == 4096 + 256 + 8192  # while it is doubled
    assert temporary_bytes(graph, piece, sizes, leaving=True) == 8192 + 256 + 8192  # at the end


def test_a_graph_without_a_token_count_cannot_be_resized() -> None:
    _, graph, _ = stages_of(lambda x: torch.ops.toy.fresh(x.sum()), torch.ones(()), split_ops=SPLIT)
    with pytest.raises(PlanError, match="the token count is None, and no size of its own: it cannot be set to 8"):
        sizes_for(graph, 8)
