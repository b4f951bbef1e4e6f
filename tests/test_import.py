"""What `import dsv4_compile` does not do: import transformers, Dynamo or Inductor, or run twice under another name."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


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
