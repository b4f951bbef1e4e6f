"""The rooms of the package have walls: a file imports only from its own room and those below (docs/structure.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

# From the top floor down; rooms on one floor do not import each other. A room is a folder or a file; the longest name
# that a module begins with is its room.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("dsv4_compile", "dsv4_compile.__main__", "dsv4_compile.integrations.vllm"),
    ("dsv4_compile.backend", "dsv4_compile.plan_model"),
    ("dsv4_compile.inspect", "dsv4_compile.runtime"),
    ("dsv4_compile.runtime.program",),
    ("dsv4_compile.runtime.pieces",),
    ("dsv4_compile.runtime.memory",),
    ("dsv4_compile.runtime.engines",),
    ("dsv4_compile.runtime.engines.cuda", "dsv4_compile.runtime.engines.host"),
    ("dsv4_compile.runtime.engines.base", "dsv4_compile.runtime.engines.user_line"),
    ("dsv4_compile.runtime.engines.capture_state",),
    ("dsv4_compile.plan_graph", "dsv4_compile.piece_compilers"),
    ("dsv4_compile.passes",),
    ("dsv4_compile.analysis",),
    ("dsv4_compile.graph",),
    ("dsv4_compile.config",),
    ("dsv4_compile.integrations",),
    ("dsv4_compile.runners",),
    ("dsv4_compile.models",),
    ("dsv4_compile.ops",),
    ("dsv4_compile.decode",),
    ("dsv4_compile.compat",),
    (
        "dsv4_compile.errors",
        "dsv4_compile.log",
        "dsv4_compile.counting",
        "dsv4_compile.memory_pool",
        "dsv4_compile.version",
    ),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Public names that a user of the package may import lazily; they are users of it and not a part.
USERS = ("dsv4_compile.integrations", "dsv4_compile.runners", "dsv4_compile.models")
# A command about models of this package: a user too, which the command line alone imports.
PLAN_COMMAND = "dsv4_compile.plan_model"


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; `passes` and `ops` lie beside the package."""
    found = {}
    for folder, prefix in (("dsv4_compile", ()), ("passes", ("dsv4_compile",)), ("ops", ("dsv4_compile",))):
        for path in (ROOT / folder).rglob("*.py"):
            parts = (*prefix, *path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports_of(module: str, *, for_types: bool = True) -> Iterator[tuple[str, int]]:
    """The modules of the package that a module imports, anywhere in its text, with the line.

    Args:
        module: its dotted name.
        for_types: those under `if TYPE_CHECKING` too, which nothing runs.
    """
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not for_types:
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                if name in MODULES or base in MODULES:
                    yield (name if name in MODULES else base), node.lineno
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in MODULES)


def room_of(module: str) -> str:
    """The room that a module is in."""
    while module not in FLOOR_OF:
        module = module.rpartition(".")[0]
    return module


def wrong_arrows() -> Iterator[str]:
    """Imports that run up, or sideways into another room, with the file, the import and the two floors."""
    for module, path in sorted(MODULES.items()):
        here = room_of(module)
        for target, line in imports_of(module):
            there = room_of(target)
            if there != here and FLOOR_OF[there] <= FLOOR_OF[here]:
                place = f"{path.relative_to(ROOT)}:{line}"
                yield f"{place} ({here}, floor {FLOOR_OF[here]}) imports {target} ({there}, floor {FLOOR_OF[there]})"


def test_every_import_runs_down() -> None:
    assert list(wrong_arrows()) == []


def test_an_arrow_that_runs_up_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = ROOT / "dsv4_compile" / "analysis" / "made_up.py"
    monkeypatch.setitem(MODULES, "dsv4_compile.analysis.made_up", path)
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "from ..runtime import captured" if self == path else "")
    assert list(wrong_arrows()) == [
        "dsv4_compile/analysis/made_up.py:1 (dsv4_compile.analysis, floor 12) imports dsv4_compile.runtime.captured "
        "(dsv4_compile.runtime, floor 2)"
    ]


def test_no_file_imports_itself_through_others() -> None:
    edges = {module: {target for target, _ in imports_of(module, for_types=False)} - {module} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for target in sorted(edges[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in sorted(MODULES):
        visit(module, ())


def test_the_compiler_imports_none_of_its_users() -> None:
    found = [
        f"{module} imports {target}"
        for module in MODULES
        if not module.startswith((*USERS, PLAN_COMMAND))
        for target, _ in imports_of(module)
        if target.startswith(USERS)
    ]
    assert found == []
    importers = {module for module in MODULES for target, _ in imports_of(module) if target.startswith(PLAN_COMMAND)}
    assert {module for module in importers if not module.startswith(PLAN_COMMAND)} == {"dsv4_compile.__main__"}


def test_models_need_no_compiler() -> None:
    allowed = ("dsv4_compile.models", "dsv4_compile.ops", "dsv4_compile.errors", "dsv4_compile.compat")
    found = {
        target
        for module in MODULES
        if module.startswith("dsv4_compile.models")
        for target, _ in imports_of(module)
        if not target.startswith(allowed)
    }
    assert found == set()


def test_the_page_names_every_room() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    rooms = [room.removeprefix("dsv4_compile.").replace(".", "/") for room in FLOOR_OF if room != "dsv4_compile"]
    missing = [
        room for room in rooms if f"`{room}`" not in page and f"`{room}/`" not in page and f"`{room}.py`" not in page
    ]
    assert missing == []
