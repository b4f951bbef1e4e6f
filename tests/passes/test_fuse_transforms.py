"""`torch.func` transforms: all between entering and leaving a level is one node, captured where it can be."""

from __future__ import annotations

import pytest
import torch
from eager_twin import check_calls, compile_piecewise
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from toy_ops import SPLIT

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.compat import functorch
from dsv4_compile.errors import UnsupportedTransformError
from dsv4_compile.graph.fused_call import FusedCall

toy = torch.ops.toy
vmap = torch.vmap
OPTIONS = [{}, {"region": "minimal", "runner": "mrv1"}, {"engine": "off"}, {"check": "full"}]


def plain(x):
    return vmap(lambda row: row.sin().cumsum(0))(x * 2) + 1


def nested(x):
    return vmap(vmap(lambda a, b: a * b, in_dims=(0, None)), in_dims=(None, 0))(x[0], x[1]) + 1


def several_results(x):
    return vmap(lambda row: (row * 2, row.sum(), row.unsqueeze(0).t()))(x)


def container(x):
    return vmap(lambda row: row.split(2))(x)[1] * 2


def views(x):
    return vmap(lambda row: row)(x) * 2, vmap(lambda row: row.flip(0), in_dims=1, out_dims=1)(x)


def random(x):
    return vmap(lambda row: row + torch.randn(3), randomness="different")(x) + torch.rand(3)


def same_random(x):
    return vmap(lambda row: row * torch.rand(4), randomness="same")(x)


def writes(x):
    vmap(lambda row: row.add_(1))(x)
    return x * 2


def unbatched_operand(x):
    return vmap(torch.nn.functional.linear, in_dims=(0, None))(x, torch.ones(4, 4))


def gathers(x):
    index = x.argsort(dim=1)
    return vmap(lambda row, i: row.gather(0, i))(x, index) + vmap(lambda i: x[0][i])(index)


def sizes_used_outside(x):
    y = vmap(lambda row: row * torch.arange(4))(x)
    return y.reshape(x.shape[0] * 2, 2) + x.shape[0]


def under_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return vmap(lambda row: torch.outer(row, row) @ row)(x)


def forward_derivative(x):
    return torch.func.jvp(lambda y: y.sin() * 2, (x,), (torch.ones_like(x),))


def dual_level(x):
    with forward_ad.dual_level():
        y = forward_ad.make_dual(x * 2, torch.ones_like(x)).sin().cumsum(0)
        derivative = forward_ad.unpack_dual(y).tangent
    return y, derivative * 2


def jacobian(x):
    return torch.func.jacfwd(lambda y: y.sin())(x[0])


def around_split_ops(x):
    out = torch.empty_like(x)
    toy.attn(vmap(lambda row: row.softmax(-1))(x), out)
    return vmap(lambda row: row.norm())(toy.fresh(out))


PROGRAMS = [
    plain,
    nested,
    several_results,
    container,
    views,
    random,
    same_random,
    writes,
    unbatched_operand,
    gathers,
    sizes_used_outside,
    under_autocast,
    forward_derivative,
    dual_level,
    jacobian,
    around_split_ops,
]


def calls(program) -> list[tuple[Tensor]]:
    width = 3 if program is random else 4
    return [(torch.randn(n, width),) for n in (5, 5, 5, 6, 6, 5)]


@pytest.mark.sampled(11)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results(program, options):
    check_calls(program, calls(program), split_ops=SPLIT, **options)


@pytest.mark.sampled(2)
@pytest.mark.inductor
@pytest.mark.parametrize("program", [several_results, writes, gathers, around_split_ops])
def test_pieces_around_are_compiled(program):
    check_calls(program, calls(program), split_ops=SPLIT, piece_compiler="inductor")


@pytest.mark.parametrize("program", [plain, nested, random, gathers, forward_derivative])
def test_all_of_it_is_captured(program):
    plan = dsv4_compile.explain(program, *calls(program)[0])
    assert [unit.kind for unit in plan.units] == ["piece"]
    assert {"vmap", "jvp"} & {op.op for op in plan.pieces[0].ops}


