"""What piece compilers are known to get wrong, or could: each program computes what it does in eager, on every path."""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from case_helpers import assert_same, rows
from torch import Tensor, nn
from toy_ops import SPLIT

from dsv4_compile.errors import PieceCompileError

toy = torch.ops.toy
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
COMPILERS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.inductor))
every_compiler = pytest.mark.parametrize("compiler", COMPILERS)


def compiled_with(compiler: Any, function: Any, **options: Any) -> Any:
    options = {"split_ops": SPLIT, "piece_compiler": compiler, **options}
    return torch.compile(function, backend="dsv4_piecewise", dynamic=True, options=options)


def compare(function: Any, compiled: Any, *args: Any, strides: bool = True) -> None:
    """Call both on equal arguments; results, arguments, strides and random states must be those of eager."""
    given = copy.deepcopy(args)
    before = torch.get_rng_state()
    expected = function(*args)
    drawn = torch.get_rng_state()
    torch.set_rng_state(before)
    actual = compiled(*given)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert_same((actual, given), (expected, args), tolerant=True)
    if strides:
        assert layouts(actual) == layouts(expected)


def layouts(results: Any) -> list[list[int]]:
    """Strides of what has several elements; that of a dimension of size one means nothing."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, Tensor) and leaf.numel()]
    return [[step for size, step in zip(leaf.shape, leaf.stride(), strict=True) if size > 1] for leaf in leaves]


DRAWS = {
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "multinomial": lambda x: torch.multinomial(x.abs(), 2),
    "normal": lambda x: torch.normal(x, x.abs()),
    "overwritten": lambda x: torch.empty_like(x).bernoulli_(0.5).zero_(),
    "poisson": lambda x: torch.poisson(x.abs()),
    "rand_like": torch.rand_like,
}


@pytest.mark.sampled(3)
@every_compiler
@pytest.mark.parametrize("engine", ["off", "host"])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_that_nothing_takes_is_drawn(compiler: str, engine: str, draw: str) -> None:
    """Compilers leave it out, and then all numbers after it are others."""

    def model(x: Tensor) -> Tensor:
        DRAWS[draw](x)
        return toy.fresh(x + torch.rand_like(x))

    compiled = compiled_with(compiler, model, engine=engine)
    for _ in range(3):
        compare(model, compiled, rows(5))


@every_compiler
def test_a_piece_that_nothing_takes_is_no_empty_capture(compiler: str) -> None:
    def model(x: Tensor) -> Tensor:
        (x * 2).add_(1)
        return toy.fresh(x)

    compiled = compiled_with(compiler, model)
    for _ in range(3):
        compare(model, compiled, rows(5))


def kept_clone(x: Tensor) -> Tensor:
    t = x.clone()
    x.add_(1)
    return toy.fresh(t)


def swapped(x: Tensor, y: Tensor) -> Tensor:
    t = x.clone()
    x.copy_(y)
    y.copy_(t)
    return x + 1


def kept_conversion(x: Tensor) -> tuple[Tensor, Tensor]:
    t, u = x.double().float(), x[1:].t().clone()
    x.zero_()
    return toy.fresh(t), u


def kept_of_an_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    h = toy.fresh(x * 2)
    t = h.clone()
    h.add_(1)
    return t, h


def moved_rows(x: Tensor) -> tuple[Tensor, ...]:
    h, where = x * 1, torch.tensor([1, 0, 2])
    elements = h.put(torch.tensor([3, 0, 2, 1]), h[0].clone(), accumulate=True)
    return h.index_add(0, where, h[:3]), h.index_copy(0, where, h[:3].clone()), elements


def put_rows(x: Tensor) -> Tensor:
    h = x * 1
    h[torch.tensor([1, 0, 2])] = h[:3].clone()
    return toy.fresh(h)


OVERWRITERS = [kept_clone, swapped, kept_conversion, kept_of_an_activation, moved_rows, put_rows]


@pytest.mark.sampled(3)
@every_compiler
@pytest.mark.parametrize("model", OVERWRITERS)
def test_a_value_is_what_it_was_before_its_source_was_overwritten(compiler: str, model: Any) -> None:
    compiled = compiled_with(compiler, model)
    arguments = model.__code__.co_argcount
    for _ in range(3):
        compare(model, compiled, *[rows(5) for _ in range(arguments)])


@pytest.mark.inductor
@pytest.mark.parametrize(
    "model",
    [
        kept_clone,
        pytest.param(put_rows, marks=pytest.mark.skipif(TORCH >= (2, 14), reason="Inductor of 2.14 is right about it")),
    ],
)
def test_without_the_cut_inductor_takes_the_overwritten_value(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should this one fail, Inductor has been repaired and the cut may be given up."""
    cutting = importlib.import_module("dsv4_compile.passes.cut_subgraphs")  # the package has a function of that name
    monkeypatch.setattr(cutting, "_conflicts", lambda traced, nodes: [()] * len(nodes))
    x = rows(5)
    expected = model(x.clone())
    with torch.no_grad():
        assert not torch.allclose(compiled_with("inductor", model, engine="off")(x), expected)


