"""In what two results of one program differ: all that a caller can see of tensors, and not their numbers alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.compat.dispatch import pytree


def differences(eager: Any, compiled: Any, *, exact: bool = False) -> list[str]:
    """What is not the same in two nests of tensors and other values; empty if nothing is.

    Structure, types, shapes, strides, offsets into storages, dtypes, lazy bits, numbers, and which tensors are one
    object or share memory. To see aliasing with arguments, put these into the nest.

    Args:
        eager: as it should be.
        compiled: as it is.
        exact: numbers agree bit for bit, and not only up to rounding.
    """
    wanted, wanted_form = pytree.tree_flatten(eager)
    seen, seen_form = pytree.tree_flatten(compiled)
    if wanted_form != seen_form:
        return [f"another structure: {seen_form}, eager gives {wanted_form}"]
    found = [
        f"leaf {index}: {text}"
        for index, (want, see) in enumerate(zip(wanted, seen, strict=True))
        for text in _of_leaf(want, see, exact)
    ]
    return [*found, *_of_sharing(wanted, seen)]


def _of_leaf(want: Any, see: Any, exact: bool) -> Iterator[str]:
    if not isinstance(want, Tensor) or not isinstance(see, Tensor):
        if type(want) is not type(see) or not (want == see or (want != want and see != see)):
            yield f"{see!r}, eager gives {want!r}"
        return
    layouts = _layout(want), _layout(see)
    if layouts[0] != layouts[1]:
        yield f"{layouts[1]}, eager gives {layouts[0]}"
    elif want.layout is torch.strided:
        yield from _of_numbers(want, see, exact)


def _layout(tensor: Tensor) -> str:
    """All that there is to a tensor but its numbers; strides that no element sees are left out."""
    text = f"{tensor.dtype} {list(tensor.shape)} {tensor.layout}"
    if tensor.layout is torch.strided and tensor.numel():
        steps = [step if size > 1 else None for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
        text += f" strides {steps} offset {tensor.storage_offset()}"
    text += " conjugated" if tensor.is_conj() else ""
    return text + (" negated" if tensor.is_neg() else "")


def _of_numbers(want: Tensor, see: Tensor, exact: bool) -> Iterator[str]:
    bound = 0.0 if exact or not (want.is_floating_point() or want.is_complex()) else None
    try:
        torch.testing.assert_close(see, want, rtol=bound, atol=bound, equal_nan=True, check_stride=False)
    except AssertionError as error:
        yield " ".join(str(error).split())


def _of_sharing(wanted: Sequence[Any], seen: Sequence[Any]) -> Iterator[str]:
    """Pairs of leaves that are one object, or share memory, in one of the two and not in the other."""
    for question, text in ((_is_one, "are one object"), (_share, "share memory")):
        for first, second in itertools.combinations(range(len(wanted)), 2):
            answers = question(wanted[first], wanted[second]), question(seen[first], seen[second])
            if answers[0] != answers[1]:
                yield f"leaves {first} and {second} {text} in {'eager' if answers[0] else 'compiled code'} only"


def _is_one(first: Any, second: Any) -> bool:
    return isinstance(first, Tensor) and first is second


def _share(first: Any, second: Any) -> bool:
    tensors = all(isinstance(t, Tensor) and t.layout is torch.strided and t.numel() for t in (first, second))
    return tensors and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