def test_equal_transforms_are_duplicates():
    def layers(x):
        for _ in range(4):
            x = toy.fresh(vmap(lambda row: row.softmax(-1))(x))
        return x

    plan = dsv4_compile.explain(layers, torch.randn(5, 4), options={"split_ops": SPLIT})
    assert [unit.duplicate_of for unit in plan.pieces] == [None, "piece_0", "piece_0", "piece_0"]


def test_other_transforms_are_not():
    def layers(x):
        for dim in (0, -1, 0):
            x = toy.fresh(vmap(lambda row, dim=dim: row.flip(0) if dim else row.cumsum(0))(x))
        return x

    plan = dsv4_compile.explain(layers, torch.randn(5, 4), options={"split_ops": SPLIT})
    assert [unit.duplicate_of for unit in plan.pieces] == [None, None, "piece_0"]


def test_a_split_op_inside_makes_it_eager():
    library = torch.library.Library("transformed", "FRAGMENT")
    library.define("core(Tensor x) -> Tensor")
    library.impl("core", lambda x: x * 3, "CompositeExplicitAutograd")
    torch.library.register_fake("transformed::core", torch.empty_like, lib=library)
    torch.library.register_vmap(
        "transformed::core", lambda info, dims, x: (torch.ops.transformed.core(x), dims[0]), lib=library
    )

    def f(x):
        return vmap(lambda row: torch.ops.transformed.core(row) + 1)(x) * 2

    given = {"split_ops": ("transformed::core",)}
    plan = dsv4_compile.explain(f, torch.randn(5, 4), options=given)
    reasons = {op.op: op.reason for unit in plan.regions for op in unit.ops}
    assert reasons == {"vmap": "runs the split op transformed::core.default inside"}
    check_calls(f, calls(f), **given)


def test_what_it_writes_is_seen():
    def f(x, cache):
        vmap(lambda row, kept: kept.copy_(row))(x, cache)
        return toy.fresh(x) + cache

    check_calls(f, [(torch.randn(5, 4), torch.zeros(5, 4)) for _ in range(4)], split_ops=SPLIT, region="minimal")


def masked_attention(q):
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], q.shape[2], device="cpu")
    return flex_attention(q, q, q, block_mask=mask)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("size", [128, 200])
def test_the_mask_of_flex_attention(size):
    check_calls(masked_attention, [(torch.randn(1, 2, size, 16),) for _ in range(3)])
    plan = dsv4_compile.explain(masked_attention, torch.randn(1, 2, size, 16))
    reasons = {op.op: op.reason for unit in plan.regions for op in unit.ops}
    assert reasons == {"flex_attention": "higher-order op flex_attention decides on the host what it runs"}


@pytest.mark.exhaustive
def test_scans_and_maps():
    from torch._higher_order_ops.associative_scan import associative_scan
    from torch._higher_order_ops.map import map as map_over
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    def sums(x):
        return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")

    def scanned(x):
        return scan(lambda carry, row: (carry + row, carry * 2), x[0], x)

    def mapped(x):
        return map_over(lambda row: row * 2, x)

    def looped(x):
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))

    for program, name in ((sums, None), (scanned, "scan"), (mapped, "map"), (looped, "while_loop")):
        torch._dynamo.reset()
        check_calls(program, [(torch.randn(8, 3),) for _ in range(3)])
        plan = dsv4_compile.explain(program, torch.randn(8, 3))
        eager = [op.op for unit in plan.regions for op in unit.ops]
        assert all(op.startswith(name or "-") for op in eager), eager


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (lambda x: torch.func.grad(lambda y: (y**2).sum())(x), "grad, vjp, jacrev or hessian"),
        (lambda x: torch.func.vjp(lambda y: (y**2).sum(), x)[1](torch.ones(())), "grad, vjp, jacrev or hessian"),
        (lambda x: vmap(torch.func.grad(lambda y: y.sin().sum()))(x), "grad, vjp, jacrev or hessian"),
        (lambda x: torch.func.jacrev(lambda y: y.sin())(x), "grad, vjp, jacrev or hessian"),
    ],
)
def test_what_differentiates_is_refused_by_name(transform, name):
    compiled = compile_piecewise(transform)
    with pytest.raises(UnsupportedTransformError, match=f"torch.func.{name} is called .*test_fuse_transforms.py"):
        compiled(torch.randn(2, 3))


