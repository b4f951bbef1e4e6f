"""Code made readable for the report."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from dsv4_compile.inspect.report.readable import changed_lines, model_name, name_table, readable, short_line, skeleton

CODE = """\
class piece_0(torch.nn.Module):
    def forward(self, s7: "Sym(s7)", L_self_modules_layers_modules_3_parameters_w_: "f32[8, 4]", L_x_: "f32[s7, 8]"):
        # File: /home/me/model.py:3 in forward, code: return x * w


        mul: "f32[s7, 8]" = L_x_ * L_self_modules_layers_modules_3_parameters_w_;  L_x_ = None
        add = mul + L_other_;  mul = None
        return (add,)
"""
NAMES = name_table(["layers.3.w", "x"])


def test_names_arguments_and_bookkeeping() -> None:
    assert_expected_inline(
        readable(CODE, NAMES),
        """\
class piece_0(torch.nn.Module):
    def forward(
        self,
        s7: "Sym(s7)",
        layers.3.w: "f32[8, 4]",
        x: "f32[s7, 8]",
    ):
        # model.py:3 in forward: return x * w

        mul: "f32[s7, 8]" = x * layers.3.w
        add = mul + L_other_
        return (add,)""",
    )


def test_a_signature_that_returns_a_type_or_takes_nothing() -> None:
    assert readable("def forward(self) -> int:\n    return 1", {}) == "def forward(\n    self,\n) -> int:\n    return 1"


@pytest.mark.parametrize(
    ("placeholder", "name"),
    [
        ("l_self_modules_layers_modules_3_parameters_w_", "layers.3.w"),
        ("l_x_", "x"),
        ("l_y_", "l_y_"),
        ("out_x", "out_x"),
        ("hello_x", "hello_x"),
    ],
)
def test_model_name(placeholder: str, name: str) -> None:
    assert model_name(placeholder, NAMES) == name


def test_skeletons_are_equal_up_to_names_only() -> None:
    def code(name: str, number: int, dtype: str = "f32") -> str:
        return f'def forward(self, {name}: "{dtype}[4]"):\n    # line {name}\n    return torch.add({name}, {number})'

    assert skeleton(code("q", 4)) == skeleton(code("q_1", 4))
    assert skeleton(code("q", 4)) != skeleton(code("q", 128))
    assert skeleton(code("q", 4)) != skeleton(code("q", 4, "f16"))
    assert skeleton("f(a, b)") == skeleton("f(c, d)") != skeleton("f(a, a)")
    assert skeleton("torch.add(a)") != skeleton("torch.mul(a)")


def test_changed_lines() -> None:
    assert changed_lines("a\nb", "a\nb") == []
    assert changed_lines("a\nb", "a\nc") == ["@@ -1,2 +1,2 @@", " a", "-b", "+c"]


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("/home/me/model.py:3 in forward: a / b: c", "model.py:3 in forward: a / b: c"),
        ("C:\\me\\model.py:3 in forward: a", "model.py:3 in forward: a"),
        ("", ""),
    ],
)
def test_short_line(line: str, short: str) -> None:
    assert short_line(line) == short
