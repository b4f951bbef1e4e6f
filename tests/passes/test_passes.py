"""Each pass on a toy graph: what it makes of it, to be read beside the docstring of the pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from stages import stages_of
from torch import Tensor
from toy_ops import SPLIT

import dsv4_compile

X = torch.zeros(5, 4)


def stage(name: str, fn: Any, *args: Any, **options: Any) -> str:
    texts, _, _ = stages_of(fn, *args, **{"split_ops": SPLIT, **options})
    return texts[name]


def test_resolve_targets_gives_one_spelling() -> None:
    def fn(x: Tensor) -> Tensor:
        a = torch.ops.toy.fresh(q=x)
        b = torch.ops.toy.fresh.default(a)
        out = torch.empty_like(b)
        torch.ops.toy.attn(out=out, q=b)
        return torch.ops.aten.add(out, 1)

    assert_expected_inline(
        stage("resolve_targets", fn, X),
        """\
a = toy::fresh(l_x_)
b = toy::fresh(a)
out = empty_like(b)
attn = toy::attn(b, out)
add = aten::add.Tensor(out, 1)
return (add,)""",
    )


def test_resolve_targets_turns_metadata_changes_into_views() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x + 1
        before = h * 2
        h.unsqueeze_(0)
        return before, h * 3

    assert_expected_inline(
        stage("resolve_targets", fn, X),
        """\
h = add(l_x_, 1)
before = mul(h, 2)
unsqueeze_ = unsqueeze(h, 0)
mul_1 = mul(unsqueeze_, 3)
return (before, mul_1)""",
    )


def test_scope_modes_keeps_autocast_on_the_nodes() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x + 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = y @ x.t()
            torch.ops.toy.tick(z)
            return z @ x

    assert_expected_inline(
        stage("scope_modes", fn, X),
        """\
y = add(l_x_, 1)
t = t(l_x_)
z = matmul(y, t)
tick = toy::tick(z)
matmul_1 = matmul(z, l_x_)
return (matmul_1,)""",
    )
    assert_expected_inline(
        stage("partition_graph", fn, X),
        """\
piece_0(s77, s27, l_x_) -> (z)
    y = add(l_x_, 1)
    _enter_autocast = _enter_autocast(cpu, torch.bfloat16, True, None)
    t = t(l_x_)
    z = matmul(y, t)
    _exit_autocast = _exit_autocast(_enter_autocast)
region_0(s77, z) -> ()
    _enter_autocast = _enter_autocast(cpu, torch.bfloat16, True, None)
    tick = toy::tick(z)
    _exit_autocast = _exit_autocast(_enter_autocast)
piece_1(s77, s27, z, l_x_) -> (matmul_1)
    _enter_autocast = _enter_autocast(cpu, torch.bfloat16, True, None)
    matmul_1 = matmul(z, l_x_)
    _exit_autocast = _exit_autocast(_enter_autocast)""",
    )


def test_decompose_sizes_leaves_symbols() -> None:
    def fn(x: Tensor) -> Tensor:
        size = x.size()
        h = x * x.numel()
        out = torch.empty_like(h)
        torch.ops.toy.attn(h, out)
        return out.view(size).view(*size[:-1], 2, -1)

    assert_expected_inline(
        stage("dynamo", fn, X),
        """\
size = size(l_x_)
numel = numel(l_x_)
h = mul(l_x_, numel)
out = empty_like(h)
attn = attn(h, out)
view = view(out, size)
view_1 = view(view, s77, 2, -1)
return (view_1,)""",
    )
    assert_expected_inline(
        stage("decompose_sizes", fn, X),
        """\
mul = mul(s27, s77)
h = mul(l_x_, mul)
out = empty_like(h)
attn = toy::attn(h, out)
view = view(out, (s77, s27))
view_1 = view(view, s77, 2, -1)
return (view_1,)""",
    )


def test_place_getitems_behind_their_producer() -> None:
    def fn(x: Tensor) -> Tensor:
        a, b, _ = torch.ops.toy.three(x)
        c = torch.ops.toy.fresh(a)
        return c + b

    assert_expected_inline(
        stage("place_getitems", fn, X),
        """\
three = toy::three(l_x_)
a = getitem(three, 0)
b = getitem(three, 1)
c = toy::fresh(a)
add = add(c, b)
return (add,)""",
    )


def test_infer_effects_from_schemas() -> None:
    def fn(x: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        h = x + 1
        view = h[:, :2]
        out = torch.empty_like(h)
        torch.ops.toy.attn(h, out)
        view.add_(1)
        cache[slots] = out
        torch.add(h, 1, out=out)
        zeros = torch.zeros_like(h)
        torch.ops.toy.tick(h)
        return torch.rand_like(h) + zeros + out.reshape(-1, 2).sum()

    assert_expected_inline(
        stage("infer_effects", fn, X, torch.zeros(9, 4), torch.arange(5)),
        """\
