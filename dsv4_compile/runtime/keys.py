"""What a capture is valid for: the bucket of a call and the addresses of what its pieces read in place.

The key of a program is (sizes and numbers, host scalars, addresses): the address check and the lookup are one pass.
Object identity would not do, since `p.data = ...` keeps the object. Addresses also tell apart the instances of one
class, which share a compiled graph.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from ..compat import GUARDS_STRIDES
from ..draft import Draft, InputRole, TensorMeta

Key = tuple[tuple[Any, ...], tuple[Any, ...]]


class KeyReader:
    """Reads keys off the arguments of a call.

    Args:
        draft: the graph.
        roles: of its inputs.
        check_addresses: False trusts the caller to keep every static input where it was; instances of a model are
            then told apart by which parameters and buffers they have. Of a bound input nobody promised that, so its
            address is always part of the key.
    """

    def __init__(self, draft: Draft, roles: Mapping[fx.Node, InputRole], *, check_addresses: bool) -> None:
        positions = {graph_input.node: position for position, graph_input in enumerate(draft.inputs)}
        self._numbers = [positions[node] for node, role in roles.items() if role is InputRole.NUMBER]
        scalars = (node for node, effects in draft.effects.items() if effects.bucket_scalar)
        self._scalars = [positions[node.all_input_nodes[0]] for node in scalars]
        addressed = (InputRole.STATIC, InputRole.BOUND) if check_addresses else (InputRole.BOUND,)
        self._addressed = [positions[node] for node, role in roles.items() if role in addressed]
        self._owned = [positions[i.node] for i in draft.inputs if i.owned]
        self._identified = [] if check_addresses else self._owned
        self._unguarded = [] if GUARDS_STRIDES else self._owned

    def read(self, args: Sequence[Any]) -> Key:
        """The key of a call: its bucket, and its addresses."""
        bucket = tuple([args[position] for position in self._numbers])
        if self._scalars:
            bucket += tuple([_hashable(args[position].item()) for position in self._scalars])
        if self._unguarded:
            bucket += (tuple([args[position].stride() for position in self._unguarded]),)
        places = tuple([args[position].data_ptr() for position in self._addressed])
        if self._identified:
            places += tuple([id(args[position]) for position in self._identified])
        return bucket, places

    def owned_tensors(self, args: Sequence[Any]) -> list[Tensor]:
        """The parameters and buffers of modules among the arguments."""
        return [args[position] for position in self._owned]

    def anchors(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The addresses that tell one instance of a model from another."""
        return tuple([tensor.data_ptr() for tensor in self.owned_tensors(args)])


def _hashable(number: float) -> Any:
    """A float by its bits: NaN equals itself, or every call with one would be a new bucket, and 0.0 is not -0.0."""
    return number.hex() if isinstance(number, float) else number


class OverlapCheck:
    """Whether a tensor that a graph writes shares memory with another one the call brings.

    Such a call must not be served by a capture that stages one of the two: Dynamo has no guard for it. The ranges of
    static inputs are part of a program's key, so they are sorted once.

    Args:
        draft: the graph.
        args: the arguments with which the program was built.
    """

    def __init__(self, draft: Draft, args: Sequence[Any]) -> None:
        written = {storage for effects in draft.effects.values() for storage in effects.writes}
        fixed: list[ByteRange] = []
        fixed_written: list[ByteRange] = []
        self._moving: list[tuple[int, bool]] = []
        for position, graph_input in enumerate(draft.inputs):
            meta = draft.effects[graph_input.node].result
            if not isinstance(meta, TensorMeta):
                continue
            is_written = meta.storage in written
            if graph_input.static:
                fixed.append(byte_range(args[position]))
                fixed_written += fixed[-1:] if is_written else []
            else:
                self._moving.append((position, is_written))
        self._any_moving_write = any(is_written for _, is_written in self._moving)
        self._fixed = _Ranges(fixed if self._any_moving_write else [])
        self._fixed_written = _Ranges(fixed_written)
        can_overlap = bool(self._moving) and (self._any_moving_write or bool(fixed_written))
        self.check: Callable[[Sequence[Any]], bool] = self._overlaps if can_overlap else _never

    def _overlaps(self, args: Sequence[Any]) -> bool:
        moving = [(byte_range(args[position]), is_written) for position, is_written in self._moving]
        for span, is_written in moving:
            if (self._fixed if is_written else self._fixed_written).meet(span):
                return True
        if not self._any_moving_write:
            return False
        return any(
            (first_written or second_written) and _touch(first, second)
            for index, (first, first_written) in enumerate(moving)
            for second, second_written in moving[index + 1 :]
        )


ByteRange = tuple[int, int]


class _Ranges:
    """Byte ranges, which may overlap each other, sorted for a look-up by bisection."""

    def __init__(self, ranges: Sequence[ByteRange]) -> None:
        ordered = sorted(ranges)
        self._starts = [start for start, _ in ordered]
        self._furthest = list(itertools.accumulate((end for _, end in ordered), max))

    def meet(self, span: ByteRange) -> bool:
        """Whether a range touches any of them: one that starts before its end reaches beyond its start."""
        start, end = span
        before = bisect.bisect_left(self._starts, end)
        return before > 0 and start < end and self._furthest[before - 1] > start


def _never(args: Sequence[Any]) -> bool:
    return False


def byte_range(tensor: Tensor) -> ByteRange:
    """First address of a tensor's elements, and the one behind the last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size() * (tensor.numel() > 0)


def _touch(first: ByteRange, second: ByteRange) -> bool:
    return first[0] < second[1] and second[0] < first[1]
