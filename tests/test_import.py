"""What `import dsv4_compile` does not do: import transformers, Dynamo or Inductor, or run twice under another name."""

import ast
import json
import re
import subprocess
import sys

import pytest
from repository import ROOT


def python(code, *, cwd=None):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=False)


IMPORTS = """
import json, sys, torch
before = set(sys.modules)
import dsv4_compile
first = sorted(set(sys.modules) - before)
op = str(torch.ops.dsv4.forward_mqa.default)
import dsv4_compile.models.deepseek_v4
print(json.dumps([first, op, sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def imported():
    """What importing the package imports, one of its ops then, and all that is imported once the models are too."""
    result = python(IMPORTS)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_importing_stays_cheap(imported):
    heavy = ("sympy", "transformers", "triton", "torch._dynamo", "torch._inductor")
    heavy += ("dsv4_compile.models", "dsv4_compile.runners")
    assert [name for name in imported[0] if name.startswith(heavy)] == []


def test_importing_registers_the_ops(imported):
    assert imported[1] == "dsv4.forward_mqa.default"


def test_models_import_without_transformers(imported):
    assert "dsv4_compile.models.deepseek_v4" in imported[2]
    assert "transformers" not in imported[2]


def test_the_bare_name_of_the_ops_folder_is_refused():
    result = python("import ops", cwd=ROOT)
    assert "import this package as dsv4_compile.ops, not as ops" in result.stderr


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
