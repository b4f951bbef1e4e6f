"""Serving with packed caches through captured graphs: tokens, logits and every byte of every page as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runner_helpers import make_prompts
from serving import SETUPS, Served, Traffic

import dsv4_compile
from dsv4_compile import counters

FORMATS = [("fp8_ds_mla", "mxfp4"), ("fp8_ds_mla", "fp8"), ("bf16", "bf16"), ("bf16", "mxfp4"), ("auto", "fp8")]


def serve(setup: str, formats: tuple[str, str], **options: Any) -> Served:
    return Served(setup, kv_cache_dtype=formats[0], index_cache_dtype=formats[1], **options)


@pytest.mark.sampled(26)
@pytest.mark.parametrize("formats", FORMATS, ids="+".join)
@pytest.mark.parametrize("setup", SETUPS)
def test_random_traffic_equals_eager(setup: str, formats: tuple[str, str]) -> None:
    served = serve(setup, formats)
    traffic = Traffic(served, seed=1)
    with counters.expect(graphs_compiled=1, recaptures=0):
        for _ in range(30):
            traffic.step()
    assert counters.replays > 15
    served.compare_caches()
    kv = served.stack.layers[1].attention.kv_cache
    assert kv.dtype is {"fp8_ds_mla": torch.uint8, "bf16": torch.bfloat16, "auto": torch.float32}[formats[0]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("formats", FORMATS[:2], ids="+".join)
@pytest.mark.parametrize("setup", ["v1 minimal", "v2 narrow"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_each_piece_writes_the_pages_that_it_writes_uncaptured(
    setup: str, formats: tuple[str, str], compiler: str
) -> None:
    served = serve(setup, formats, compiler_options={"check": "full", "piece_compiler": compiler}, tolerance=1e-4)
    for prompt in make_prompts(40, 3):
        served.add_request(prompt, 9)
    while served.runner.num_active:
        served.runners[0].step()
    assert counters.replays > 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("setup", ["v1 wide", "v2 narrow"])
def test_capture_ahead_puts_back_every_byte_of_a_page(setup: str) -> None:
    served = serve(setup, FORMATS[0])
    for ours, theirs in zip(*(model.buffers() for model in served.models), strict=True):
        if ours.dtype is torch.uint8:
            for cache in (ours, theirs):
                torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).fill_(255)
    dsv4_compile.capture(served.compiled, served.padding_inputs, (16, 4), progress=False)
    served.compare_caches()
    for cache in served.stack.buffers():
        if cache.dtype is torch.uint8:
            assert (torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()) == 255).all()
    traffic = Traffic(served, seed=3)
    for _ in range(10):
        traffic.step()
    served.compare_caches()


@pytest.mark.exhaustive
def test_caches_of_another_format_are_another_graph_and_right() -> None:
    """A model that leaves the format open is traced for the caches it has; a new runner brings others."""
    served = Served("v2 narrow")
    options = dict(served._runner_options)
    for formats in (("auto", "auto"), ("fp8_ds_mla", "mxfp4"), ("auto", "auto")):
        served._runner_options = {**options, "kv_cache_dtype": formats[0], "index_cache_dtype": formats[1]}
        served.renew_runners()
        for prompt in make_prompts(40, 3):
            served.add_request(prompt, 4)
        served.finish()
    assert counters.replays > 4
