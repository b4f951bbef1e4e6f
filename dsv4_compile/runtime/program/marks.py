"""Tells when a tensor object dies, without a weak reference to it.

torch refuses to swap a tensor that anybody refers to weakly: `torch.utils.swap_tensors`, and with it `model.to(...)`
under `torch.__future__.set_swap_module_params_on_conversion`. So a mark is put into the dictionary of the tensor, and
the mark is what is referred to weakly. It goes with the tensor. A swap takes it along with the memory, so that what was
captured with that memory goes when the memory does.

A pickle or a copy of the tensor has an empty dictionary in its place, which loads anywhere.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

_NAME = "_dsv4_compile_mark"


class Mark:
    """Lives as long as the tensor that has it."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        return OrderedDict, ()  # one of the few things that `torch.load(weights_only=True)` makes


def mark_of(tensor: Tensor) -> Mark:
    """The mark of a tensor, made when first asked for."""
    mark = vars(tensor).get(_NAME)
    if not isinstance(mark, Mark):  # none, or what a copy has in its place
        mark = vars(tensor)[_NAME] = Mark()
    return mark
