"""Make the code that FX prints readable: names as in the model, one argument a line, no bookkeeping.

    def forward(self, L_self_modules_norm_parameters_weight_: "f32[8]", L_x_: "f32[s7, 8]"):
        # File: /home/me/model.py:3 in forward, code: return x * w
        mul: "f32[s7, 8]" = L_x_ * L_self_modules_norm_parameters_weight_;  L_x_ = None

becomes

    def forward(
        self,
        norm.weight: "f32[8]",
        x: "f32[s7, 8]",
    ):
        # model.py:3 in forward: return x * w
        mul: "f32[s7, 8]" = x * norm.weight

It is for reading and no longer Python; the files of the dump keep the exact text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

_PLACEHOLDER = re.compile(r"\b[lL]_\w+")
_MODULE_PARTS = re.compile(r"(?<![A-Za-z0-9])(?:self|modules|parameters|buffers)_")
_SIGNATURE = re.compile(r"^( *)def forward\((.*)\)(.*):$", re.MULTILINE)
_ARGUMENT = re.compile(r'[^\s,"][^,"]*(?:"[^"]*")?')
_DROPPED = re.compile(r";  (?:\w+ = )+None$", re.MULTILINE)
_SOURCE = re.compile(r"# File: (?:[^\n]*?[/\\])?([^/\\\n]+?:\d+ in [^\n]*?), code: ")
_SEPARATOR = re.compile(r"[/\\]")
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_KEPT_WORD = re.compile(r"torch|operator|None|True|False|(?:f|bf|i|u|c|b)\d+")


def name_table(names: Iterable[str]) -> dict[str, str]:
    """The names of inputs as the user reaches them, by what `readable` finds of them in a placeholder."""
    return {_key(name): name for name in names}


def _key(name: str) -> str:
    return re.sub(r"[\W_]+", "_", name).strip("_").lower()


def readable(code: str, names: Mapping[str, str]) -> str:
    """Code for reading.

    Args:
        code: what `GraphModule.print_readable` returns.
        names: from `name_table`.
    """
    code = _DROPPED.sub("", code)
    code = _SOURCE.sub(r"# \1: ", code)
    code = _PLACEHOLDER.sub(lambda match: model_name(match[0], names), code)
    code = _SIGNATURE.sub(_one_argument_a_line, code)
    return _BLANK_LINES.sub("\n\n", code).strip("\n")


def model_name(placeholder: str, names: Mapping[str, str]) -> str:
    """An input's name in the model, or what was given if it is not that of an input."""
    if not _PLACEHOLDER.fullmatch(placeholder):
        return placeholder
    key = _key(_MODULE_PARTS.sub("", placeholder[2:]))
    return names.get(key, placeholder)


def _one_argument_a_line(match: re.Match[str]) -> str:
    indent, arguments, rest = match.groups()
    lines = "".join(f"{indent}    {argument.strip()},\n" for argument in _ARGUMENT.findall(arguments))
    return f"{indent}def forward(\n{lines}{indent}){rest}:"


def skeleton(code: str) -> str:
    """What is left of code when names and source lines are taken out: equal for units that compute the same."""
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        word = match[0]
        return word if _KEPT_WORD.fullmatch(word) else numbers.setdefault(word, f"v{len(numbers)}")

    lines = [line for line in _DROPPED.sub("", code).splitlines() if not line.lstrip().startswith("#")]
    return _WORD.sub(number, "\n".join(lines))


def changed_lines(before: str, after: str) -> list[str]:
    """A unified diff with two lines around each change, without its file header; empty if nothing changed."""
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
    return list(diff)[2:]


def short_line(line: str) -> str:
    """A source line as the plan has it, "/home/me/model.py:3 in forward: code", without the folders."""
    place, colon, code = line.partition(": ")
    return f"{_SEPARATOR.split(place)[-1]}{colon}{code}"