h = add(l_x_, 1)                                          reads 0; makes 3
view = getitem(h, (slice(None, None, None), slice(None, 2, None)))  view
out = empty_like(h)                                       view; makes 4
attn = toy::attn(h, out)                                  reads 3; writes 4
add_ = add_(view, 1)                                      writes 3
setitem = setitem(l_cache_, l_slots_, out)                reads 2,4; writes 1
add_1 = add(h, 1, out=out)                                reads 3; writes 4
zeros = zeros_like(h)                                     makes 5
tick = toy::tick(h)                                       reads 3; barrier; declares no effect, so it has one on the host
rand_like = rand_like(h)                                  makes 6; random
add_2 = add(rand_like, zeros)                             reads 5,6; makes 7
reshape = reshape(out, -1, 2)                             view
sum_1 = sum(reshape)                                      reads 4; makes 8
add_3 = add(add_2, sum_1)                                 reads 7,8; makes 9
return (add_3,)""",
    )


def test_relate_offsets_counts_from_the_base() -> None:
    def fn(x: Tensor) -> Tensor:
        h = x * 2
        v = h.as_strided((2, 2), (4, 1), 1)
        return torch.as_strided(v, (2,), (1,), storage_offset=5) + torch.as_strided_copy(x, (2,), (1,))

    assert_expected_inline(
        stage("relate_offsets", fn, X),
        """\
h = mul(l_x_, 2)
sub = sub(1, 0)
storage_offset = storage_offset(h)
add_1 = add(storage_offset, sub)
v = as_strided(h, (2, 2), (4, 1), add_1)
sub_1 = sub(5, 1)
storage_offset_1 = storage_offset(v)
add_2 = add(storage_offset_1, sub_1)
as_strided_1 = as_strided(v, (2,), (1,), storage_offset=add_2)
as_strided_copy = as_strided_copy(l_x_, (2,), (1,))
add = add(as_strided_1, as_strided_copy)
return (add,)""",
    )


def test_rebase_results_uses_what_was_written() -> None:
    def fn(x: Tensor) -> Tensor:
        h = x * 2
        y = h.add_(1)
        torch.ops.toy.tick(x)
        return y * 2

    assert_expected_inline(
        stage("rebase_results", fn, X),
        """\
h = mul(l_x_, 2)
y = add_(h, 1)
tick = toy::tick(l_x_)
mul_1 = mul(h, 2)
return (mul_1,)""",
    )


def three_policies(fn: Any, *args: Any) -> str:
    """The same graph under mrv2/narrow, mrv1/wide and mrv1/minimal."""
    texts = []
    for runner, region in (("mrv2", "narrow"), ("mrv1", "wide"), ("mrv1", "minimal")):
        texts.append(f"-- {runner} {region}\n{stage('choose_regions', fn, *args, runner=runner, region=region)}")
    return "\n".join(texts)


def attention(x: Tensor, slots: Tensor, cache: Tensor, w: Tensor) -> Tensor:
    """Projection, preparation, a projection that does not need it, split op, and a late reader of step state."""
    kv = x @ w
    torch.ops.toy.kv_write(kv, slots, cache)
    q = x @ w
    out = torch.empty_like(q)
    torch.ops.toy.attn(q, out)
    return (out @ w) * slots[:, None]


@pytest.fixture
def attention_inputs() -> tuple[Tensor, ...]:
    dsv4_compile.register_op("toy::kv_write", role="prepare", step_state=("slots",))
    return X, torch.arange(5), torch.zeros(9, 4), torch.zeros(4, 4)


def test_choose_regions_by_policy(attention_inputs: tuple[Tensor, ...]) -> None:
    assert_expected_inline(
        three_policies(attention, *attention_inputs),
        """\
-- mrv2 narrow
kv = matmul(l_x_, l_w_)                                   captured
kv_write = toy::kv_write(kv, l_slots_, l_cache_)          captured
q = matmul(l_x_, l_w_)                                    captured
out = empty_like(q)                                       view
attn = toy::attn(q, out)                                  split op
matmul_2 = matmul(out, l_w_)                              captured
getitem = getitem(l_slots_, (slice(None, None, None), None))  view
mul = mul(matmul_2, getitem)                              captured
return (mul,)
-- mrv1 wide
kv = matmul(l_x_, l_w_)                                   captured
kv_write = toy::kv_write(kv, l_slots_, l_cache_)          reads step state slots
q = matmul(l_x_, l_w_)                                    wide: between preparation and split op
out = empty_like(q)                                       view
attn = toy::attn(q, out)                                  split op
matmul_2 = matmul(out, l_w_)                              captured
getitem = getitem(l_slots_, (slice(None, None, None), None))  view
mul = mul(matmul_2, getitem)                              reads step state slots
return (mul,)
-- mrv1 minimal
kv = matmul(l_x_, l_w_)                                   captured
kv_write = toy::kv_write(kv, l_slots_, l_cache_)          reads step state slots
q = matmul(l_x_, l_w_)                                    captured
out = empty_like(q)                                       view
attn = toy::attn(q, out)                                  split op
matmul_2 = matmul(out, l_w_)                              captured
getitem = getitem(l_slots_, (slice(None, None, None), None))  view
mul = mul(matmul_2, getitem)                              reads step state slots
return (mul,)""",
    )


def test_move_nodes_only_under_minimal(attention_inputs: tuple[Tensor, ...]) -> None:
    assert_expected_inline(
        stage("move_nodes", attention, *attention_inputs, runner="mrv1", region="minimal"),
        """\
