"""Who computes an op on a GPU: a kernel of this folder, or the op in torch.

Kernels are registered under the key CUDA, which ROCm's tensors have too; the op in torch stays under
CompositeExplicitAutograd and serves every other device. `DSV4_OPS=torch`, read once when the package is imported,
registers no kernel, so that both can be compared. A call that no kernel fits (another dtype, a width that is no power
of two, no Triton) goes to the op in torch: counted in `counters.torch_op_calls`, and said once for each reason.

What a split op promises of captures (`register_op(capturable=)`) its kernels promise, and the op in torch does not. So
who plans asks of each call, with fakes of its arguments, which of them would serve it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from ...counting import counters
from ...log import log
from ..registry import Capturable, Promise
from .launch import KernelLaunch

VARIABLE = "DSV4_OPS"
CHOICES = ("auto", "torch")
SAID = "dsv4::%s runs in plain torch on the GPU: %s"
NO_TRITON = 'Triton is not installed (pip install "dsv4-compile[kernels]")'

Value = Tensor | int | float | str | None
TorchOp = Callable[..., None]


class KernelCall(Protocol):
    """One call of an op, a record of its arguments."""

    def why_not(self) -> str | None:
        """Why no kernel fits, None if one does."""

    def launches(self, architecture: str | None = None) -> Iterable[KernelLaunch]:
        """What is launched, in order, for the device's architecture or another one; there is a token at least."""


def read_choice() -> str:
    """The value of DSV4_OPS.

    Raises:
        OptionError: it is none of the choices.
    """
    choice = os.environ.get(VARIABLE, CHOICES[0])
    if choice not in CHOICES:
        from ...errors import OptionError

        raise OptionError(f"the environment variable {VARIABLE} is {choice!r}; it must be {' or '.join(CHOICES)}")
    return choice


KERNELS_SERVE = read_choice() == "auto" and importlib.util.find_spec("triton") is not None


def register(library: torch.library.Library, name: str, torch_op: TorchOp) -> None:
    """Let kernels serve an op on GPUs, unless they are not wanted."""
    if read_choice() == "auto":
        library.impl(name, on_gpu(name, torch_op), "CUDA")


def on_gpu(name: str, torch_op: TorchOp) -> TorchOp:
    """An op that its kernel serves where one fits, and `torch_op` where none does."""

    def serve(*arguments: Value) -> None:
        make_call = find_kernels(name)
        call = None if make_call is None else make_call(*arguments)
        reason = NO_TRITON if call is None else call.why_not()
        if call is None or reason is not None:
            counters.add(torch_op_calls=1)
            say_once(name, reason or NO_TRITON)
            torch_op(*arguments)
        elif first_tensor(arguments).shape[0]:
            with torch.cuda.device_of(first_tensor(arguments)):  # Triton launches on the current device
                for launch in call.launches():
                    launch.run()

    return serve


def promise(kernels_capturable: Capturable) -> Promise:
    """What a split op promises, given what its kernels do."""
    return (("cuda", kernels_capturable),) if KERNELS_SERVE and kernels_capturable != "never" else "never"


def why_torch(name: str) -> Callable[..., str | None]:
    """Tells of a call why the op in torch would serve it on a GPU, None if a kernel would; only looks at layouts."""

    def why(*arguments: Value, **named: Value) -> str | None:
        make_call = find_kernels(name)
        reason = NO_TRITON if make_call is None else make_call(*arguments, **named).why_not()
        return None if reason is None else SAID % (name, reason)

    return why


def first_tensor(arguments: Iterable[Value]) -> Tensor:
    """The first tensor of an op's arguments, whose rows are the tokens."""
    return next(value for value in arguments if isinstance(value, Tensor))


@cache
def find_kernels(name: str) -> Callable[..., KernelCall] | None:
    """Makes calls of the kernels of an op, None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    file = importlib.import_module(f"{__package__}.{name}")
    make_call: Callable[..., KernelCall] = getattr(file, f"{name.title().replace('_', '')}Call")
    return make_call


@cache
def say_once(name: str, reason: str) -> None:
    """Log that the op in torch serves, and why."""
    log.warning(SAID, name, reason)
