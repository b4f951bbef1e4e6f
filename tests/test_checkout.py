"""A checkout that is on the path, and not installed: importing it is enough to use it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from repository import ROOT

import dsv4_compile
from dsv4_compile.inspect import doctor

USE = """
compiled = torch.compile(lambda x: x * 2, backend="dsv4_piecewise")
assert [compiled(torch.ones(3)).tolist() for _ in range(3)] == [[2.0, 2.0, 2.0]] * 3
assert "dsv4_piecewise" in torch._dynamo.list_backends()
assert dsv4_compile.counters.replays == 2
"""
ORDERS = {
    "Dynamo later": "import torch, dsv4_compile",
    "Dynamo before": "import torch; import torch._dynamo; import dsv4_compile",
    "Dynamo has listed what it knows": "import torch; torch._dynamo.list_backends(); import dsv4_compile",
    "a name was looked up before": (
        "import torch; torch.compile(torch.sin, backend='aot_eager')(torch.ones(2)); import dsv4_compile"
    ),
    "imported twice": (
        "import sys, torch, dsv4_compile\n"
        "for name in [name for name in sys.modules if name == 'dsv4_compile']: del sys.modules[name]\n"
        "import dsv4_compile"
    ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A path with this folder on it, and all packages that are installed but this one."""
    packages = Path(sysconfig.get_paths()["purelib"])
    folder = tmp_path_factory.mktemp("packages")
    for entry in packages.iterdir():
        if "dsv4" not in entry.name and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return os.pathsep.join([str(ROOT), str(folder)])


def python(code: str, path: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Python without what `site` would add; its warnings are errors of the test."""
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, check=False
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("order", ORDERS)
def test_importing_it_makes_the_backend_known(order: str, path: str, tmp_path: Path) -> None:
    result = python(f"{ORDERS[order]}\n{USE}", path, tmp_path)
    assert result.returncode == 0, result.stderr


def test_importing_it_imports_no_dynamo_and_leaves_nothing_behind(path: str, tmp_path: Path) -> None:
    code = (
        "import sys, torch; before = list(sys.meta_path); import dsv4_compile;"
        "assert 'torch._dynamo' not in sys.modules; import torch._dynamo.backends.registry as registry;"
        "assert sys.meta_path == before; assert 'AddsName' not in type(registry.__loader__).__name__;"
        "assert 'dsv4_compile.backend' not in sys.modules"
    )
    result = python(code, path, tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.exhaustive
def test_the_doctor_says_that_it_is_not_installed(path: str, tmp_path: Path) -> None:
    code = "import sys; from dsv4_compile.inspect.cli import main; sys.exit(main(['doctor']))"
    result = python(code, path, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"dsv4_compile  {dsv4_compile.__version__}\n" in result.stdout
    assert "entry point   not installed: import dsv4_compile before torch.compile(" in result.stdout


def test_versions_of_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    assert doctor.version_of("dsv4-compile") == dsv4_compile.__version__
    assert doctor.version_of("transformers") == "not installed"
    assert doctor.missing_entry_point() is None


def test_the_version_is_that_of_the_project() -> None:
    assert f'version = "{dsv4_compile.__version__}"' in (ROOT / "pyproject.toml").read_text()
