"""What a capture is valid for: the bucket of a call and the addresses of what its pieces read in place.

The key of a program is (sizes and numbers, host scalars, addresses): the address check and the lookup are one pass.
Object identity would not do, since `p.data = ...` keeps the object. Addresses also tell apart the instances of one
class, which share a compiled graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, fx

from ...compat.dynamo import GUARDS_STRIDES
from ...decode import current_query_len
from ...graph.partitioned import InputRole
from ...graph.traced import TracedGraph, Value

Key = tuple[tuple[object, ...], tuple[object, ...]]


class KeyReader:
    """Reads keys off the arguments of a call.

    Args:
        traced: the graph.
        roles: of its inputs.
        check_addresses: False trusts the caller to keep what was declared static (`GraphInput.declared_static`) where
            it was; instances of a model are then told apart by which parameters and buffers they have. The addresses of
            other static and bound inputs are always part of the key.
        is_full: of calls of uniform decode, whose `query_len` is the last number of the bucket.
    """

    def __init__(
        self,
        traced: TracedGraph,
        roles: Mapping[fx.Node, InputRole],
        *,
        check_addresses: bool,
        is_full: bool = False,
    ) -> None:
        self._is_full = is_full
        positions = {graph_input.node: position for position, graph_input in enumerate(traced.inputs)}
        self._numbers = [positions[node] for node, role in roles.items() if role is InputRole.NUMBER]
        scalars = (node for node, effects in traced.effects.items() if effects.bucket_scalar)
        self._scalars = [positions[node.all_input_nodes[0]] for node in scalars]
        self._owned = [positions[i.node] for i in traced.inputs if i.owned]
        trusted = set() if check_addresses else {i.node for i in traced.inputs if i.declared_static}
        in_place = (InputRole.STATIC, InputRole.BOUND)
        self._addressed = [positions[node] for node, role in roles.items() if role in in_place and node not in trusted]
        self._identified = [] if check_addresses else self._owned
        self._unguarded = [] if GUARDS_STRIDES else self._owned

    def bucket_names(self, traced: TracedGraph) -> list[str]:
        """What each entry of a bucket is, as the user reaches it: "x.size()[0]"."""
        names = [traced.inputs[position].name for position in (*self._numbers, *self._scalars)]
        names += ["strides of the weights"] if self._unguarded else []
        return [*names, "query_len of uniform_decode"] if self._is_full else names

    def read(self, args: Sequence[Value]) -> Key:
        """The key of a call: its bucket, and its addresses."""
        bucket: tuple[object, ...] = tuple([args[position] for position in self._numbers])
        if self._scalars:
            bucket += tuple([_hashable(args[position].item()) for position in self._scalars])
        if self._unguarded:
            bucket += (tuple([args[position].stride() for position in self._unguarded]),)
        if self._is_full:
            bucket += (current_query_len(),)
        addresses: tuple[object, ...] = tuple([args[position].data_ptr() for position in self._addressed])
        if self._identified:
            addresses += tuple([id(args[position]) for position in self._identified])
        return bucket, addresses

    def owned_tensors(self, args: Sequence[Value]) -> list[Tensor]:
        """The parameters and buffers of modules among the arguments."""
        return [args[position] for position in self._owned]

    def parameter_addresses(self, args: Sequence[Value]) -> tuple[int, ...]:
        """The addresses that tell one instance of a model from another."""
        return tuple([tensor.data_ptr() for tensor in self.owned_tensors(args)])


def _hashable(number: float) -> float | str:
    """A float by its bits: NaN equals itself, or every call with one would be a new bucket, and 0.0 is not -0.0."""
    return number.hex() if isinstance(number, float) else number
