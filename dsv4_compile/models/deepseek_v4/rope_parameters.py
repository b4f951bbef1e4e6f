"""What a configuration says of RoPE: for the sliding-window layers ("main") and for the compressed ones ("compress").

Released checkpoints keep one flat dict, which scales the compressed layers only and brings no attention factor.
transformers nests two entries, each with a base, a width and a scaling of its own; what an entry leaves out is what
transformers takes for it, and that differs from the flat layout: YaRN without an `attention_factor` has one.

Built are the types whose table can be made once: default, linear and YaRN, of one width for both kinds of layer. The
other types of transformers are refused by name, and so is a key that the type does not use: it was meant to do
something. What transformers itself ignores, or reads differently before and after a checkpoint is saved, is refused
too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedConfigError
from .checks import Values, check_kind, check_number

_ENTRIES = ("main", "compress")
_COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_YARN_NUMBERS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
_ZERO_IS_DEFAULT = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # in transformers
_KEYS = {"default": (), "linear": ("factor",), "yarn": (*_YARN_NUMBERS, "truncate")}


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN: slow frequencies divided by `factor`, fast ones kept, a ramp between; cosines and sines are multiplied by
    `attention_factor`, which the released models do not have."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


RopeScaling = LinearScaling | YarnScaling


def read_rope(values: Values, fraction: float | None) -> dict[str, object]:
    """The fields of our configuration that have to do with RoPE, as far as `values` has them.

    Args:
        values: a configuration by name; its `rope_scaling` goes before its `rope_parameters`, as in transformers.
        fraction: how much of the head a nested entry rotates that does not say so itself.

    Raises:
        UnsupportedConfigError: something that is not built, or of which it can't be told what it means.
    """
    where = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    given = values.get(where) or {}
    named = [name for name in _ENTRIES if given.get(name) is not None]
    if not named:
        return {"qk_rope_head_dim": _read_width(values), "rope_scaling": _read_flat(where, given, values)}
    if len(named) == 1:
        raise UnsupportedConfigError(
            f"{where} has only an entry {named[0]!r}, which transformers ignores then; give it both main and compress"
        )
    for name in _ENTRIES:
        check_kind(f"{where}[{name!r}]", given[name], Mapping, "a dict")
    return _read_nested(where, given, values, fraction)


def _read_flat(where: str, given: Values, values: Values) -> RopeScaling | None:
    """Scaling of the compressed layers; their base and width stand beside the dict, whatever it says itself."""
    if _rope_type(given) == "yarn":
        given = {"attention_factor": 1.0, **given}
    return _read_scaling(where, given, values)


def _read_nested(where: str, given: Values, values: Values, fraction: float | None) -> dict[str, object]:
    main, compress = (f"{where}[{name!r}]" for name in _ENTRIES)
    if given["compress"].get("rope_theta") is None:
        raise UnsupportedConfigError(
            f"{compress} lacks rope_theta: transformers takes the one of the sliding-window layers then; write it out"
        )
    width = _read_width_of(main, given["main"], values, fraction)
    other = _read_width_of(compress, given["compress"], values, fraction)
    if width != other:
        raise UnsupportedConfigError(
            f"{main} rotates {width} dims and {compress} {other}; one partial_rotary_factor for both is supported"
        )
    theta = given["main"].get("rope_theta")
    return {
        **({} if theta is None else {"rope_theta": theta}),
        "compress_rope_theta": given["compress"]["rope_theta"],
        "qk_rope_head_dim": width,
        "main_rope_scaling": _read_scaling(main, given["main"], values),
        "rope_scaling": _read_scaling(compress, given["compress"], values),
    }


def _read_width(values: Values) -> int:
    """Released checkpoints give the width, transformers the fraction of the head."""
    width, fraction = values.get("qk_rope_head_dim"), values.get("partial_rotary_factor")
    if fraction is None:
        if width is None:
            raise UnsupportedConfigError("the configuration has neither qk_rope_head_dim nor partial_rotary_factor")
        return int(width)
    from_fraction = _width("partial_rotary_factor", fraction, values)
    if width not in (None, from_fraction):
        raise UnsupportedConfigError(
            f"qk_rope_head_dim is {width}, but partial_rotary_factor {fraction} makes it {from_fraction}; "
            "leave one of the two out"
        )
    return from_fraction


def _read_width_of(where: str, entry: Values, values: Values, fraction: float | None) -> int:
    said = entry.get("partial_rotary_factor")
    if said is None and fraction is None:
        raise UnsupportedConfigError(
            f"{where} lacks partial_rotary_factor: until the configuration is saved and read again, transformers "
            "rotates the whole head then; write it out"
        )
    return _width(f"partial_rotary_factor of {where}", fraction if said is None else said, values)


def _width(name: str, fraction: Any, values: Values) -> int:
    check_number(name, fraction)
    return int((values.get("head_dim") or 0) * fraction)


def _rope_type(entry: Values) -> object:
    return entry.get("rope_type", entry.get("type", "default"))


def _read_scaling(where: str, entry: Values, values: Values) -> RopeScaling | None:
    rope_type = _rope_type(entry)
    if not isinstance(rope_type, str) or rope_type not in _KEYS:
        raise UnsupportedConfigError(
            f"{where} asks for RoPE of type {rope_type!r}, which is not built; supported are {', '.join(_KEYS)}"
        )
    used = (*_COMMON_KEYS, *_KEYS[rope_type])
    unused = [str(key) for key, value in entry.items() if value is not None and key not in used]
    if unused:
        raise UnsupportedConfigError(
            f"{where} has {', '.join(unused)}, which RoPE of type {rope_type!r} does not use; "
            "leave it out, or name the type that it belongs to"
        )
    if rope_type == "linear":
        return LinearScaling(factor=_number(where, entry, "factor"))
    return _read_yarn(where, entry, values) if rope_type == "yarn" else None


def _read_yarn(where: str, entry: Values, values: Values) -> YarnScaling:
    if entry.get("truncate") not in (None, True):
        raise UnsupportedConfigError(
            f"{where} has truncate {entry['truncate']!r}, which transformers does not read for this model; "
            "YaRN is built with truncate True"
        )
    if "factor" not in entry:
        raise UnsupportedConfigError(f"{where} lacks factor, which YaRN needs")
    longest = values.get("max_position_embeddings")
    entry = {"original_max_position_embeddings": longest, **entry}
    original = _number(where, entry, "original_max_position_embeddings", "int")
    if entry["factor"] is None:
        entry["factor"] = _number("the configuration", values, "max_position_embeddings", "int") / original
    given = {name: _number(where, entry, name) for name in _YARN_NUMBERS if not _is_default(name, entry.get(name))}
    mscales = [given.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    given.setdefault("attention_factor", _attention_factor(given["factor"], *mscales))
    return YarnScaling(**{**given, "original_max_position_embeddings": original})


def _is_default(name: str, value: object) -> bool:
    return value is None or (name in _ZERO_IS_DEFAULT and value == 0)


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What transformers multiplies cosines and sines by where the entry does not say it."""
    if mscale is None or mscale_all_dim is None:
        return _log_scale(factor, 1.0)
    return _log_scale(factor, mscale) / _log_scale(factor, mscale_all_dim)


def _log_scale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _number(where: str, entry: Values, name: str, type_name: str = "float") -> Any:
    check_number(f"{name} of {where}", entry.get(name), type_name)
    return entry[name]