LEVELS = torch._C._functorch
ENTERED = {
    "vmap": (LEVELS._vmap_increment_nesting, (2, "error")),
    "grad": (LEVELS._grad_increment_nesting, ()),
    "jvp": (LEVELS._jvp_increment_nesting, ()),
    "func": (LEVELS._func_increment_nesting, (True,)),
}


@pytest.mark.parametrize("outside", [(), ("grad",), ("vmap", "jvp")], ids=" ".join)
@pytest.mark.parametrize("inside", [("vmap",), ("grad", "vmap"), ("jvp", "func", "vmap")], ids=" ".join)
def test_an_exception_inside_leaves_no_level(outside, inside):
    def fail(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for name in inside:
        graph.call_function(*ENTERED[name])
    graph.call_function(fail, (x,))
    graph.output(x)
    call = FusedCall("vmap", torch.fx.GraphModule(torch.nn.Module(), graph))
    kinds = []
    for name in outside:
        enter, args = ENTERED[name]
        enter(*args)
        kinds.append(LEVELS.peek_interpreter_stack().key())
    try:
        with pytest.raises(KeyboardInterrupt):
            call(torch.zeros(2))
        assert functorch.depth() == len(outside)
        assert not kinds or LEVELS.peek_interpreter_stack().key() == kinds[-1]
    finally:
        functorch.leave_to(0)
    assert torch.equal(vmap(lambda row: row + 1)(torch.zeros(2)), torch.ones(2))


def picks(x, index):
    return torch.func.jvp(lambda y: y.sin().index_select(0, index), (x,), (torch.ones_like(x),))


def picks_in_dual_level(x, index):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, x).index_select(0, index)).tangent


@pytest.mark.parametrize("program", [picks, picks_in_dual_level])
@pytest.mark.parametrize("options", [{"engine": "off"}, {}, {"check": "full"}], ids=str)
def test_an_exception_inside_leaves_no_derivatives(program, options):
    """There is one level of them in a process: where it stays entered, nobody enters it any more."""
    x, good, bad = torch.randn(3), torch.tensor([0, 2]), torch.tensor([0, 7])
    compiled = compile_piecewise(program, **options)
    with torch.no_grad():
        compiled(x, good)
        for _ in range(2):
            with pytest.raises(IndexError):
                compiled(x, bad)
            wanted = program(x, good)
            torch.testing.assert_close(compiled(x, good), wanted)


def test_an_exception_in_the_traced_graph_leaves_no_derivatives():
    def program(x, cache, index):
        cache.add_(1)
        return picks(x, index)

    x, good, bad = torch.randn(4), torch.tensor([0, 2]), torch.tensor([0, 7])
    compiled = compile_piecewise(program)
    memory = torch.zeros(6)
    with torch.no_grad():
        compiled(x, torch.zeros(4), good)
        with pytest.raises(IndexError):
            compiled(memory[2:], memory[:4], bad)
        assert counters.traced_graph_calls == 1
        torch.testing.assert_close(compiled(x, torch.zeros(4), good), program(x, torch.zeros(4), good))


def test_a_replay_enters_no_level(monkeypatch):
    entered = []
    run = FusedCall.__call__
    monkeypatch.setattr(FusedCall, "__call__", lambda self, *args: (entered.append(1), run(self, *args))[1])
    compiled = compile_piecewise(plain)
    for expected in (2, 1, 0, 0):  # trace on fakes and warm-up, capture, replays
        entered.clear()
        with torch.no_grad():
            compiled(torch.ones(5, 4))
        assert len(entered) == expected
    assert counters.replays == 3
