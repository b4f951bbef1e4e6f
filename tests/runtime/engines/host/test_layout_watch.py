"""`LayoutWatch` finds kernels that lay out results otherwise than meta kernels say, and captures go by kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dsv4_compile.runtime.engines.host.engine import HostEngine
from dsv4_compile.runtime.engines.host.meta_cache import MetaCache, key_of_call

LAST = torch.channels_last
IMAGE = torch.randn(1, 2, 4, 6).to(memory_format=LAST)


def unpool() -> Tensor:
    pooled, indices = functional.max_pool2d(IMAGE, 2, return_indices=True)
    return functional.max_unpool2d(pooled, indices, 2)


def norm() -> Tensor:
    x = torch.randn(3, 4)
    return torch.native_batch_norm(x, None, None, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5)[1]


def convolution() -> Tensor:
    return functional.conv2d(IMAGE, torch.ones(3, 2, 3, 3).to(memory_format=LAST))


def plain() -> Tensor:
    x = torch.randn(4, 3).t()
    x.add_(1).unsqueeze_(0)
    return torch.cat([x.softmax(-1), torch.add(x, 1, out=torch.empty_like(x))]).sort()[0].to_sparse().to_dense()


def without_meta_kernel() -> Tensor:
    return torch.histogram(torch.linspace(0, 1, 9), 4)[0]


every_run = pytest.mark.parametrize("run", [unpool, norm, convolution, without_meta_kernel, plain])


@every_run
@pytest.mark.parametrize("inference", [False, True])
def test_a_capture_lays_out_what_the_kernel_does(run: Callable[[], Tensor], inference: bool) -> None:
    engine, seen = HostEngine(), []
    expected = run()

    def record() -> None:
        if run is not plain:
            seen.append(run())

    with torch.inference_mode(inference):
        assert engine.warm_up(run) is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a graph may be empty
            engine.capture(record, engine.make_pool(), name="a test")
    for result in seen:
        assert (result.shape, result.stride()) == (expected.shape, expected.stride())


def test_a_size_of_one_may_have_any_stride_in_the_warm_up() -> None:
    engine, seen = HostEngine(), []
    pooled, indices = functional.max_pool2d(IMAGE, 2, return_indices=True)
    assert pooled.stride()[0] == 12
    engine.warm_up(
        lambda: functional.max_unpool2d(pooled.as_strided(pooled.shape, (24, *pooled.stride()[1:])), indices, 2)
    )
    engine.capture(lambda: seen.append(functional.max_unpool2d(pooled, indices, 2)), engine.make_pool(), name="a test")
    assert seen[0].stride() == functional.max_unpool2d(pooled, indices, 2).stride()


def test_a_result_that_is_an_argument_cannot_be_kept_so_its_op_is_named() -> None:
    """A kernel resizes an empty `out=` as the input is laid out, its meta kernel does so contiguously."""
    assert HostEngine().warm_up(lambda: torch.add(torch.randn(4, 3).t(), 1, out=torch.empty(0))) == "aten::add.out"


def test_what_no_recorder_looks_up_is_not_kept() -> None:
    cache, x = MetaCache(), torch.ones(3)
    assert cache.keep_real(torch.ops.aten.mul.Tensor, (x, x), {}, x)
    assert cache.get(key_of_call(torch.ops.aten.mul.Tensor, (x, x), {}), torch.ops.aten.mul.Tensor, (x, x), {}).is_meta
    assert not cache.keep_real(torch.ops.toy.fresh.default, (x,), {}, x)
    assert not cache.keep_real(torch.ops.aten.resize_.default, (x, [2]), {}, x)


def test_an_op_that_a_python_kernel_calls_is_left_to_it() -> None:
    """A custom op answers for itself: what it gives is compared with its own fake."""
    assert HostEngine().warm_up(lambda: torch.ops.toy.fresh(torch.ones(3))) is None
