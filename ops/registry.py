"""Roles of ops: which one splits the graph, which one reads step state, which one may be captured.

The registry is process-wide, as torch's own op registry is, because a role belongs to an op and not to a model.
A compilation takes one `snapshot()` when it starts, so registering counts for later compilations only. All
functions may be called from any thread.
"""

from __future__ import annotations

import difflib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from ..compat.dispatch import all_op_names, schemas_of

Role = Literal["split", "prepare", "capture"]
Capturable = Literal["never", "decode", "always"]
Promise: TypeAlias = "Capturable | tuple[tuple[str, Capturable], ...]"  # one for all, or one for each type of device


@dataclass(frozen=True, slots=True)
class RegisteredOp:
    """What the registry knows of an op.

    Attributes:
        name: "ns::op" (every overload) or "ns::op.overload" (that one).
        role: "split" always runs eagerly; "prepare" reads step state to prepare attention inputs; "capture" may
            be captured.
        step_state: names of the arguments that are step state.
        reads_context: the op reaches step state through a side channel, out of sight of the graph.
        tokens: the argument whose dim 0 is the token count; None: the first tensor argument.
        cost: how long a call takes beside the estimate for its results and activations: 2 is twice as long.
        capturable: in which batches a split op launches the same, whatever values on the host are; one answer, or one
            for each type of device.
        why_not_kept: asked with the arguments of a call, tensors as fakes: why that call does not keep the promise. An
            op of this package knows which calls its kernels serve. None: every call keeps it.
        context: of an op that reads the step context: called with its arguments that are no tensors, by name; returns
            the tensors that a call would read there now, by names for people. Empty: there is no step context.
    """

    name: str
    role: Role
    step_state: tuple[str, ...] = ()
    reads_context: bool = False
    tokens: str | None = None
    cost: float = 1.0
    capturable: Promise = "never"
    why_not_kept: Callable[..., str | None] | None = field(default=None, compare=False, repr=False)
    context: Callable[..., Mapping[str, Any]] | None = field(default=None, compare=False, repr=False)

    def capturable_on(self, device_type: str) -> Capturable:
        """In which batches it may be captured on a type of device."""
        return self.capturable if isinstance(self.capturable, str) else dict(self.capturable).get(device_type, "never")


_lock = threading.Lock()
_registered: dict[str, RegisteredOp] = {}


def register_op(
    name: str,
    *,
    role: Role,
    step_state: Sequence[str] = (),
    reads_context: bool = False,
    tokens: str | None = None,
    cost: float = 1.0,
    capturable: Capturable | Mapping[str, Capturable] = "never",
    context: Callable[..., Mapping[str, Any]] | None = None,
) -> None:
    """Give an op a role in later compilations; a second call for the same name replaces the first.

    Args:
        name: "ns::op" or "ns::op.overload", known to torch already.
        role: "split", "prepare" or "capture"; see `RegisteredOp`.
        step_state: argument names that a runner rebuilds or refills each step.
        reads_context: True if the op reads step state from a global or forward context.
        tokens: name of the tensor argument whose dim 0 is the token count.
        cost: a hint of how long a call takes beside the estimate, which is one kernel that reads and writes the
            call's activations and results once: 2 is twice as long, 0 next to nothing. It only has a part in which
            branches get a side stream.
        capturable: of a split op, a promise that its kernels and their launches depend on no value on the host:
            "never", "decode" for batches of uniform decode, or "always". With it for every split op of a graph, calls
            in a block of `uniform_decode` replay as one graph. Otherwise, and in all other calls, a split op is eager,
            also one that is "always" capturable. A dict such as {"cuda": "decode"} promises it for kernels of these
            device types alone.
        context: of an op that reads the step context, what tells the tensors that a call would read there now: called
            with its arguments that are no tensors, by name, it returns these tensors by name, or nothing if there is
            no step. Where such an op is captured, replays check that they are where they were at capture.

    Raises:
        UnknownOpError: torch knows no such op, or the op has no such argument.
        ArgumentError: another role, a cost that is not a finite number of at least 0, `reads_context` that is no
            bool, `step_state` that is no list of names, `tokens` that names no tensor, another `capturable`, or a
            `context` that is no function or belongs to an op without `reads_context`.
    """
    check_op_name(name)
    _refuse(name, "role", role, None if role in get_args(Role) else f"one of {', '.join(get_args(Role))}")
    _refuse(name, "cost", cost, None if _is_cost(cost) else "a finite number of at least 0")
    _refuse(name, "reads_context", reads_context, None if isinstance(reads_context, bool) else "True or False")
    step_state = _names(name, step_state)
    _check_arguments(name, step_state if tokens is None else (*step_state, tokens))
    is_tensor = tokens is None or _is_tensor(name, tokens)
    _refuse(name, "tokens", tokens, None if is_tensor else "the name of a tensor argument")
    kept = _capturable(name, capturable)
    tells_context = context is None or (callable(context) and reads_context)
    _refuse(name, "context", context, None if tells_context else "a function, with reads_context=True")
    with _lock:
        _registered[name] = RegisteredOp(
            name, role, step_state, reads_context, tokens, float(cost), kept, context=context
        )


