"""One operator in a program, called three times compiled and in eager.

    x_1, x_2 = x * 1, y * 1        a piece makes what the operator takes
    x_1      = crossed(x_1)        a split op: values cross from piece to region and on
    r        = operator(x_1, x_2)
    c        = crossed(r)
    return r, c, r * 1             and a piece takes what it gives

The three calls (warm-up, capture, replay) bring other numbers of the same shapes. Operators that also work in place do
so in a second program, on an input of the graph, which the caller sees changed.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.library import Library

from dsv4_compile.compat.dispatch import pytree, with_lazy_bits_of

from .alike import differences

CALLS = 3
_LIBRARY = Library("opinfo_sweep", "DEF")
_LIBRARY.define("crossed(Tensor x) -> Tensor")
_LIBRARY.impl("crossed", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("opinfo_sweep::crossed", lambda x: torch.clone(x), lib=_LIBRARY)
_crossed = torch.ops.opinfo_sweep.crossed


@dataclass(frozen=True, slots=True)
class Finding:
    """What a program did otherwise than eager.

    Attributes:
        program: operator, dtype, sample and form.
        call: index of the call.
        text: what differs, or the error.
        by_torch: `torch.compile(backend="eager")`, which has no part of this package, does the same.
    """

    program: str
    call: int
    text: str
    by_torch: bool

    def __str__(self) -> str:
        owner = " [torch.compile itself]" if self.by_torch else ""
        return f"{self.program}, call {self.call}{owner}: {self.text}"


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments of an operator: any nest, apart from its tensors, which are those of a call.

    Attributes:
        tensors: the tensors of a call.
        form: the nest around them.
        leaves: its leaves, with None in the places of tensors.
        places: for each leaf, whether it is a tensor. Not a mark among the leaves: Dynamo of torch 2.11 cannot compare
            an object of no class of its own.
    """

    tensors: tuple[Tensor, ...]
    form: Any
    leaves: tuple[Any, ...]
    places: tuple[bool, ...]

    @classmethod
    def of(cls, sample: Any) -> Sample:
        """From a `SampleInput`."""
        leaves, form = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
        tensors = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))
        places = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(tensors, form, others, places)

    def call(self, function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Call an operator with these tensors."""
        given = iter(tensors)
        leaves = [next(given) if place else leaf for leaf, place in zip(self.leaves, self.places, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self.form)
        return function(*args, **kwargs)

    def has_form_of(self, other: Sample) -> bool:
        """Whether one compiled program may serve both."""
        layouts = ([(t.shape, t.dtype, t.stride()) for t in sample.tensors] for sample in (self, other))
        if next(layouts) != next(layouts) or (self.form, self.places) != (other.form, other.places):
            return False
        return repr(self.leaves) == repr(other.leaves)


def samples_of(op: Any, dtype: torch.dtype, count: int) -> list[list[Sample]]:
    """The first samples of an operator, each once for every call, with other numbers in each."""
    calls = []
    for seed in range(CALLS):
        _seed(seed)
        wanted: list[Sample] = []
        for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
            if len(wanted) == count:
                break
            leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
            if all(leaf.layout is torch.strided for leaf in leaves if isinstance(leaf, Tensor)):
                wanted.append(Sample.of(sample))
        calls.append(wanted)
    return [list(sample) for sample in zip(*calls, strict=False)]


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def findings(op: Any, dtype: torch.dtype, count: int) -> Iterator[Finding]:
    """Run every program of an operator with `count` samples."""
    for index, samples in enumerate(samples_of(op, dtype, count)):
        name = f"{name_of(op)} {dtype} sample {index}"
        yield from _compared(_program(op.op, samples[0]), samples, name)
        if op.inplace_variant is not None:
            yield from _compared(_program_in_place(op.inplace_variant, samples[0]), samples, f"{name} in place")


def name_of(op: Any) -> str:
    """Its name, with that of the variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def _touched(tensor: Tensor) -> Tensor:
    return tensor ^ False if tensor.dtype is torch.bool else tensor * 1


def _program(function: Callable[..., Any], sample: Sample) -> Callable[..., Any]:
    def program(*tensors: Tensor) -> Any:
        made = [_touched(tensor) for tensor in tensors]
        made[:1] = [_crossed(tensor) for tensor in made[:1]]
        result = sample.call(function, made)
        given = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return result, [_crossed(leaf) for leaf in given[:1]], [_touched(leaf) for leaf in given]

    return program


def _program_in_place(function: Callable[..., Any], sample: Sample) -> Callable[..., Any]:
    def program(*tensors: Tensor) -> Any:
        before = [_crossed(_touched(tensor)) for tensor in tensors]
        result = sample.call(function, tensors)
        return result, before, [_crossed(_touched(tensor)) for tensor in tensors]

    return program


def _compared(program: Callable[..., Any], samples: Sequence[Sample], name: str) -> Iterator[Finding]:
    """Call eager and compiled; nothing to find where eager raises, or gives something else each time."""
    compiled = _compile(program, "dsv4_piecewise", options={"runner": "mrv2", "split_ops": ("opinfo_sweep::crossed",)})
    theirs = None
    for call, sample in enumerate(samples):
        if not sample.has_form_of(samples[0]):
            return
        eager, again = _outcome(program, sample, call), _outcome(program, sample, call)
        if isinstance(eager, Exception) or differences(eager, again, exact=True):
            return
        text = _difference(eager, _outcome(compiled, sample, call))
        if text is not None:
            theirs = theirs or _compile(program, "eager")
            by_torch = _difference(eager, _outcome(theirs, sample, call)) is not None
            yield Finding(name, call, text, by_torch)
            return


def _compile(program: Callable[..., Any], backend: str, **settings: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(program, backend=backend, dynamic=True, **settings)


def _outcome(function: Callable[..., Any], sample: Sample, call: int) -> Any:
    """Result and arguments after a call on copies, or what it raised."""
    copies = [_copy(tensor) for tensor in sample.tensors]
    _seed(call)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*copies), copies
    except Exception as error:
        return error


def _copy(tensor: Tensor) -> Tensor:
    """A tensor like it, lazy bits and the memory around it included."""
    storage = tensor.untyped_storage().clone()
    empty = torch.empty(0, dtype=tensor.dtype)
    copy = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return with_lazy_bits_of(tensor, copy)


def _difference(eager: Any, other: Any) -> str | None:
    if isinstance(other, Exception):
        return f"{type(other).__name__}: {' '.join(str(other).split())}"
    found = differences(eager, other)
    return found[0] if found else None
