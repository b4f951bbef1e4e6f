"""What meta kernels said of results, kept: layers of one kind ask the same questions over and over.

Many meta kernels are Python, and asking them was more than half of the time of a capture of 61 layers. The answer of
one of torch's own ops depends on the layouts of its tensors, its other arguments, and a few global settings; all of
them are in the key. Ops of others are asked anew each time: their fakes may look at anything. Two answers are kept:

- new tensors, on the meta device; they are only ever looked at
- "its arguments", of an op that writes and returns nothing else, such as `add_`; not where it had to resize one
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ....compat.dispatch import OpOverload
from .result_meta import is_meta_tensor, returned_arguments
from .tree import leaves_of

# Keys kept; host scalars among the arguments make new ones without end.
MOST = 4096
_ITS_ARGUMENTS = object()
Key = tuple[Hashable, ...]


class MetaCache:
    """Belongs to an engine; only touched under the capture lock."""

    def __init__(self) -> None:
        self._known: dict[Key, object] = {}

    def get(self, key: Key | None, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """What the op returns, as for `keep`; None if it is not known."""
        known = None if key is None else self._known.get(key)
        return returned_arguments(func, args, kwargs) if known is _ITS_ARGUMENTS else known

    def keep(self, key: Key | None, func: OpOverload, results: Any) -> None:
        """Keep what an op returned, if it is of the two kinds that stay right."""
        if key is None:
            return
        if len(self._known) >= MOST:
            self._known.clear()
        leaves = list(leaves_of(results))
        if leaves and all(map(is_meta_tensor, leaves)):
            self._known[key] = results
        elif _returns_only_arguments(func):
            self._known[key] = _ITS_ARGUMENTS


def key_of_call(func: OpOverload, args: Any, kwargs: Any) -> Key | None:
    """All that the layouts of an op's results depend on; None for an op that has to be asked."""
    if func.namespace != "aten" or (func._schema.is_mutable and not _returns_only_arguments(func)):
        return None
    settings = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled
    key = (func, settings, _frozen(args), _frozen(kwargs))
    try:
        hash(key)
    except TypeError:  # a symbolic size
        return None
    return key


def _returns_only_arguments(func: OpOverload) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(value.alias_info is not None and value.alias_info.is_write for value in returns)


def _frozen(value: Any) -> Hashable:
    """A hashable value that differs for 1, 1.0 and True, and for tensors of different layouts."""
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    return None if isinstance(value, torch.Generator) else (type(value), value)
