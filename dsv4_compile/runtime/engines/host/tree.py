"""Walking the arguments of an op: tensors, numbers, and lists, tuples and dictionaries of them.

An op's schema allows no other containers, and a capture walks arguments often enough for the general pytree, which is
five times slower, to be felt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ....compat.dispatch import Tree


def leaves_of(value: Tree) -> Iterator[Tree]:
    """The leaves in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves_of(item)
    else:
        yield value


def map_leaves(change: Callable[[Tree], Tree], kinds: type | tuple[type, ...], value: Tree) -> Tree:
    """The same containers with `change` applied to the leaves of these types."""
    if isinstance(value, kinds):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_leaves(change, kinds, item) for item in value])
    if isinstance(value, dict):
        return {key: map_leaves(change, kinds, item) for key, item in value.items()}
    return value
