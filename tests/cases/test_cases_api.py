"""Cases about the contract with the user: op names, options, grad modes, recompiles, saving and copying a model."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from case_helpers import Pair, Setup, check, everywhere, everywhere_and_compiled, kinds, reasons, rows
from torch import Tensor

import dsv4_compile
from dsv4_compile.config import Config
from dsv4_compile.errors import OptionError, TrainingError, UnknownOpError

toy = torch.ops.toy


@torch.library.custom_op("toy_custom::double", mutates_args=())
def double(q: Tensor) -> Tensor:
    return 2 * q


double.register_fake(torch.empty_like)


def x_only(n: int) -> tuple[Tensor]:
    return (rows(n),)


FORMS = {
    "packet": (lambda q: toy.over(q), "toy::over", "default"),
    "overload": (lambda q: toy.over.default(q), "toy::over", "default"),
    "kwargs": (lambda q: toy.over(q=q), "toy::over", "default"),
    "other overload": (lambda q: toy.over.scaled(q, 2.0), "toy::over", "scaled"),
    "other overload by packet": (lambda q: toy.over(q, scale=2.0), "toy::over", "scaled"),
    "custom_op object": (lambda q: double(q), "toy_custom::double", "default"),
}


@pytest.mark.sampled(5)
@everywhere
@pytest.mark.parametrize("by_overload", [False, True], ids=["ns::op", "ns::op.overload"])
@pytest.mark.parametrize("form", FORMS)
def test_b29_every_spelling_splits(setup: Setup, form: str, by_overload: bool) -> None:
    call, op, overload = FORMS[form]

    def f(x):
        return call(x.sin()).cos()

    name = f"{op}.{overload}" if by_overload else op
    check(setup, f, x_only, split_ops=(name,))
    plan = setup.explain(f, rows(8), split_ops=(name,))
    assert kinds(plan) == "prp"
    assert list(reasons(plan).values()) == ["split op"]


@everywhere
def test_b29_one_overload_splits_and_not_the_other(setup: Setup) -> None:
    def f(x):
        return toy.over(x).cos() + toy.over.scaled(x, 3.0)

    check(setup, f, x_only, split_ops=("toy::over.scaled",))
    plan = setup.explain(f, rows(8), split_ops=("toy::over.scaled",))
    assert list(reasons(plan)) == ["toy::over.scaled"]


@everywhere
@pytest.mark.parametrize("version", ["auto_functionalized", "auto_functionalized_v2"])
def test_b29_functionalised_call_splits(setup: Setup, version: str) -> None:
    def first(x):
        out = torch.zeros_like(x)
        return torch.ops.higher_order.auto_functionalized(toy.attn.default, q=x.sin(), out=out)[1].cos()

    def second(x):
        out = torch.zeros_like(x)
        bases = {"_out_base_index": 0, "_all_bases": [out]}
        return torch.ops.higher_order.auto_functionalized_v2(toy.attn.default, q=x.sin(), **bases)[1].cos()

    f = first if version == "auto_functionalized" else second
    check(setup, f, x_only)
    plan = setup.explain(f, rows(8))
    assert list(reasons(plan).values()) == ["runs the split op toy::attn.default inside"]


def test_b29_unknown_name_is_an_error() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dsv4_piecewise", options={"split_ops": ["toy::fersh"]})
    with pytest.raises(UnknownOpError, match=r"torch knows no op 'toy::fersh': did you mean .*'toy::fresh'"):
        compiled(rows(8))


@everywhere
def test_b29_uncalled_name_is_reported(setup: Setup) -> None:
    plan = setup.explain(lambda x: toy.fresh(x), rows(8), split_ops=("toy::fresh", "toy::tup"))
    assert plan.notes == ("split_ops names toy::tup, which this graph never calls",)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.randn(4))
        self.sign, self.note = 1, "first"

    def forward(self, x: Tensor) -> Tensor:
        return self.second(toy.fresh(self.first(x)) * self.scale) * self.sign


@everywhere
def test_b50_no_graph_and_no_capture_once_every_mode_was_seen(setup: Setup) -> None:
    model = Model().requires_grad_(False)
    pair = Pair(model, setup)
    modes = (torch.no_grad, torch.inference_mode, torch.enable_grad)

    def rounds() -> None:
        for mode in modes:
            with mode():
                for n in (8, 16) * 3:
                    x = rows(n)
                    assert torch.equal(pair.compiled(x), model(x))

    rounds()
    assert dsv4_compile.counters.graphs_compiled <= len(modes)
    with dsv4_compile.counters.expect(
        graphs_compiled=0, captures=0, recaptures=0, uncaptured_calls=0 if setup.captures else 18
    ):
        rounds()


@everywhere_and_compiled
def test_b50_attribute_that_forward_does_not_read(setup: Setup) -> None:
    model = Model()
    pair = Pair(model, setup)
    for n in (8, 16) * 3:
        pair(rows(n))
    with dsv4_compile.counters.expect(graphs_compiled=0, captures=0, recaptures=0):
        for note in ("second", "third", "fourth"):
            model.note = note
            for n in (8, 16):
                pair(rows(n))


@everywhere
def test_b50_attribute_that_forward_reads_gets_a_graph_of_its_own(setup: Setup) -> None:
    model = Model()
    pair = Pair(model, setup)
    for _ in range(4):
        for sign in (1, -1, 0):
            model.sign = sign
            for n in (8, 16):
                pair(rows(n))


@everywhere
def test_b50_past_the_recompile_limit(setup: Setup) -> None:
    def f(x, how):
        return toy.fresh(x.sin()) * len(how)

    pair = Pair(f, setup)
    with torch._dynamo.config.patch(recompile_limit=2), dsv4_compile.counters.expect(graphs_compiled=2):
        for _ in range(3):
            for how in ("a", "bb", "ccc", "dddd"):
                pair(rows(8), how)


@everywhere
def test_b52_trainable_parameters(setup: Setup) -> None:
    pair = Pair(Model(), setup)
    for model in (pair.compiled, pair.compiled.eval()):
        with pytest.raises(
            TrainingError, match=r"first\.weight requires grad: call the compiled model under torch\.no"
        ):
            model(rows(8)).sum().backward()
    for n in (8, 16) * 3:
        pair(rows(n))


@everywhere
def test_b52_frozen_parameters_and_an_input_that_requires_grad(setup: Setup) -> None:
    pair = Pair(Model().requires_grad_(False), setup)
    for _ in range(3):
        with pytest.raises(TrainingError, match="x requires grad"):
            pair.compiled(rows(8).requires_grad_())
    for n in (8, 16) * 3:
        x = rows(n)
        assert torch.equal(pair.compiled(x), pair.original(x))  # grad mode on, nothing requires grad


@everywhere
def test_b52_grad_enabled_inside_is_not_silently_dropped(setup: Setup) -> None:
    def f(x, w):
        with torch.enable_grad():
            h = x @ w
        return toy.fresh(h.detach()), h

    compiled, w = Pair(f, setup).compiled, rows(4).requires_grad_()
    for n in (8, 16) * 3:
        x = rows(n)
        with torch.no_grad():
            try:
                result = compiled(x, w)
            except TrainingError:
                continue
            assert result[1].requires_grad == f(x, w)[1].requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"splitops": ["toy::fresh"]}, "unknown option 'splitops': did you mean 'split_ops'? Valid: runner, region, "),
        ({"zzz": 1}, "unknown option 'zzz'. Valid: runner, region, split_ops, engine, capture_sizes, max_captures"),
        ({"runner": "mrv3"}, "option runner='mrv3' is not valid: did you mean 'mrv[12]'.*Valid: auto, mrv1, mrv2"),
        ({"region": None}, "option region=None is not valid. Valid: runner, narrow, wide, minimal"),
        ({"split_ops": "toy::fresh"}, r"option split_ops='toy::fresh' must be a list of op names"),
        ({"max_captures": "many"}, "option max_captures='many' must be an integer of at least 1"),
        ({"static_outputs": 1}, "option static_outputs=1 must be True or False"),
    ],
)
def test_b56_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    compiled = torch.compile(lambda x: toy.fresh(x), backend="dsv4_piecewise", options=options)
    with pytest.raises(OptionError, match=message.replace("? Valid", r"\? Valid")):
        compiled(rows(8))


class InBytes:
    """A path that is no text."""

    def __fspath__(self) -> bytes:
        return b"dump"


@pytest.mark.parametrize("folder", [InBytes(), b"dump", "", 3])
def test_b56_wrong_folders_are_refused(folder: object) -> None:
    message = f"option dump_dir={folder!r} must be a folder path"
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        Config.from_options({"dump_dir": folder})


@pytest.mark.parametrize("folder", ["dump", Path("dump")])
def test_b56_a_folder_may_be_a_path(folder: object) -> None:
    assert Config.from_options({"dump_dir": folder}).dump_dir == str(Path.cwd() / "dump")


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "bogus"])
def test_b56_modes_are_refused(mode: str) -> None:
    compiled = torch.compile(lambda x: toy.fresh(x), backend="dsv4_piecewise", mode=mode)
    with pytest.raises(OptionError, match=f"mode='{mode}' means nothing to dsv4_piecewise.*options="):
        compiled(rows(8))


@pytest.mark.parametrize("given", [{}, {"options": {}}, {"options": None}, {"mode": "default"}], ids=str)
def test_b56_nothing_asked_for(given: dict[str, object]) -> None:
    compiled = torch.compile(lambda x: toy.fresh(x) + 1, backend="dsv4_piecewise", dynamic=True, **given)
    for n in (8, 16, 8, 16, 8, 16):
        x = rows(n)
        with torch.no_grad():
            assert torch.equal(compiled(x), 2 * x + 1)


@everywhere
def test_b56_options_are_not_changed_and_not_shared(setup: Setup) -> None:
    options = setup.options(split_ops=["toy::fresh", "toy::fresh"])
    before = copy.deepcopy(options)
    for model in (Model(), Model()):
        compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True, options=options)
        for n in (8, 16) * 3:
            x = rows(n)
            with torch.no_grad():
                assert torch.equal(compiled(x), model(x))
    assert options == before


@everywhere
def test_b56_two_option_sets_on_one_function(setup: Setup) -> None:
    def f(x):
        return toy.over(toy.fresh(x.sin()).cos()) + 1

    one, two = Pair(f, setup, split_ops=("toy::fresh",)), Pair(f, setup, split_ops=("toy::fresh", "toy::over"))
    with dsv4_compile.counters.expect(graphs_compiled=2, regions=1 + 2):
        for n in (8, 16) * 3:
            x = rows(n)
            one(x)
            two(x)


@pytest.mark.exhaustive
def test_b56_found_by_name_in_a_fresh_process() -> None:
    code = (
        "import torch; assert 'dsv4_piecewise' in torch._dynamo.list_backends();"
        "f = torch.compile(lambda x: x + 1, backend='dsv4_piecewise', options={'engine': 'off'});"
        "print(f(torch.ones(2)).tolist())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[2.0, 2.0]", result.stderr
