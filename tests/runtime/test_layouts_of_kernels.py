"""Kernels of torch's own that lay out a result otherwise than their fakes say: what is real is what the caller gets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from seen_alike import COMPILED, HOST, MINIMAL, OFF, assert_alike
from torch import Tensor
from torch.nn import functional

from dsv4_compile import counters
from dsv4_compile.log import log
from dsv4_compile.runtime.engines.host.engine import HostEngine

fresh = torch.ops.toy.fresh
every_option = pytest.mark.parametrize("options", [HOST, OFF, MINIMAL, {"aux_streams": 2}], ids=str)


def unpool_inputs(call: int) -> tuple[Tensor, ...]:
    last = torch.channels_last
    indices = functional.max_pool2d(torch.randn(1, 2, 4, 6).to(memory_format=last), 2, return_indices=True)[1]
    return torch.randn(1, 2, 2, 3).to(memory_format=last), indices


def norm_inputs(call: int) -> tuple[Tensor, ...]:
    return torch.randn(3, 4), torch.randn(4), torch.rand(4) + 1


def strides_of_an_output(x: Tensor, indices: Tensor) -> Any:
    return functional.max_unpool2d(x * 3, indices, 2) * 2


def strides_inside_of_a_piece(x: Tensor, indices: Tensor) -> Any:
    y = functional.max_unpool2d(x * 3, indices, 2)
    return (y.as_strided((4,), (1,)) + 1).sum(), y + 1, fresh(x) * 2


def strides_across_a_region(x: Tensor, indices: Tensor) -> Any:
    y = functional.max_unpool2d(x * 3, indices, 2)
    return fresh(y.sum(0)), y.as_strided((4,), (1,)) * 2, y + 1, y.reshape(-1) + 1


def strides_of_an_eager_op(x: Tensor, indices: Tensor) -> Any:
    y = functional.max_unpool2d(x, indices, 2)
    z = y.as_strided((4,), (1,)) * torch.nonzero(indices.flatten() >= 0).shape[0]
    return z, fresh(y.sum(0)) + 1


def shapes_of_outputs(x: Tensor, mean: Tensor, var: Tensor) -> Any:
    return torch.native_batch_norm(x + 1, None, None, mean, var, False, 0.1, 1e-5)


def shapes_that_cross(x: Tensor, mean: Tensor, var: Tensor) -> Any:
    y, saved, _ = torch.native_batch_norm(x + 1, None, None, mean, var, False, 0.1, 1e-5)
    return fresh(y) + 1, saved * 2, fresh(saved) + 1


def shapes_after_a_region(x: Tensor, mean: Tensor, var: Tensor) -> Any:
    return torch.native_batch_norm(fresh(x), None, None, mean, var, False, 0.1, 1e-5)


PROGRAMS = [
    (strides_of_an_output, unpool_inputs),
    (strides_inside_of_a_piece, unpool_inputs),
    (strides_across_a_region, unpool_inputs),
    (shapes_of_outputs, norm_inputs),
    (shapes_that_cross, norm_inputs),
    (shapes_after_a_region, norm_inputs),
]
every_program = pytest.mark.parametrize(("function", "make"), PROGRAMS, ids=lambda value: value.__name__)


@pytest.mark.sampled(5)
@every_option
@every_program
def test_layouts_are_those_of_eager(
    function: Callable[..., Any], make: Callable[[int], tuple[Tensor, ...]], options: Mapping[str, Any]
) -> None:
    assert_alike(function, make, **options)


@pytest.mark.parametrize("function", [function for function, make in PROGRAMS if make is norm_inputs])
def test_where_meta_kernels_alone_are_wrong_captures_go_by_kernels(function: Callable[..., Any]) -> None:
    with counters.expect(captures=1, replays=3, traced_graph_calls=0):
        assert_alike(function, norm_inputs)


@pytest.mark.parametrize(
    ("function", "make"), [pair for pair in PROGRAMS if pair[1] is unpool_inputs], ids=lambda value: value.__name__
)
def test_a_mistrusted_bucket_runs_the_traced_graph_and_says_so_once(
    function: Callable[..., Any], make: Callable[[int], tuple[Tensor, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    with counters.expect(captures=0, replays=0, uncaptured_calls=4, traced_graph_calls=3):
        assert_alike(function, make)
    (record,) = [record for record in caplog.records if "traced graph" in record.message]
    assert "gives another layout than" in record.message
    assert f"test_layouts_of_kernels.py:{function.__code__.co_firstlineno + 1} in {function.__name__}" in record.message


def test_what_differs_is_logged_at_level_info(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(log, "level", 20)
    caplog.set_level(20)
    assert_alike(strides_of_an_output, unpool_inputs, calls=1)
    layouts = "with strides [48, 1, 12, 2], its fake promised [1, 2, 4, 6] torch.float32 with strides [48, 24, 6, 1]"
    assert f"max_unpool2d gave [1, 2, 4, 6] torch.float32 {layouts}" in caplog.text


def test_other_buckets_of_the_graph_are_captured() -> None:
    """The kernel and its fake agree where there is but one channel, and for contiguous tensors."""

    def f(x: Tensor, indices: Tensor) -> Any:
        return fresh(functional.max_unpool2d(x * 3, indices, 2)) * 2

    options = {"runner": "mrv2", "split_ops": ("toy::fresh",)}
    compiled = torch.compile(f, backend="dsv4_piecewise", dynamic=True, options=options)
    for _ in range(3):
        compiled(*unpool_inputs(0))
    with counters.expect(captures=1, replays=2, traced_graph_calls=0):
        for _ in range(3):
            compiled(*[tensor.contiguous() for tensor in unpool_inputs(0)])


def test_an_excluded_size_sees_what_is_real_too() -> None:
    assert_alike(strides_across_a_region, unpool_inputs, capture_sizes=[100])


def test_what_a_mistrusted_graph_writes_is_written_once() -> None:
    def f(x: Tensor, mean: Tensor, var: Tensor) -> Any:
        x.add_(1)
        return torch.native_batch_norm(x, None, None, mean, var, False, 0.1, 1e-5)[1], fresh(x)

    assert_alike(f, norm_inputs)


def test_regions_between_compiled_pieces(caplog: pytest.LogCaptureFixture) -> None:
    """A compiled piece is not given what it was not compiled for: the rest of the call runs as it is."""

    def f(x: Tensor, mean: Tensor, var: Tensor) -> Any:
        count = torch.nonzero(x[:, 0].abs() >= 0).shape[0]  # eager, and so is what takes it
        y, saved, _ = torch.native_batch_norm(x * count, None, None, mean, var, False, 0.1, 1e-5)
        return fresh(y) + 1, saved

    assert_alike(f, norm_inputs, **COMPILED)


def test_modules_keep_their_captures() -> None:
    """What serving runs is laid out as promised: convolutions, attention, norms, in the usual layouts."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(2, 4, 3, padding=1)
            self.norm = torch.nn.BatchNorm2d(4)
            self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
            self.group = torch.nn.GroupNorm(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.group(self.norm(self.conv(x)).relu())
            rows = functional.interpolate(y, scale_factor=2).flatten(2).transpose(1, 2)
            found = self.attention(rows, rows, rows, need_weights=False)[0]
            # Dynamo of torch 2.11 leaves the fast way that eager takes, and gets another layout, with any backend
            return fresh(found.contiguous()) + 1

    model = Model().eval().requires_grad_(False)
    for last in (torch.contiguous_format, torch.channels_last):
        with counters.expect(captures=1, replays=3, traced_graph_calls=0):
            assert_alike(
                copy.deepcopy(model).to(memory_format=last),
                lambda call, last=last: (torch.randn(2, 2, 6, 6).to(memory_format=last),),
            )


def test_a_layout_that_shows_only_while_a_bucket_is_built(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the slot that an argument is copied to, whose alignment is not that of the warm-up."""
    now, warm_up = [0], HostEngine.warm_up

    def found_later(self: HostEngine, run: Callable[[], object], *, streams: int = 0) -> str | None:
        """No kernel of torch's is known to look at the alignment; a product stands for one that does."""
        warm_up(self, run, streams=streams)
        return "aten::mul.Tensor" if now[0] > 0 else None

    def make(call: int) -> tuple[Tensor, ...]:
        now[0] = call
        return (torch.randn(13)[1:],)

    def f(x: Tensor) -> Any:
        return fresh(x * 2) * 3, x * 4

    monkeypatch.setattr(HostEngine, "warm_up", found_later)
    with counters.expect(captures=0, replays=0, uncaptured_calls=4, traced_graph_calls=2):
        assert_alike(f, make)
    (record,) = [record for record in caplog.records if "traced graph" in record.message]
    assert "aten::mul.Tensor gives another layout than its meta kernel says" in record.message
