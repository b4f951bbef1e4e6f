"""What the numbered cases share: a model compiled and in eager, called on equal data and compared.

Every case runs for each engine and runner (`everywhere`), at least three times a bucket, on fresh random inputs. What
only a capturing engine can show stands under `if setup.captures`. `pytest --piece-compiler inductor` runs them all
with another piece compiler; `everywhere_and_compiled` marks the few that run with each one in any case.

Results are compared bit for bit, but for floats that Inductor made: it may fuse and reorder sums.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from toy_ops import SPLIT

import dsv4_compile
from dsv4_compile.errors import Dsv4Error
from dsv4_compile.inspect.plan import Plan

ENGINES = ("off", "host")
RUNNERS = ("mrv1", "mrv2")
SIZES = (8, 16, 8, 16, 8, 16, 32, 32, 32)
# relative ones, of torch.testing.assert_close but for float32
FLOAT_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}


@dataclass(frozen=True)
class Setup:
    """One engine, one runner flag, and one piece compiler; without one, what `--piece-compiler` says."""

    engine: str
    runner: str
    piece_compiler: str | None = None

    @property
    def tolerant(self) -> bool:
        """Whether floats may be rounded otherwise than in eager."""
        return self.piece_compiler == "inductor"

    @property
    def captures(self) -> bool:
        return self.engine != "off"

    def options(self, **more: Any) -> dict[str, Any]:
        """Options of the backend; those that only mean something to a capture are left out for an engine without."""
        capture_only = (
            () if self.captures else ("capture_sizes", "max_captures", "max_tokens", "static_outputs", "check")
        )
        kept = {name: value for name, value in more.items() if name not in capture_only}
        compiler = {} if self.piece_compiler is None else {"piece_compiler": self.piece_compiler}
        return {"split_ops": SPLIT, "engine": self.engine, "runner": self.runner, **compiler, **kept}

    def explain(self, function: Any, *args: Any, **options: Any) -> Plan:
        return dsv4_compile.explain(function, *args, options=self.options(**options))


_SETUPS = [Setup(engine, runner) for engine, runner in itertools.product(ENGINES, RUNNERS)]
_COMPILED = [Setup("host", "mrv2", "aot_eager"), Setup("host", "mrv2", "inductor")]


def _parametrize(setups: Iterable[Setup]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("setup", [_param(setup) for setup in setups], indirect=True)


def _param(setup: Setup) -> Any:
    named = (setup.engine, setup.runner, setup.piece_compiler)
    marks = [pytest.mark.inductor] if setup.piece_compiler == "inductor" else []
    return pytest.param(setup, id="-".join(filter(None, named)), marks=marks)


everywhere = _parametrize(_SETUPS)
everywhere_and_compiled = _parametrize(_SETUPS + _COMPILED)
captured = _parametrize(s for s in _SETUPS if s.captures)
captured_mrv2 = _parametrize(s for s in _SETUPS if s.captures and s.runner == "mrv2")
under_mrv1 = _parametrize(s for s in _SETUPS if s.runner == "mrv1")
under_mrv2 = _parametrize(s for s in _SETUPS if s.runner == "mrv2")


def rows(n: int, width: int = 4) -> Tensor:
    return torch.randn(n, width)


class Feeder:
    """Step state as a runner makes it: new tensors every step, or leading rows of buffers that it refills in place."""

    def __init__(self, *, persistent: bool, capacity: int = 64) -> None:
        self._persistent, self._capacity = persistent, capacity
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, values: Tensor) -> Tensor:
        if not self._persistent:
            return values.clone()
        if name not in self._buffers:
            self._buffers[name] = values.new_zeros(self._capacity, *values.shape[1:])
        self._buffers[name][: len(values)] = values
        # no view: Dynamo would look at the size of its base too
        leading = values.new_empty(0).set_(self._buffers[name].untyped_storage(), 0, values.shape, values.stride())
        torch._dynamo.mark_static_address(leading)
        return leading


class Pair:
    """A function or module compiled, and the same in eager on copies of the same data.

    Results and arguments stay alive as long as the pair, with junk of odd sizes between them, so that no allocator
    hands out an address twice and a replay of an old one shows.
    """

    def __init__(self, original: Any, setup: Setup, *, dynamic: bool = True, **options: Any) -> None:
        self.original = original
        self._tolerant = setup.tolerant
        self.compiled = torch.compile(
            original, backend="dsv4_piecewise", dynamic=dynamic, options=setup.options(**options)
        )
        self._held: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        """Call both under no_grad; raise if results, arguments, module state, aliasing or random draws differ."""
        eager, twin_args = copy.deepcopy((self.original, args))  # one memo: what shared memory still does
        with torch.no_grad():
            before = torch.get_rng_state()
            expected = eager(*twin_args)
            drawn = torch.get_rng_state()
            torch.set_rng_state(before)
            actual = self.compiled(*args)
        assert torch.equal(torch.get_rng_state(), drawn), "another amount of random numbers was drawn than in eager"
        seen, wanted = (actual, args, _state(self.original)), (expected, twin_args, _state(eager))
        assert_same(seen, wanted, tolerant=self._tolerant)
        self._held += [actual, args, torch.empty(17 * len(self._held) + 3)]
        return actual


def assert_same(actual: Any, expected: Any, *, tolerant: bool = False) -> None:
    """Same structure, same values (NaN equals NaN), and the same leaves share memory among themselves.

    Args:
        actual: any nest of tensors and other values.
        expected: likewise.
        tolerant: whether floats may be rounded otherwise; nothing else ever may differ.
    """
    seen, wanted = pytree.tree_flatten(actual), pytree.tree_flatten(expected)
    assert seen[1] == wanted[1]
    for one, other in zip(seen[0], wanted[0], strict=True):
        assert type(one) is type(other), (one, other)
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, **bounds(other, tolerant=tolerant), equal_nan=True)
        else:
            assert one == other
    assert _sharing(seen[0]) == _sharing(wanted[0]), "other tensors share memory than in eager"


def bounds(expected: Tensor, *, tolerant: bool) -> dict[str, float]:
    """Tolerances for values like these: sums that cancel are as far off as their largest terms make them."""
    if not tolerant or expected.dtype not in FLOAT_TOLERANCES:
        return {"rtol": 0.0, "atol": 0.0}
    finite = expected[expected.isfinite()].double().abs()
    relative = FLOAT_TOLERANCES[expected.dtype]
    return {"rtol": relative, "atol": relative * max([1.0, *finite.flatten().tolist()])}


def _sharing(leaves: Sequence[Any]) -> list[int]:
    """For each tensor the number of the first one with the same storage; empty tensors have no memory to share."""
    storages = [leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
    return [storages.index(storage) for storage in storages]


def _state(original: Any) -> dict[str, Tensor]:
    if not isinstance(original, torch.nn.Module):
        return {}
    return {**dict(original.named_parameters()), **dict(original.named_buffers())}


@contextmanager
def each_captured_once(setup: Setup, buckets: Sequence[Hashable]) -> Iterator[None]:
    """The block makes one call for each of these, equal ones in one bucket: a warm-up and a capture a bucket."""
    before = dsv4_compile.counters.snapshot()
    yield
    after = dsv4_compile.counters.snapshot()
    change = {name: after[name] - before[name] for name in after}
    if setup.captures:
        warmed = len(set(buckets))
        repeated = sum(buckets.count(bucket) > 1 for bucket in set(buckets))
        assert (change["uncaptured_calls"], change["captures"], change["recaptures"]) == (warmed, repeated, 0), change
    else:
        assert (change["uncaptured_calls"], change["captures"], change["replays"]) == (len(buckets), 0, 0), change


def check(
    setup: Setup,
    original: Any,
    make_args: Callable[[int], tuple[Any, ...]],
    *,
    sizes: Sequence[int] = SIZES,
    steady: bool = True,
    **options: Any,
) -> Pair:
    """Call a pair with `make_args(n)` for each size in turn.

    Args:
        steady: every size is one bucket, captured once (False where addresses move, or nothing can be captured).
    """
    pair = Pair(original, setup, **options)
    if not steady:
        for n in sizes:
            pair(*make_args(n))
        return pair
    with each_captured_once(setup, sizes):
        for n in sizes:
            pair(*make_args(n))
    return pair


def equal_or_refused(pair: Pair, name: str, *args: Any) -> None:
    """The call equals eager, or an error of ours says which op or input is to blame; never other numbers."""
    error = None
    try:
        pair(*args)
    except Dsv4Error as caught:
        error = str(caught)
    assert error is None or re.search(rf"\b{name}\b", error), error


def kinds(plan: Plan) -> str:
    """The units of a plan in order: "prp" is a piece, a region, a piece."""
    return "".join(unit.kind[0] for unit in plan.units)


def crossing(plan: Plan) -> set[str]:
    """Layouts of everything that units give one another: "[s77, 4] float32", or "number"."""
    return {value.layout for unit in plan.units for value in unit.outputs}


def reasons(plan: Plan) -> dict[str, str]:
    """Why each eager op is eager, by the op's name without the weight it applies."""
    return {op.name: str(op.reason) for unit in plan.regions for op in unit.ops}
