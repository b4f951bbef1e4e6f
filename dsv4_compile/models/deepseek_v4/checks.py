"""Checks of single values of a configuration, which name the value and say what it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeAlias

from ...errors import UnsupportedConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Values: TypeAlias = Mapping[str, Any]  # a configuration by name, as JSON has it: nothing is checked yet
Kind: TypeAlias = type | UnionType | tuple[type, ...]

_NUMBERS: dict[str, tuple[Kind, str]] = {"int": (int, "an integer"), "float": ((int, float), "a number")}


def check_kind(name: str, value: object, kind: Kind, words: str) -> None:
    """Refuse a value of another type; a bool is no number.

    Raises:
        UnsupportedConfigError: it is of another type.
    """
    if isinstance(value, bool) or not isinstance(value, kind):
        raise UnsupportedConfigError(f"{name} is {value!r}; it must be {words}")


def check_number(name: str, value: object, type_name: str = "float") -> None:
    """Refuse what is no finite number above 0.

    Args:
        name: of the value, for the message.
        value: anything.
        type_name: "int" or "float"; an integer is a float too.

    Raises:
        UnsupportedConfigError: it is none.
    """
    kind, words = _NUMBERS[type_name]
    check_kind(name, value, kind, f"{words} above 0")
    if isinstance(value, (int, float)) and not 0 < value < math.inf:
        raise UnsupportedConfigError(f"{name} is {value!r}; it must be {words} above 0")


def check_numbers(record: DataclassInstance) -> None:
    """Refuse a dataclass of which a field that is declared int or float is no finite number above 0.

    Raises:
        UnsupportedConfigError: one is none.
    """
    for field in fields(record):
        if field.type in _NUMBERS:
            check_number(field.name, getattr(record, field.name), str(field.type))
