"""What torch keeps for a thread, or for the process, and a call may change: read at its start, put back at its end.

A `with` block puts back what it changed, but for one gap: an interrupt that comes while the block is being entered or
left. Then a dispatch mode stays on its stack, and every later call of torch in that thread goes through it. So whoever
serves a call compares, at its very end, with what was there at its start. Everything in here can be done twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .dynamo import autocast_state, restore_autocast

_PYTHON_KEYS = (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot)
# Not in every version; where it is missing, a gap of a block that switches function modes off is not closed.
_function_state: Callable[[], object] = getattr(torch._C, "_get_torch_function_state", lambda: None)
_set_function_state: Callable[[object], None] = getattr(torch._C, "_set_torch_function_state", lambda state: None)

_CALL = methodcaller("__call__")


class _Entered(threading.local):
    """Guards that switch inference mode off, in order; one that is forgotten would switch it on when it is freed."""

    def __init__(self) -> None:
        self.guards: list[torch._C._InferenceMode] = []


_entered = _Entered()


class OutsideInferenceMode:
    """A block that is not in inference mode, whatever is around it."""

    def __enter__(self) -> None:
        self._depth = len(_entered.guards)
        if torch.is_inference_mode_enabled():
            guard = torch._C._InferenceMode(False)
            _entered.guards.append(guard)  # before it is entered: leaving one that was not does nothing
            guard.__enter__()

    def __exit__(self, *_: object) -> None:
        _leave_guards(self._depth)


def _leave_guards(depth: int) -> None:
    while len(_entered.guards) > depth:
        _entered.guards[-1].__exit__(None, None, None)
        _entered.guards.pop()


class NoDispatchModes:
    """A block in which calls of torch do not reach the dispatch modes of this thread."""

    def __enter__(self) -> None:
        self._before = _excluded()
        _set_excluded((True, True))

    def __exit__(self, *_: object) -> None:
        _set_excluded(self._before)


def _excluded() -> tuple[bool, ...]:
    return tuple([torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _PYTHON_KEYS])


def _set_excluded(excluded: tuple[bool, ...]) -> None:
    for key, is_excluded in zip(_PYTHON_KEYS, excluded, strict=True):
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, is_excluded)


@dataclass(frozen=True, slots=True)
class TorchState:
    """The state of one thread, as `now` found it."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    autocast_nesting: int
    dispatch_modes: list[_python_dispatch.TorchDispatchMode]
    function_modes: list[TorchFunctionMode]
    function_state: object
    excluded: tuple[bool, ...]
    inference_guards: int

    @classmethod
    def now(cls) -> TorchState:
        """That of the calling thread."""
        return cls(
            torch.is_grad_enabled(),
            autocast_state(),
            torch.is_autocast_cache_enabled(),
            _nesting(),
            _get_current_dispatch_mode_stack(),
            _get_current_function_mode_stack(),
            _function_state(),
            _excluded(),
            len(_entered.guards),
        )

    def restore(self) -> None:
        """Make it that of the calling thread, which is the one that `now` was called in."""
        _leave_guards(self.inference_guards)  # first, since leaving one sets grad mode
        if _excluded() != self.excluded:
            _set_excluded(self.excluded)
        if _function_state() != self.function_state:
            _set_function_state(self.function_state)
        self._restore_modes()
        if torch.is_grad_enabled() != self.grad:
            torch.set_grad_enabled(self.grad)
        self._restore_autocast()

    def _restore_modes(self) -> None:
        function_modes = _get_current_function_mode_stack()
        if function_modes != self.function_modes:
            for _ in range(len(function_modes) - _common(function_modes, self.function_modes)):
                torch._C._pop_torch_function_stack()
            for function_mode in self.function_modes[_common(function_modes, self.function_modes) :]:
                torch._C._push_on_torch_function_stack(function_mode)
        dispatch_modes = _get_current_dispatch_mode_stack()
        if dispatch_modes != self.dispatch_modes:
            common = _common(dispatch_modes, self.dispatch_modes)
            for mode in reversed(dispatch_modes[common:]):
                _python_dispatch._pop_mode(getattr(mode, "_mode_key", None))
            for mode in self.dispatch_modes[common:]:
                _python_dispatch._push_mode(mode)

    def restore_flags(self) -> None:
        """The same for torch's notes on dispatch modes: for after an exception, see `_set_flags`."""
        _set_flags(self.dispatch_modes)

    def _restore_autocast(self) -> None:
        while _nesting() > self.autocast_nesting:
            torch.autocast_decrement_nesting()
        if autocast_state() != self.autocast:
            restore_autocast(self.autocast)
        if torch.is_autocast_cache_enabled() != self.autocast_cache:
            torch.set_autocast_cache_enabled(self.autocast_cache)


def leave_modes(kind: type) -> None:
    """Leave the innermost dispatch modes of this thread that are of a kind; for after an exception that was caught."""
    modes = _get_current_dispatch_mode_stack()
    while modes and type(modes[-1]) is kind:
        _python_dispatch._pop_mode()
        modes.pop()
    _set_flags(modes)


def _set_flags(modes: list[_python_dispatch.TorchDispatchMode]) -> None:
    """Set torch's notes on dispatch modes, one for all threads, by the modes of this one.

    An interrupted mode leaves them set, and then Dynamo compiles nothing any more.
    """
    with_internals = any(not mode.ignore_compile_internals() for mode in modes) if modes else False
    flags = {
        "_is_in_torch_dispatch_mode": bool(modes),
        "_is_in_non_infra_torch_dispatch_mode": any(not mode.is_infra_mode() for mode in modes),
        "_is_in_any_mode_without_ignore_compile_internals": with_internals,
    }
    for name, value in flags.items():
        if getattr(_python_dispatch, name, value) != value:
            setattr(_python_dispatch, name, value)
    # not in every version
    getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", bool)(with_internals)


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many modes from the bottom of two stacks are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((depth for depth, (mode, same) in pairs if mode is not same), min(len(one), len(other)))


def _nesting() -> int:
    """How many autocast blocks this thread is in."""
    # torch tells no other way; both calls are made by C code, between which no interrupt comes
    _, nesting = map(_CALL, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return int(nesting)
