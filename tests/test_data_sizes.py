"""Sizes that data decides are eager; sizes of inputs that were marked as unbacked are part of the bucket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from eager_twin import check_calls, compile_piecewise, outcome, unbacked
from toy_ops import SPLIT

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.errors import UnsupportedInputError

toy = torch.ops.toy


@pytest.fixture(autouse=True)
def sizes_of_data() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


def equal_to_an_input_size(x, m):
    return x * 2 + (x * 2)[m.nonzero().flatten()]


def row_of_a_data_sized_value(x, m):
    return x + x[m > 0][0]


def column_of_a_data_sized_value(x, m):
    return torch.nonzero(x).t()[0] + 0, x * 2


def data_sized_sum(x, m):
    return torch.masked_select(x, m[:, None] > 0).sum() + x


def unique_values(x, m):
    values, counts = torch.unique(x, return_counts=True)
    return values * 2, counts.sum(), x + 1


@pytest.mark.parametrize(
    "function",
    [
        equal_to_an_input_size,
        row_of_a_data_sized_value,
        column_of_a_data_sized_value,
        data_sized_sum,
        unique_values,
    ],
)
@pytest.mark.parametrize("region", ["narrow", "minimal"])
def test_results_whose_size_depends_on_data(function, region):
    check_calls(function, [(torch.randn(n, 4), torch.ones(n)) for n in (8, 8, 8, 6, 6, 6, 8)], region=region)


def row(n, y):
    return y[n] * 2


def slices(n, y):
    return y[:n] * 2, y[n:].sum(), y + 1


def made(n, y):
    return torch.empty(n).fill_(3) + 1, torch.arange(n), torch.zeros(n, 3).t()[0] * 2


def repeated(n, y):
    return torch.repeat_interleave(y, n, dim=0) * 2


def narrowed(n, y):
    return y.narrow(0, n, 1).t().contiguous()


def strided_around_a_row(n, y):
    chosen = (y * 2)[n]
    return torch.as_strided(chosen, (2,), (1,), 3) + chosen


def view_where_there_is_one_row(n, y):
    made = torch.ones(n, 2)
    return made.t().contiguous(), torch.stack([made.sum(), y.sum()])


@pytest.mark.parametrize(
    "use", [strided_around_a_row, view_where_there_is_one_row, row, slices, made, repeated, narrowed]
)
def test_a_number_of_the_data_decides_what_is_computed(use):
    def f(x, y):
        n = x.sum().item()
        torch._check(n >= 0)
        torch._check(n < y.shape[0])
        return use(n, y)

    check_calls(f, [(torch.tensor([n]), torch.randn(7, 2)) for n in (1, 1, 1, 2, 3, 1)])


def test_a_view_that_data_chooses_has_its_reason_in_the_plan():
    def f(x, y):
        n = x.sum().item()
        torch._check(n >= 0)
        torch._check(n < y.shape[0])
        return y[n] * 2

    plan = dsv4_compile.explain(f, torch.tensor([1]), torch.randn(7, 2))
    reasons = {op.name: op.reason for unit in plan.regions for op in unit.ops}
    assert reasons["mul"] == "takes select, a view that a data-dependent scalar chooses"


def test_a_size_that_the_program_claims_is_checked():
    compiled = compile_piecewise(equal_to_an_input_size)
    full, short = torch.ones(8), torch.tensor([1.0, 1.0, 0, 0, 0, 0, 0, 0])
    for mask in (full, full, full):
        compiled(torch.ones(8, 4), mask)
    with pytest.raises(RuntimeError, match="Eq"):
        compiled(torch.ones(8, 4), short)
    assert torch.equal(compiled(torch.ones(8, 4), full), 4 * torch.ones(8, 4))


def gemm(x, w):
    y = (x @ w).relu()
    out = torch.empty_like(y)
    toy.attn(y, out)
    return out * 2 + x


def reshaped(x, w):
    return x.reshape(-1) * 2, x.view(x.shape[0] * 2, 2) + 1, x.t().contiguous(), x.flatten().sum()


def made_of_sizes(x, w):
    return torch.zeros(x.shape[0], 3) + w.shape[0]


def with_data(x, w):
    y = x @ w
    return y[x[:, 0].nonzero().flatten()].sum(0) + y


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", [gemm, reshaped, made_of_sizes, with_data])
@pytest.mark.parametrize("options", [{}, {"region": "minimal"}, {"engine": "off"}, {"check": "full"}], ids=str)
def test_an_unbacked_input_size_is_a_size_like_any_other(function, options):
    weight = torch.ones(4, 4)
    calls = [(unbacked(n, 4), weight) for n in (4, 4, 4, 7, 7, 7, 1, 1, 1)]
    check_calls(function, calls, split_ops=SPLIT, **options)


def test_an_unbacked_size_compiles_once_and_is_captured_per_bucket():
    weight = torch.ones(4, 4)
    compiled = compile_piecewise(gemm, split_ops=SPLIT)
    with counters.expect(graphs_compiled=1, captures=3, replays=6, recaptures=0):
        for n in (4, 7, 1):
            for _ in range(3):
                outcome(compiled, (unbacked(n, 4), weight))


@pytest.mark.inductor
@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_pieces_are_compiled_for_unbacked_sizes(compiler):
    calls = [(unbacked(n, 4), torch.ones(4, 4)) for n in (4, 4, 4, 7, 7, 1, 1)]
    check_calls(gemm, calls, split_ops=SPLIT, piece_compiler=compiler)
    assert counters.graphs_compiled == 1


def test_a_size_of_one_that_makes_a_view_of_a_copy():
    def f(x):
        y = x.t().contiguous()
        y.add_(1)
        return toy.fresh(x * 2) + x, y

    calls = [(unbacked(n, 4),) for n in (4, 4, 4, 1, 1, 1, 0, 0, 2)]
    check_calls(f, calls, split_ops=SPLIT)
    assert counters.traced_graph_calls == 5


def test_a_size_of_one_that_changes_nothing_is_captured():
    check_calls(gemm, [(unbacked(1, 4), torch.ones(4, 4))] * 4, split_ops=SPLIT)
    assert (counters.captures, counters.traced_graph_calls) == (1, 0)


def test_the_plan_shows_the_size_that_the_example_had():
    plan = dsv4_compile.explain(gemm, unbacked(5, 4), torch.ones(4, 4), options={"split_ops": SPLIT})
    assert plan.tokens == "u0"
    assert ("u0", 5) in plan.traced_sizes
    assert plan.workspace.planned >= 2 * 256


def test_max_tokens_bounds_an_unbacked_size():
    compiled = compile_piecewise(gemm, split_ops=SPLIT, max_tokens=8)
    for n in (4, 4, 9, 9, 9, 4):
        given, _ = outcome(compiled, (unbacked(n, 4), torch.ones(4, 4)))
        wanted, _ = outcome(gemm, (unbacked(n, 4), torch.ones(4, 4)))
        assert torch.equal(given, wanted)
    assert counters.captures == 1


def test_scattering_into_a_view_that_data_chooses_is_refused():
    def f(x, y):
        n = x.sum().item()
        torch._check(n >= 0)
        torch._check(n < y.shape[0])
        return torch.as_strided_scatter((y * 2)[n], torch.zeros(1), (1,), (1,), 1)

    with pytest.raises(UnsupportedInputError, match="scatters into a view that data chooses"):
        compile_piecewise(f)(torch.tensor([1]), torch.randn(7, 2))
