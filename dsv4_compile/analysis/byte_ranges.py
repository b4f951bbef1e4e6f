"""Which bytes a tensor spans, from its first element to its last, and whether two tensors have some in common."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..compat.thread_state import NoDispatchModes
from .sizes import bytes_needed

ByteRange = tuple[int, int]


def byte_range(tensor: Tensor) -> ByteRange:
    """First address of a tensor's elements, and the one after the last; (0, 0) if it has none."""
    count = tensor.numel()
    if not count:
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + count * tensor.element_size()
    return start, start + bytes_needed(tensor.size(), tensor.stride(), tensor.element_size())


def ranges_meet(first: ByteRange, second: ByteRange) -> bool:
    """Whether two ranges have a byte in common."""
    return first[0] < second[1] and second[0] < first[1]


def share_bytes(first: Tensor, second: Tensor) -> bool:
    """Whether an element of one lies where one of the other does; spans of columns side by side meet without that."""
    ranges = byte_range(first), byte_range(second)
    if not ranges_meet(*ranges):
        return False
    start, end = min(ranges)[0], max(span[1] for span in ranges)
    unit = math.gcd(*(number for t in (first, second) for number in (t.element_size(), t.data_ptr() - start)))
    with NoDispatchModes():  # a capture may be going on, which is not of this
        places = torch.arange((end - start) // unit, device="cpu")
        marks = torch.zeros(len(places), dtype=torch.bool, device="cpu")
        marks[_places_of(first, places, start, unit)] = True
        return bool(marks[_places_of(second, places, start, unit)].any())


def _places_of(tensor: Tensor, places: Tensor, start: int, unit: int) -> Tensor:
    """Where a tensor's elements lie, in units counted from an address."""
    width = tensor.element_size() // unit
    strides = [stride * width for stride in tensor.stride()]
    offset = (tensor.data_ptr() - start) // unit
    return places.as_strided((*tensor.size(), width), (*strides, 1), offset).reshape(-1)