kv = matmul(l_x_, l_w_)                                   captured
q = matmul(l_x_, l_w_)                                    captured
kv_write = toy::kv_write(kv, l_slots_, l_cache_)          reads step state slots
out = empty_like(q)                                       view
attn = toy::attn(q, out)                                  split op
matmul_2 = matmul(out, l_w_)                              captured
getitem = getitem(l_slots_, (slice(None, None, None), None))  view
mul = mul(matmul_2, getitem)                              reads step state slots
return (mul,)""",
    )


def test_move_nodes_sinks_what_the_region_does_not_need() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.ops.toy.fresh(x)
        y = x * 3
        b = torch.ops.toy.fresh(a)
        return y, b

    assert_expected_inline(
        stage("move_nodes", fn, X, region="minimal"),
        """\
a = toy::fresh(l_x_)                                      split op
b = toy::fresh(a)                                         split op
y = mul(l_x_, 3)                                          captured
return (y, b)""",
    )


def test_move_nodes_respects_conflicts_random_draws_and_barriers() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        torch.ops.toy.fresh(x)
        x.add_(1)  # writes what both split ops read
        a = torch.ops.toy.fresh(x)
        noise = torch.rand_like(x)
        torch.ops.toy.tick(x)  # undeclared effects: nothing may pass
        y = x * 3
        b = torch.ops.toy.fresh(a)
        return noise, y, b

    assert_expected_inline(
        stage("move_nodes", fn, X, region="minimal"),
        """\
fresh = toy::fresh(l_x_)                                  split op
add_ = add_(l_x_, 1)                                      captured
noise = rand_like(l_x_)                                   captured
a = toy::fresh(l_x_)                                      split op
tick = toy::tick(l_x_)                                    split op
b = toy::fresh(a)                                         split op
y = mul(l_x_, 3)                                          captured
return (noise, y, b)""",
    )


def test_partition_keeps_views_and_allocations_with_their_users() -> None:
    def fn(x: Tensor) -> Tensor:
        h = x + 1
        view = h[:, :2]
        out = torch.empty_like(h)
        torch.ops.toy.attn(h, out)
        flat = out.view(-1)
        second = torch.empty_like(out)
        torch.ops.toy.attn(flat.view(out.shape), second)
        view.add_(second[:, :2])
        return h

    assert_expected_inline(
        stage("partition_graph", fn, X),
        """\
piece_0(s77, s27, l_x_) -> (h)
    h = add(l_x_, 1)
region_0(s77, s27, h, second) -> ()
    out = empty_like(h)
    attn = toy::attn(h, out)
    flat = view(out, -1)
    view_2 = view(flat, (s77, s27))
    attn_1 = toy::attn(view_2, second)
piece_1(s77, s27, h, second) -> ()
    view = getitem(h, (slice(None, None, None), slice(None, 2, None)))
    getitem_3 = getitem(second, (slice(None, None, None), slice(None, 2, None)))
    add_ = add_(view, getitem_3)""",
    )


def test_find_duplicates_tells_constants_and_axes_apart() -> None:
    def block(x: Tensor, weight: Tensor, axis: int, scale: int) -> Tensor:
        first, *_ = (x @ weight).split(2, dim=axis)
        return torch.ops.toy.fresh(x + first.sum() * scale)

    def fn(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        x = block(x, v, 1, 3)
        x = block(x, w, 1, 3)  # the same but for the weight
        x = block(x, w, 0, 3)  # another axis
        return block(x, w, 1, 4)  # another constant

    _, graph, _ = stages_of(fn, X, torch.zeros(4, 4), torch.ones(4, 4), split_ops=SPLIT)
    assert graph.duplicates == {"piece_1": "piece_0"}


def test_an_allocation_of_unknown_size_is_made_where_it_stands() -> None:
    def fn(x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        out = torch.empty(rows.shape[0], 4)
        torch.ops.toy.attn(x[rows], out)
        y = x * 2
        torch.ops.toy.attn(out * 1, out)
        return out.sum() + y

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        texts, graph, _ = stages_of(fn, X + 1, split_ops=SPLIT)
    assert graph.allocations == ()
    assert "empty(sym_size_int, 4)" in texts["partition_graph"]
