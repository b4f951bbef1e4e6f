"""What meta kernels said of results, kept: layers of one kind ask the same questions over and over.

Many meta kernels are Python, and asking them was more than half of the time of a capture of 61 layers. The answer of
one of torch's own ops depends on the layouts of its tensors, its other arguments, and a few global settings; all of
them are in the key. Ops of others are asked anew each time: their fakes may look at anything. Two answers are kept:

- new tensors, on the meta device; they are only ever looked at
- "its arguments", of an op that writes and returns nothing else, such as `add_`; not where it had to resize one

A third kind is none of a meta kernel: what the kernel itself gave in a warm-up, where the two differ (`layout_watch`).
It comes before the others and is never dropped, since a capture relies on it.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ....compat.dispatch import OpArgs, OpKwargs, OpOverload, Tree
from .result_meta import is_meta_tensor, returned_arguments
from .tree import leaves_of, map_leaves

# Keys kept; host scalars among the arguments make new ones without end.
MOST = 4096
_ITS_ARGUMENTS = object()
Key = tuple[Hashable, ...]


class MetaCache:
    """Belongs to an engine; only touched under the capture lock."""

    def __init__(self) -> None:
        self._known: dict[Key, object] = {}
        self._real: dict[Key, object] = {}

    def keep_real(self, func: OpOverload, args: OpArgs, kwargs: OpKwargs, results: Tree) -> bool:
        """Keep what a kernel gave, if these are new tensors; False if nobody would look it up. Needs no lock."""
        if func._schema.is_mutable or key_of_call(func, args, kwargs) is None:
            return False
        if any(isinstance(leaf, Tensor) and not _is_plain(leaf) for leaf in leaves_of((args, kwargs, results))):
            return True  # a recorder refuses the op, with the reason
        self._real[_key_of_real(func, args, kwargs)] = map_leaves(_on_meta, Tensor, results)
        return True

    def get(self, key: Key | None, func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Tree:
        """What the op returns, as for `keep`; None if it is not known."""
        real = self._real.get(_key_of_real(func, args, kwargs)) if self._real and key is not None else None
        if real is not None:
            return real
        known = None if key is None else self._known.get(key)
        return returned_arguments(func, args, kwargs) if known is _ITS_ARGUMENTS else known

    def keep(self, key: Key | None, func: OpOverload, results: Tree) -> None:
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


def key_of_call(func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Key | None:
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


def _key_of_real(func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Key:
    """As above, but for strides where a size is 1: in a capture they are those of the plan, in a warm-up any."""
    args, kwargs = map_leaves(_with_plain_strides, Tensor, (args, kwargs))
    return (func, _frozen(args), _frozen(kwargs))


def _with_plain_strides(tensor: Tensor) -> tuple[Hashable, ...]:
    steps = [step if size > 1 else None for size, step in zip(tensor.size(), tensor.stride(), strict=True)]
    return (*tensor.size(), *steps, tensor.dtype)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _returns_only_arguments(func: OpOverload) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(value.alias_info is not None and value.alias_info.is_write for value in returns)


def _frozen(value: object) -> Hashable:
    """A hashable value that differs for 1, 1.0 and True, and for tensors of different layouts."""
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    return None if isinstance(value, torch.Generator) else (type(value), value)
