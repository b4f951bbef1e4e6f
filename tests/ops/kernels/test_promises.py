"""Which calls of the split ops promise to be capturable: those on a GPU that a kernel serves, as a plan finds out."""

from __future__ import annotations

import pytest
import torch
from cuda_plans import attention, on_cuda, planned
from kernel_tools import CONFIG, HAS_TRITON
from paging import tiny_config

from dsv4_compile.errors import FullGraphError
from dsv4_compile.ops.kernels import serve
from dsv4_compile.ops.registry import snapshot

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: make test-kernels")
SPLIT_OPS = ("dsv4::forward_mqa", "dsv4::sparse_indexer")


def config(ratio, **formats):
    sizes = ("head_dim", "qk_rope_head_dim", "index_n_heads", "index_head_dim", "index_topk")
    return tiny_config((ratio,), **{name: getattr(CONFIG, name) for name in sizes}, **formats)


@pytest.mark.parametrize("name", SPLIT_OPS)
def test_kernels_promise_and_torch_does_not(name):
    op = snapshot()[name]
    assert op.capturable_on("cpu") == "never"
    assert op.capturable_on("cuda") == ("decode" if HAS_TRITON else "never")


def test_without_kernels_nothing_is_promised(monkeypatch):
    monkeypatch.setattr(serve, "KERNELS_SERVE", False)
    assert serve.promise("decode") == "never"
    monkeypatch.setattr(serve, "KERNELS_SERVE", True)
    assert serve.promise("never") == "never"
    assert serve.promise("decode") == (("cuda", "decode"),)


def test_who_would_serve_is_asked_by_position_and_by_name(monkeypatch):
    class Call:
        def __init__(self, x, ratio=0):
            self.ratio = ratio

        def why_not(self):
            return "the ratio is 3" if self.ratio == 3 else None

    monkeypatch.setattr(serve, "find_kernels", lambda name: Call)
    why = serve.why_torch("an_op")
    assert why(torch.ones(1)) is None
    assert why(torch.ones(1), ratio=3) == "dsv4::an_op runs in plain torch on the GPU: the ratio is 3"
    monkeypatch.setattr(serve, "find_kernels", lambda name: None)
    assert serve.NO_TRITON in why(torch.ones(1))


@needs_triton
@pytest.mark.parametrize(
    ("ratio", "formats"),
    [
        (4, {"kv_cache_dtype": "fp8_ds_mla", "index_cache_dtype": "fp8"}),
        (128, {}),
        pytest.param(4, {}, marks=pytest.mark.exhaustive),
        pytest.param(4, {"index_cache_dtype": "mxfp4"}, marks=pytest.mark.exhaustive),
        pytest.param(0, {"kv_cache_dtype": "fp8_ds_mla"}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_decode_step_that_kernels_serve_is_one_graph(ratio, formats):
    with on_cuda():
        stack, inputs = attention(ratio, "cuda", config=config(ratio, **formats), dtype=torch.bfloat16)
        graph, _ = planned(stack, *inputs, runner="mrv2", piece_compiler="eager", decode="full")
    (step,) = graph.full.units
    assert {str(node.target) for node in step.nodes} >= {"dsv4.forward_mqa.default"}
    assert len(graph.units) > 1


@needs_triton
def test_a_step_that_torch_serves_is_not():
    with on_cuda():
        stack, inputs = attention(4, "cuda", config=config(4))
        with pytest.raises(FullGraphError) as raised:
            planned(stack, *inputs, runner="mrv2", decode="full")
    for op, query in (("sparse_indexer", "index_q"), ("forward_mqa", "q")):
        reason = f"dsv4::{op} runs in plain torch on the GPU: {query} is torch.float32, and the kernel takes torch.bfl"
        assert reason in str(raised.value)
