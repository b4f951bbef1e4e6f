"""Options of the backend: one frozen record made by `Config.from_options`, which refuses what it does not know.

No option is accepted and ignored. The table of options with their meaning is in README.md; the valid values are
the `Literal` types below, so that they are written once.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeGuard, get_args

import torch

from .errors import OptionError, did_you_mean
from .memory_pool import MemoryPool
from .ops.registry import check_op_name

Runner = Literal["auto", "mrv1", "mrv2"]


Region = Literal["runner", "narrow", "wide", "minimal"]


Engine = Literal["auto", "cuda", "host", "off"]


PieceCompiler = Literal["auto", "inductor", "aot_eager", "eager"]


Check = Literal["addresses", "full", "off"]


Pool = Literal["shared", "bucket"]


Decode = Literal["auto", "full", "piecewise"]


# Device type -> side streams that a device of it has gained from (docs/hardware.md): none has measured it yet. They are
# no free gain: each cuts what a piece compiler could fuse, and has scratch of cuBLAS of its own.
MEASURED_STREAMS: Mapping[str, int] = {}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of one compilation, as the user gave them (design: "runner", "region", ... in README.md)."""

    runner: Runner = "auto"
    region: Region = "runner"
    split_ops: tuple[str, ...] = ()
    engine: Engine = "auto"
    capture_sizes: tuple[int, ...] | None = None
    max_captures: int = 64
    piece_compiler: PieceCompiler | Callable[..., object] = "auto"
    check: Check = "addresses"
    static_outputs: bool = False
    max_tokens: int | None = None
    pool: Pool | MemoryPool = "shared"
    aux_streams: Literal["auto"] | int = "auto"
    aux_stream_max_tokens: int = 1024
    dump_dir: str | None = None
    decode: Decode = "auto"

    @classmethod
    def from_options(cls, options: Mapping[str, object] | None, mode: str | None = None) -> Config:
        """Check the options of `torch.compile` and freeze them; the caller's mapping is not changed.

        Raises:
            OptionError: an unknown option, a value of the wrong type or outside of its range, or a `mode` other than
                "default".
            UnknownOpError: `split_ops` names an op that torch does not know.
        """
        if mode not in (None, "default"):
            raise OptionError(f"mode={mode!r} means nothing to dsv4_piecewise: leave it out and use options={{...}}")
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"options is {options!r}; it must be a dict from option names to values")
        given = dict(options or {})
        valid = [field.name for field in fields(cls)]
        for name in given:
            if name not in valid:
                raise OptionError(f"unknown option {name!r}{did_you_mean(name, valid)} Valid: {', '.join(valid)}")
        checked: dict[str, Any] = {name: _CHECKS[name](name, value) for name, value in given.items()}
        config = cls(**checked)
        config._refuse_sizes_out_of_reach()
        return config

    def _refuse_sizes_out_of_reach(self) -> None:
        above = [size for size in self.capture_sizes or () if self.max_tokens is not None and size > self.max_tokens]
        if above:
            raise OptionError(
                f"option capture_sizes has {above[0]}, above max_tokens={self.max_tokens}: raise max_tokens or leave "
                "it out"
            )

    @property
    def resolved_runner(self) -> Literal["mrv1", "mrv2"]:
        """The runner in force: "auto" is mrv1 on ROCm and mrv2 elsewhere, decided on the machine that compiles."""
        if self.runner != "auto":
            return self.runner
        return "mrv1" if torch.version.hip else "mrv2"

    def resolved_piece_compiler(self, device: str) -> Literal["inductor", "aot_eager", "eager"] | Callable[..., object]:
        """The piece compiler in force for a device type: "auto" is inductor on cuda and eager on the host."""
        if self.piece_compiler != "auto":
            return self.piece_compiler
        return "inductor" if device == "cuda" else "eager"

    def resolved_aux_streams(self, device: str) -> int:
        """How many side streams a piece may use on a device type: "auto" is none where no gain has been measured."""
        return MEASURED_STREAMS.get(device, 0) if self.aux_streams == "auto" else self.aux_streams

    @property
    def token_bound(self) -> int | None:
        """The largest token count that may be captured, if the options say so."""
        if self.max_tokens is not None:
            return self.max_tokens
        return max(self.capture_sizes) if self.capture_sizes else None

    @property
    def resolved_region(self) -> Literal["narrow", "wide", "minimal"]:
        """The region policy in force: "runner" is wide under mrv1 and narrow under mrv2."""
        if self.region != "runner":
            return self.region
        return "wide" if self.resolved_runner == "mrv1" else "narrow"


def runner_reason(config: Config) -> str:
    """One phrase that says why `config.resolved_runner` is what it is."""
    if config.runner != "auto":
        return "asked for"
    return f"auto: {'ROCm' if torch.version.hip else 'not ROCm'} on {platform.system()}"


def _one_of(words: object, otherwise: str = "") -> Callable[[str, object], str]:
    valid = get_args(words)

    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in valid:
            hint = did_you_mean(value, valid)
            raise OptionError(f"option {name}={value!r} is not valid{hint} Valid: {', '.join(valid)}{otherwise}")
        return value

    return check


def _is_integer(value: object, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _integer(least: int) -> Callable[[str, object], int]:
    def check(name: str, value: object) -> int:
        if not _is_integer(value, least):
            raise OptionError(f"option {name}={value!r} must be an integer of at least {least}")
        return value

    return check


def _optional(check: Callable[[str, object], object]) -> Callable[[str, object], object]:
    return lambda name, value: None if value is None else check(name, value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"option {name}={value!r} must be True or False")
    return value


def _op_names(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(op, str) for op in value):
        raise OptionError(f'option {name}={value!r} must be a list of op names, such as ["my::op", "my::op.out"]')
    for op in value:
        check_op_name(op)
    return tuple(dict.fromkeys(value))


def _sizes(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise OptionError(f"option {name}={value!r} must be a list of token counts")
    if not value:
        raise OptionError(
            f"option {name}={value!r} names no size: leave it out to capture every size, "
            'or set engine="off" to capture none'
        )
    for size in value:
        if not _is_integer(size, 1):  # nor 0: a batch of no tokens has nothing to capture
            raise OptionError(f"option {name} has {size!r}; a token count is an integer of at least 1")
    return tuple(sorted(set(value)))


def _piece_compiler(name: str, value: object) -> object:
    return value if callable(value) else _one_of(PieceCompiler, " or a callable")(name, value)


def _pool(name: str, value: object) -> object:
    return value if isinstance(value, MemoryPool) else _one_of(Pool, " or a dsv4_compile.MemoryPool")(name, value)


def _aux_streams(name: str, value: object) -> object:
    return value if _is_integer(value, 0) else _one_of(Literal["auto"], " or an integer of at least 0")(name, value)


def _folder(name: str, value: object) -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise OptionError(f"option {name}={value!r} must be a folder path")
    try:
        return os.path.abspath(path)  # now: the program may change its folder before the files are written
    except FileNotFoundError as error:
        raise OptionError(f"option dump_dir={path!r} is relative, and the current folder is gone") from error


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "runner": _one_of(Runner),
    "region": _one_of(Region),
    "split_ops": _op_names,
    "engine": _one_of(Engine),
    "capture_sizes": _optional(_sizes),
    "max_captures": _integer(1),
    "piece_compiler": _piece_compiler,
    "check": _one_of(Check),
    "static_outputs": _flag,
    "max_tokens": _optional(_integer(1)),
    "pool": _pool,
    "aux_streams": _aux_streams,
    "aux_stream_max_tokens": _integer(0),
    "dump_dir": _optional(_folder),
    "decode": _one_of(Decode),
}
