"""One launch of a kernel, as a record: it can be run, or compiled for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

Argument: TypeAlias = Tensor | int | float
Constant: TypeAlias = int | float | bool | str


class Parameter(Protocol):
    """What Triton knows of a parameter of a kernel."""

    name: str
    is_constexpr: bool
    do_not_specialize: bool
    do_not_specialize_on_alignment: bool


class Kernel(Protocol):
    """The part of `triton.JITFunction` that is used here."""

    params: list[Parameter]
    __name__: str

    def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
        """The kernel with its grid."""

    def __call__(self, *arguments: Argument, **constants: Constant) -> object:
        """KernelLaunch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch:
    """A kernel with all that it is launched with.

    Attributes:
        kernel: the function.
        grid: programs in each dimension, none of them zero.
        arguments: in order.
        constants: by name; each set of them is a specialisation.
        warps: of a program.
        stages: of the software pipeline.
        spills: why registers may spill, None if they must not.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    constants: Mapping[str, Constant]
    warps: int = 4
    stages: int = 1
    spills: str | None = None

    def run(self) -> None:
        """KernelLaunch it on the current stream."""
        self.kernel[self.grid](*self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages)
