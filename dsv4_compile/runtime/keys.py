"""What a capture is valid for: the bucket of a call and the addresses of what its pieces read in place.

The key of a program is (sizes and numbers, host scalars, addresses): the address check and the lookup are one pass.
Object identity would not do, since `p.data = ...` keeps the object. Addresses also tell apart the instances of one
class, which share a compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from ..draft import Draft, InputRole

Key = tuple[tuple[Any, ...], tuple[Any, ...]]


class KeyReader:
    """Reads keys off the arguments of a call.

    Args:
        draft: the graph.
        roles: of its inputs.
        check_addresses: False trusts the caller to keep every static input where it was; instances of a model are
            then told apart by which parameters and buffers they have.
    """

    def __init__(self, draft: Draft, roles: Mapping[fx.Node, InputRole], *, check_addresses: bool) -> None:
        positions = {graph_input.node: position for position, graph_input in enumerate(draft.inputs)}
        self._numbers = [positions[node] for node, role in roles.items() if role is InputRole.NUMBER]
        scalars = (node for node, effects in draft.effects.items() if effects.bucket_scalar)
        self._scalars = [positions[node.all_input_nodes[0]] for node in scalars]
        addressed = (InputRole.STATIC, InputRole.BOUND)
        self.addressed = [positions[node] for node, role in roles.items() if role in addressed]
        self._read_addresses = check_addresses
        self._owned = [positions[i.node] for i in draft.inputs if i.owned]

    def read(self, args: Sequence[Any]) -> Key:
        """The key of a call: its bucket, and its addresses."""
        bucket = tuple([args[position] for position in self._numbers])
        if self._scalars:
            bucket += tuple([_hashable(args[position].item()) for position in self._scalars])
        if not self._read_addresses:
            return bucket, tuple([id(args[position]) for position in self._owned])
        return bucket, tuple([args[position].data_ptr() for position in self.addressed])

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
    static inputs that are written are part of a program's key, so they are sorted once.

    Args:
        draft: the graph.
        args: the arguments with which the program was built.
    """

    def __init__(self, draft: Draft, args: Sequence[Any]) -> None:
        written = {storage for effects in draft.effects.values() for storage in effects.writes}
        tensors = [(p, i) for p, i in enumerate(draft.inputs) if isinstance(i.value, Tensor)]
        writes = {p for p, i in tensors if draft.effects[i.node].result.storage in written}  # type: ignore[union-attr]
        self._fixed = sorted(_byte_range(args[p]) for p, i in tensors if i.static and p in writes)
        self._moving = [(p, p in writes) for p, i in tensors if not i.static]
        self._any_moving_write = any(is_written for _, is_written in self._moving)
        self.check: Callable[[Sequence[Any]], bool] = self._overlaps if self._can_overlap() else _never

    def _can_overlap(self) -> bool:
        return bool(self._moving) and bool(self._fixed or (self._any_moving_write and len(self._moving) > 1))

    def _overlaps(self, args: Sequence[Any]) -> bool:
        moving = [(_byte_range(args[position]), is_written) for position, is_written in self._moving]
        if any(_meets(byte_range, self._fixed) for byte_range, _ in moving):
            return True
        if not self._any_moving_write:
            return False
        return any(
            (first_written or second_written) and _touch(first, second)
            for index, (first, first_written) in enumerate(moving)
            for second, second_written in moving[index + 1 :]
        )


ByteRange = tuple[int, int]


def _never(args: Sequence[Any]) -> bool:
    return False


def _byte_range(tensor: Tensor) -> ByteRange:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size() * (tensor.numel() > 0)


def _touch(first: ByteRange, second: ByteRange) -> bool:
    return first[0] < second[1] and second[0] < first[1]


def _meets(byte_range: ByteRange, ranges: Sequence[ByteRange]) -> bool:
    """Whether a range touches any of a sorted list; two written static inputs may overlap each other."""
    return any(_touch(byte_range, other) for other in ranges)
