"""What `import dsv4_compile` does not do: import transformers, Dynamo or Inductor, or run twice under another name."""

import ast
import re
import subprocess
import sys

import pytest
from repository import ROOT


def python(code, *, cwd=None):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=False)


def test_importing_stays_cheap():
    code = (
        "import sys, torch; before = set(sys.modules); import dsv4_compile;"
        "heavy = ('sympy', 'transformers', 'torch._dynamo', 'torch._inductor');"
        "heavy += ('dsv4_compile.models', 'dsv4_compile.runners');"
        "print([name for name in set(sys.modules) - before if name.startswith(heavy)])"
    )
    result = python(code)
    assert result.stdout.strip() == "[]", result.stderr


def test_importing_registers_the_ops():
    result = python("import torch, dsv4_compile; print(torch.ops.dsv4.forward_mqa.default)")
    assert result.stdout.strip() == "dsv4.forward_mqa.default", result.stderr


def test_the_bare_name_of_the_ops_folder_is_refused():
    result = python("import ops", cwd=ROOT)
    assert "import this package as dsv4_compile.ops, not as ops" in result.stderr


def test_models_import_without_transformers():
    result = python("import sys, dsv4_compile.models.deepseek_v4; print('transformers' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


# what torch's documentation names, and a base class that `compat`, which must not import Dynamo, cannot hand on
ALLOWED = {"torch._dynamo.mark_static", "torch._dynamo.mark_static_address", "torch._dynamo.exc.ShortenTraceback"}


FILES = sorted(file for folder in ("dsv4_compile", "passes", "ops") for file in (ROOT / folder).rglob("*.py"))


def dotted(node):
    """ "torch.a.b" of such an attribute; the empty text for any other."""
    if isinstance(node, ast.Attribute):
        return f"{inside}.{node.attr}" if (inside := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) and node.id == "torch" else ""


def torch_names(tree):
    """Every name of torch that a module imports or reaches through `torch`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("torch."))
        elif name := dotted(node):
            yield name


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_private_names_of_torch_are_those_of_compat(file):
    if file.parent == ROOT / "dsv4_compile" / "compat":
        return
    names = set(torch_names(ast.parse(file.read_text(encoding="utf-8"))))
    private = {name for name in names if any(re.match("_(?!_)", part) for part in name.split("."))}
    assert {name for name in private if name not in ALLOWED} == set()