def snapshot() -> Mapping[str, RegisteredOp]:
    """The registered ops by name, as they are now; later registrations do not change it."""
    with _lock:
        return dict(_registered)


def with_split_ops(ops: Mapping[str, RegisteredOp], names: Sequence[str]) -> dict[str, RegisteredOp]:
    """`ops` with these names as split ops; they win over any registered role and keep the rest of what is known."""
    merged = dict(ops)
    for name in names:
        merged[name] = replace(find_op(ops, name) or RegisteredOp(name, "split"), name=name, role="split")
        merged.update({op: replace(ops[op], role="split") for op in ops if op.startswith(f"{name}.")})
    return merged


def find_op(ops: Mapping[str, RegisteredOp], overload: str) -> RegisteredOp | None:
    """What `ops` knows of "ns::op.overload": an entry for that overload first, then one for all of "ns::op"."""
    return ops.get(overload) or ops.get(overload.partition(".")[0])


def check_op_name(name: object) -> None:
    """Raise UnknownOpError with a did-you-mean unless torch knows "ns::op" or "ns::op.overload"."""
    from ..errors import UnknownOpError

    if not isinstance(name, str):
        raise UnknownOpError(f'{name!r} is no op name: give a text, "ns::op" or "ns::op.overload"')
    if "::" in name and schemas_of(name):
        return
    known = {op.partition(".")[0] for op in all_op_names()} | {name for name in all_op_names() if "." in name}
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else 'names read "ns::op" or "ns::op.overload".'
    raise UnknownOpError(f"torch knows no op {name!r}: {hint} Import the library that defines it first.")


def _refuse(name: str, argument: str, value: object, must_be: str | None) -> None:
    from ..errors import ArgumentError

    if must_be is not None:
        raise ArgumentError(f"register_op({name!r}): {argument} is {value!r}; it must be {must_be}")


def _names(name: str, step_state: object) -> tuple[str, ...]:
    if isinstance(step_state, str):
        return (step_state,)
    is_list = isinstance(step_state, Sequence) and all(isinstance(argument, str) for argument in step_state)
    _refuse(name, "step_state", step_state, None if is_list else "a list of argument names")
    return tuple(step_state)  # type: ignore[arg-type]


def _capturable(name: str, given: object) -> Promise:
    words = get_args(Capturable)
    by_device: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"": given}
    told = [isinstance(device, str) and isinstance(one, str) and one in words for device, one in by_device.items()]
    must_be = f"one of {', '.join(words)}, or a dict from device types to one of them"
    _refuse(name, "capturable", given, None if told and all(told) else must_be)
    return tuple(sorted(by_device.items())) if isinstance(given, Mapping) else by_device[""]


def _is_cost(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_tensor(name: str, argument: str) -> bool:
    types = [str(given.type) for schema in schemas_of(name) for given in schema.arguments if given.name == argument]
    return all("Tensor" in described for described in types)


def _check_arguments(name: str, arguments: Sequence[str]) -> None:
    from ..errors import UnknownOpError

    for schema in schemas_of(name):
        have = [argument.name for argument in schema.arguments]
        for argument in arguments:
            if argument not in have:
                raise UnknownOpError(f"op {name!r} has no argument {argument!r}; it has {', '.join(have)}")
