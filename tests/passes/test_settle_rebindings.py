"""Memory given to a tensor in place: nothing where it was there already, otherwise the traced graph runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from runtime_helpers import compile_host
from stages import stages_of
from torch import Tensor, nn

from dsv4_compile import counters

toy = torch.ops.toy
DELTA = torch.arange(16.0).view(4, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("b", torch.randn(4, 4))


Function = Callable[[Model, Tensor], Any]


# the same memory: captured


def merged_and_unmerged(m: Model, x: Tensor) -> Tensor:
    m.w.data -= DELTA
    y = toy.fresh(x @ m.w)
    m.w.data += DELTA
    return y @ m.w


def method_in_place(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    m.w.data.mul_(0.5).add_(1)
    m.b.data.copy_(x)
    return toy.fresh(x @ m.w), m.b[1:]


def rows_in_place(m: Model, x: Tensor) -> Tensor:
    m.w.data[:2] -= DELTA[:2]
    m.b.data[1:].zero_()
    return toy.fresh(x @ m.w) + m.b


def taken_and_given_back(m: Model, x: Tensor) -> Tensor:
    w = m.w.data
    w += x
    m.w.data = w
    m.b.data = m.b.data
    return toy.fresh(x @ m.w) + m.b


def of_the_caller(m: Model, x: Tensor) -> Tensor:
    x.data -= 1
    return toy.fresh(x * 2)


SAME: list[Function] = [merged_and_unmerged, method_in_place, rows_in_place, taken_and_given_back, of_the_caller]


# other memory: the traced graph


def another_tensor(m: Model, x: Tensor) -> Tensor:
    m.w.data = x * 2
    return toy.fresh(x @ m.w)


def computed_anew(m: Model, x: Tensor) -> Tensor:
    m.b.data = m.b.data + 1
    return toy.fresh(x @ m.b)


def transposed(m: Model, x: Tensor) -> Tensor:
    m.w.data = m.w.data.t()
    return toy.fresh(x @ m.w)


def a_part_of_it(m: Model, x: Tensor) -> Tensor:
    m.w.data = m.w.data.view(-1)[2:10].view(2, 4)
    return toy.fresh(x @ m.w.t())


def there_and_back(m: Model, x: Tensor) -> Tensor:
    before = m.w.data
    m.w.data = DELTA
    y = toy.fresh(x @ m.w)
    m.w.data = before
    return y @ m.w


def view_from_before(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    v = m.w.t()
    m.w.data = x + 1
    return v, toy.fresh(x @ m.w)


def of_the_graphs_own(m: Model, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, g = x + 1, x * 2
    v = h[1:]
    h.set_(g)
    h.add_(1)
    return toy.fresh(v), h * 2, g


def of_a_result(m: Model, x: Tensor) -> Tensor:
    memory = torch.zeros(len(x), 4)
    memory.set_(toy.fresh(x))
    return memory


def of_an_input(m: Model, x: Tensor) -> Tensor:
    x.data = toy.fresh(x)
    return x + 1


OTHER: list[Function] = [
    another_tensor,
    computed_anew,
    transposed,
    a_part_of_it,
    there_and_back,
    view_from_before,
    of_the_graphs_own,
    of_a_result,
    of_an_input,
]


def agree(function: Function, compiled: Any, model: Model) -> None:
    """One call of both, on copies of one model and input."""
    eager, x = copy.deepcopy(model), torch.randn(4, 4)
    y = x.clone()
    with torch.no_grad():
        results, wanted = compiled(model, x), function(eager, y)
    for one, other in zip((results, model.w, model.b, x), (wanted, eager.w, eager.b, y), strict=True):
        torch.testing.assert_close(one, other, check_stride=True)
        if isinstance(one, tuple):
            assert [a.stride() for a in one] == [b.stride() for b in other]


@pytest.mark.parametrize("options", [{}, {"runner": "mrv1", "region": "minimal"}, {"engine": "off"}], ids=str)
@pytest.mark.parametrize("function", SAME, ids=lambda function: function.__name__)
def test_what_changes_nothing_is_captured(function: Function, options: dict[str, Any]) -> None:
    compiled, model = compile_host(function, **options), Model()
    captured = options.get("engine") != "off" and function is not of_the_caller
    for _ in range(4):
        agree(function, compiled, model)
    if captured:
        with counters.expect(captures=0, uncaptured_calls=0, replays=2):
            agree(function, compiled, model)
            agree(function, compiled, model)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("options", [{}, {"runner": "mrv1", "region": "minimal"}, {"engine": "off"}], ids=str)
@pytest.mark.parametrize("function", OTHER, ids=lambda function: function.__name__)
def test_other_memory_runs_the_traced_graph(
    function: Function, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    compiled = compile_host(function, **options)
    with counters.expect(graphs_compiled=1, captures=0, uncaptured_calls=4):
        for _ in range(4):
            agree(function, compiled, Model())
    said = [r.getMessage() for r in caplog.records if "gets other memory in place (" in r.getMessage()]
    assert len(said) == 1
    assert "test_settle_rebindings.py:" in said[0]


def test_a_model_whose_weight_moves_in_each_call() -> None:
    compiled, model = compile_host(computed_anew), Model()
    for _ in range(5):
        agree(computed_anew, compiled, model)


def stage(function: Function) -> tuple[str, str | None]:
    texts, graph, _ = stages_of(function, Model(), torch.ones(4, 4), split_ops=["toy::fresh"])
    return texts["settle_rebindings"], graph.uncaptured


def test_it_drops_what_changes_nothing() -> None:
    text, uncaptured = stage(merged_and_unmerged)
    assert uncaptured is None
    assert_expected_inline(
        text,
        """\
_get_data_attr = _get_data_attr(l_m_parameters_w_)
isub = isub(_get_data_attr, g_delta_)
matmul = matmul(l_x_, l_m_parameters_w_)
y = toy::fresh(matmul)
_get_data_attr_1 = _get_data_attr(l_m_parameters_w_)
iadd = iadd(_get_data_attr_1, g_delta_)
matmul_1 = matmul(y, l_m_parameters_w_)
return (matmul_1,)""",
    )


def test_it_names_what_changes_something() -> None:
    _, uncaptured = stage(there_and_back)
    assert uncaptured is not None
    assert uncaptured.startswith("l_m_parameters_w_ gets other memory in place (")
    assert uncaptured.endswith("m.w.data = DELTA), which no replay repeats")