LIBRARY = torch.library.Library("mutation", "FRAGMENT")


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mutation::{name}", fake, lib=LIBRARY)


def bump(x: Tensor) -> None:
    x.add_(1)


class Fuse:
    """Whether `risky` fails."""

    is_blown = False


def risky(x: Tensor) -> Tensor:
    if Fuse.is_blown:
        raise ValueError("blown")
    return x * 2


define("bump(Tensor(a!) x) -> ()", bump, lambda x: None)
define("double(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
define("rest(Tensor(a) x) -> Tensor(a)", lambda x: x[1:], lambda x: x[1:])
define("maybe(Tensor x, Tensor? y) -> Tensor", lambda x, y: x * 2 if y is None else x + y, lambda x, y: x.clone())
define("risky(Tensor x) -> Tensor", risky, torch.empty_like)
own = torch.ops.mutation


def view_across_parts(x):
    h = x * 2
    v = h[:, 1:3]
    own.bump(v)
    v.mul_(3)
    own.bump(h)
    return toy.fresh(h), v.clone()


def halves_of_one_allocation(x):
    out = torch.empty(x.shape[0], 8)
    left, right = out[:, :4], out[:, 4:]
    left.copy_(x)
    own.bump(left)
    right.copy_(left * 2)
    own.bump(right)
    return toy.fresh(out), left + right


def view_of_a_custom_op(x):
    h = x * 2
    rest = own.rest(h)
    rest.add_(1)
    return toy.fresh(h), rest * 2


def read_by_later_parts(x):
    h = x * 2
    doubled = own.double(h)
    return toy.fresh(own.double(h + doubled)), h, doubled, x


def optional_and_nested(x):
    a = own.maybe(x * 2, None)
    return {"a": (toy.fresh(own.maybe(a, x)), [a + 1, (x.shape[0], None)])}


def conjugates(x):
    h = torch.complex(x, x + 1) * 2
    v = h.conj()
    v.add_(1j)
    own.bump(h)
    return toy.fresh(h), v.resolve_conj(), torch.view_as_real(h) * 2


def integers_and_masks(x):
    i = (x * 5).int()
    i[i > 0] = 7
    own.bump(i)
    return toy.fresh(i) << 1, (i > 0) ^ (x > 0), (i % 3).to(torch.uint8), own.double(i).sum()


def expanded(x):
    e = x.sum(1, keepdim=True).expand(-1, 6)
    return own.double(e), toy.fresh(e + 1), e


def of_no_width(x):
    z = own.double(x[:, :0] * 2)
    return toy.fresh(torch.cat([z, x], 1)), z


def odd_layouts(x):
    gaps = torch.empty_strided((x.shape[0], 4), (8, 1))
    gaps.copy_(x)
    channels = (x.reshape(1, 1, -1, 2) * 2).to(memory_format=torch.channels_last)
    return toy.fresh(gaps) + 1, toy.fresh(channels), (x @ x.t()).t(), gaps + 1


def mixed_precision(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = x @ x.t()
        b = own.double(a) @ x.bfloat16()
    return toy.fresh(b), x.double() + 1, x.half() * 2


PROGRAMS = [
    view_across_parts,
    halves_of_one_allocation,
    view_of_a_custom_op,
    read_by_later_parts,
    optional_and_nested,
    conjugates,
    integers_and_masks,
    expanded,
    of_no_width,
    odd_layouts,
    mixed_precision,
]


@pytest.mark.sampled(5)
@every_compiler
@pytest.mark.parametrize("model", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_programs_between_custom_ops(compiler: str, model: Any) -> None:
    compiled = compiled_with(compiler, model, check="full", pool="bucket")
    # as eager does, Inductor then rounds each result to bfloat16, and not only what leaves a kernel
    with torch._inductor.config.patch(emulate_precision_casts=True):
        for n in (5, 5, 5, 3, 3, 3):
            compare(model, compiled, rows(n))


@pytest.mark.sampled(2)
@every_compiler
@pytest.mark.parametrize("model", [read_by_later_parts, view_across_parts])
def test_one_token_and_none(compiler: str, model: Any) -> None:
    compiled = compiled_with(compiler, model)
    for n in (0, 0, 0, 1, 1, 1, 5, 5, 5, 0, 1):
        compare(model, compiled, rows(n))


@every_compiler
def test_static_outputs_of_the_call_at_hand(compiler: str) -> None:
    compiled = compiled_with(compiler, halves_of_one_allocation, static_outputs=True)
    for n in (5, 5, 5, 3, 3, 3, 5):
        compare(halves_of_one_allocation, compiled, rows(n))


class Cached(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.randn(16, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) + self.cache[: x.shape[0], :4]
        own.bump(self.cache)
        k = h * 2 + self.cache[: x.shape[0], :1]
        self.cache[:2].mul_(0.5)
        return toy.fresh(k) + h


@pytest.mark.sampled(5)
@every_compiler
@pytest.mark.parametrize("widths", [(4, 4), (4, 6)], ids=str)
def test_instances_of_one_class_keep_their_buffers(compiler: str, widths: tuple[int, int]) -> None:
    models = [Cached(width) for width in widths]
    pairs = [(model, copy.deepcopy(model), compiled_with(compiler, model)) for model in models]
    with torch.no_grad():
        for n in (5, 5, 5, 3, 3, 3, 5, 3):
            for model, eager, compiled in pairs:
                x = rows(n)
                assert_same((compiled(x), model.cache), (eager(x), eager.cache), tolerant=True)


@every_compiler
def test_compiled_again_after_a_reset(compiler: str) -> None:
    model = Cached(4)
    for _ in range(2):
        compiled, eager = compiled_with(compiler, model), copy.deepcopy(model)
        with torch.no_grad():
            for n in (5, 5, 5, 3):
                x = rows(n)
                assert_same((compiled(x), model.cache), (eager(x), eager.cache), tolerant=True)
        torch._dynamo.reset()


@every_compiler
def test_a_compiler_that_failed_is_asked_again_and_leaves_no_trace(compiler: str) -> None:
    def broken(gm: Any, fakes: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    for _ in range(2):
        with torch.no_grad(), pytest.raises(PieceCompileError, match=r"broken failed to compile piece_0\.0"):
            compiled_with(broken, read_by_later_parts)(rows(5))
    compiled = compiled_with(compiler, read_by_later_parts)
    for _ in range(3):
        compare(read_by_later_parts, compiled, rows(5))


@every_compiler
@pytest.mark.parametrize("call", [0, 1, 2])
def test_an_op_between_compiled_parts_that_fails(compiler: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the warm-up and in the capture its error passes, and the next call is right; a replay runs no host code."""

    def model(x: Tensor) -> Tensor:
        h = x.sin()
        return toy.fresh(own.risky(h) + h) * 2

    compiled, is_replay = compiled_with(compiler, model), call == 2
    with torch.no_grad():
        for number in range(5):
            x = rows(5)
            monkeypatch.setattr(Fuse, "is_blown", number == call)
            if number == call and not is_replay:
                with pytest.raises(ValueError, match="blown"):
                    compiled(x)
                continue
            actual = compiled(x)
            monkeypatch.setattr(Fuse, "is_blown", False)
            assert_same(actual, model(x), tolerant=True)


@pytest.mark.sampled(2)
@pytest.mark.skipif(TORCH < (2, 13), reason="Dynamo of torch 2.11 crashes where several threads trace at once")
@every_compiler
def test_threads_that_compile_capture_and_replay_at_once(compiler: str) -> None:
    models = [read_by_later_parts, view_across_parts, halves_of_one_allocation]
    compiled = [compiled_with(compiler, model) for model in models]
    results: list[tuple[Any, Any]] = []

    def serve(own_number: int) -> None:
        with torch.no_grad():
            for call in range(30):
                x, which = rows(3 + (own_number + call) % 4), (own_number + call) % 3
                results.append((compiled[which](x), models[which](x)))

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=250)
    assert len(results) == 90
    for actual, expected in results:
        assert_same(actual, expected, tolerant=True)
