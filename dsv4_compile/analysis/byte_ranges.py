"""Which bytes a tensor spans, from its first element to its last."""

from __future__ import annotations

from torch import Tensor

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
