"""An op whose results share memory that it made, and that none of them shows whole: it gives that memory too.

    q, k, v = project(x)            # chunks of one buffer, which the graph has no name for
                                    ->    *_, buffer = project(x); q, k, v are views of `buffer`

Only a value that owns its memory crosses a boundary, and its slot holds what it spans. No chunk spans the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..compat.dispatch import OpOverload, Tree, op_name
from ..compat.symbols import Size
from ..errors import LayoutMismatchError

Target: TypeAlias = Callable[..., Tree]
Groups: TypeAlias = tuple[tuple[int, ...], ...]
Layout: TypeAlias = tuple[Sequence[Size], Sequence[Size], Size]  # shape, strides, offset


class JoinedCall:
    """Calls an op; returns its results, and one more tensor for each group of them: the memory up to their end.

    Equal to another one if both call the same, so that pieces with such nodes can be duplicates.

    Args:
        target: the op, or the function.
        groups: indices of results that share memory, as its fake says.
        line: the user's, for errors.
    """

    def __init__(self, target: Target, groups: Groups, line: str = "") -> None:
        self.__name__ = self.__qualname__ = str(getattr(target, "__name__", target))
        self.target = target
        self._groups = groups
        self._line = line

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Call it.

        Raises:
            LayoutMismatchError: its fake promised results that share memory, and they do not.
        """
        results = self.target(*args, **kwargs)
        return (*results, *[self._shared([results[index] for index in group]) for group in self._groups])

    def _shared(self, tensors: Sequence[Tensor]) -> Tensor:
        size = (end_of([(t.size(), t.stride(), t.storage_offset()) for t in tensors]),)
        if not any(tensor.numel() for tensor in tensors):
            return tensors[0].new_empty(size)
        if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1:
            return tensors[0].as_strided(size, (1,), 0)
        name = op_name(self.target) if isinstance(self.target, OpOverload) else self.__name__
        raise LayoutMismatchError(
            f"{name} gave results with memory of their own, its fake promised results that share it ({self._line}): "
            "let the fake do what the op does"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JoinedCall) and (self.target, self._groups) == (other.target, other._groups)

    def __hash__(self) -> int:
        return hash((self.target, self._groups))


def end_of(layouts: Sequence[Layout]) -> Size:
    """Elements from the beginning of a storage to after the last one that a layout in it shows."""
    end: Size = 0
    for shape, strides, offset in layouts:
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        end = torch.sym_max(end, last + 1)
    return end


def op_of(target: object) -> object:
    """What a node calls, whether or not it gives shared memory too."""
    return target.target if isinstance(target, JoinedCall) else target
