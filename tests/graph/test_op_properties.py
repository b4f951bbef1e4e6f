"""What is asked of an op is answered once, for plans and for captured graphs, and never by a bare name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from runtime_helpers import compile_host
from torch import Tensor

import dsv4_compile
from dsv4_compile.analysis.eager_reasons import _are_disjoint
from dsv4_compile.graph.op_properties import aten_name, bind_arguments, cudagraph_unsafe_reason, is_allocation

LIBRARY = torch.library.Library("op_facts_test", "DEF")
LIBRARY.define("as_strided(Tensor x, int[] size, int[] stride, int offset) -> Tensor")
LIBRARY.impl("as_strided", lambda x, size, stride, offset: x + offset, "CompositeExplicitAutograd")
torch.library.register_fake(
    "op_facts_test::as_strided", lambda x, size, stride, offset: torch.empty_like(x), lib=LIBRARY
)
LIBRARY.define("index_put(Tensor x, Tensor indices) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
LIBRARY.impl("index_put", lambda x, indices: x + indices, "CompositeExplicitAutograd")
torch.library.register_fake("op_facts_test::index_put", lambda x, indices: torch.empty_like(x), lib=LIBRARY)
LIBRARY.define("empty(Tensor x) -> Tensor")

ATEN, OURS = torch.ops.aten, torch.ops.op_facts_test
X, MASK, ROWS = torch.ones(3), torch.tensor([True, False, True]), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "expected"),
    [
        (ATEN.add.Tensor, (X, X), {}, None),
        (ATEN.index.Tensor, (X, [ROWS]), {}, None),
        (ATEN.index.Tensor, (X, [MASK]), {}, "indexes with a mask, so its work depends on data"),
        (ATEN.index_put_.default, (X, [None, MASK], X), {}, "indexes with a mask, so its work depends on data"),
        (ATEN._unsafe_index.Tensor, (X, [ROWS]), {}, None),
        (ATEN.repeat_interleave.Tensor, (ROWS,), {}, "returns a tensor whose size depends on data"),
        (ATEN.repeat_interleave.Tensor, (ROWS,), {"output_size": 2}, None),
        (ATEN.nonzero.default, (X,), {}, "returns a tensor whose size depends on data"),
        (ATEN._local_scalar_dense.default, (X,), {}, "needs a device-to-host sync"),
        (OURS.index_put.default, (X, X), {}, "is tagged cudagraph_unsafe"),
    ],
)
def test_what_no_graph_holds(op: Any, args: Any, kwargs: Any, expected: str | None) -> None:
    assert cudagraph_unsafe_reason(op, bind_arguments(op, args, kwargs)) == expected


@pytest.mark.parametrize("piece_compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_written_though_no_schema_says_so(piece_compiler: str, training: bool) -> None:
    norm = torch.nn.BatchNorm1d(4).train(training)
    eager = copy.deepcopy(norm)
    compiled = compile_host(lambda x: torch.ops.toy.fresh(norm(x)) + norm.running_mean, piece_compiler=piece_compiler)
    kept = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    dsv4_compile.capture(compiled, lambda n: torch.randn(n, 4), [8])
    assert all(torch.equal(buffer, kept[name]) for name, buffer in norm.named_buffers())
    with torch.no_grad():
        for n in (8, 8, 5, 5, 5, 8):
            x = torch.randn(n, 4)
            torch.testing.assert_close(compiled(x), torch.ops.toy.fresh(eager(x)) + eager.running_mean)
            for name, buffer in norm.named_buffers():
                torch.testing.assert_close(buffer, eager.get_buffer(name))


@pytest.mark.parametrize("piece_compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.cholesky, lambda a: torch.linalg.solve(a, a)])
def test_an_op_that_looks_whether_it_worked_is_eager(piece_compiler: str, function: Any) -> None:
    def model(x: Tensor) -> Tensor:
        return function(x + torch.eye(4)) * 2

    plan = dsv4_compile.explain(model, torch.zeros(4, 4))
    ((op,),) = [region.ops for region in plan.regions]
    assert op.reason == "aten::_linalg_check_errors.default needs a device-to-host sync"
    compiled = compile_host(model, piece_compiler=piece_compiler)
    for _ in range(4):
        x = 0.1 * torch.randn(4, 4)
        x = x @ x.t()
        torch.testing.assert_close(compiled(x), model(x))


def in_words(x: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(x, 4) * 2


def as_an_op(x: Tensor) -> Tensor:
    return ATEN.one_hot(x, 4) * 2


def of_a_spectrum(x: Tensor) -> Tensor:
    window = torch.ones(8)
    signal = torch.arange(40.0) + x.sum()
    return torch.istft(torch.stft(signal, 8, window=window, return_complex=True), 8, window=window) * 2


def of_a_spectrum_as_a_method(x: Tensor) -> Tensor:
    window = torch.ones(8)
    return torch.stft(torch.arange(40.0) + x.sum(), 8, window=window, return_complex=True).istft(8, window=window) * 2


@pytest.mark.parametrize("model", [in_words, as_an_op, of_a_spectrum, of_a_spectrum_as_a_method])
def test_an_op_that_looks_at_its_arguments_on_a_cpu_is_eager_there(model: Any) -> None:
    x = torch.tensor([1, 0, 3, 2])
    plan = dsv4_compile.explain(model, x)
    assert [op.reason.partition(" ")[2] for region in plan.regions for op in region.ops] == [
        "needs a device-to-host sync"
    ]
    compiled = compile_host(model)
    for _ in range(4):
        torch.testing.assert_close(compiled(x), model(x))
    elsewhere = dsv4_compile.explain(in_words, x.to("meta"))
    assert elsewhere.regions == ()


def test_an_op_of_another_namespace_is_none_of_atens() -> None:
    assert (aten_name(ATEN.empty.memory_format), aten_name(OURS.empty.default), aten_name(len)) == ("empty", "", "")
    assert is_allocation(ATEN.empty_like.default)
    assert not is_allocation(OURS.empty.default)


def test_an_op_that_is_called_as_a_strided_view_keeps_its_arguments() -> None:
    def model(x: Tensor) -> Tensor:
        return OURS.as_strided(x, [4], [1], 1) * 1

    compiled = compile_host(model, engine="off")
    memory = torch.zeros(12)
    for start in (0, 4, 8):  # Dynamo guards no offset
        x = memory[start : start + 4]
        assert torch.equal(compiled(x), model(x))


def test_an_op_whose_size_the_caller_gives_is_captured() -> None:
    def model(x: Tensor, repeats: Tensor) -> Tensor:
        return torch.repeat_interleave(x * 2, repeats, output_size=6) + 1

    plan = dsv4_compile.explain(model, torch.ones(3), torch.tensor([2, 2, 2]))
    assert [unit.kind for unit in plan.units] == ["piece"]
    compiled = compile_host(model)
    for repeats in ([2, 2, 2], [1, 2, 3], [6, 0, 0], [0, 6, 0]):
        x = torch.randn(3)
        assert torch.equal(compiled(x, torch.tensor(repeats)), model(x, torch.tensor(repeats)))


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ("cuda:0", "cuda:1", True),
        ("cuda:0", "cuda:0", False),
        ("cuda", "cuda:1", False),
        ("cpu", "cuda:0", True),
        ("meta", "meta", False),
    ],
)
def test_devices_that_no_one_graph_works_on(one: str, other: str, apart: bool) -> None:
    assert _are_disjoint(torch.device(one), torch.device(other)) == apart


def test_an_op_that_is_called_as_one_of_atens_and_tagged_runs_eagerly() -> None:
    plan = dsv4_compile.explain(lambda x: OURS.index_put(x * 2, x) + 1, torch.ones(3))
    ((op,),) = [region.ops for region in plan.regions]
    assert op.reason == "op_facts_test::index_put.default is tagged cudagraph_unsafe"
