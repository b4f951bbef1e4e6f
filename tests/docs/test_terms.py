"""One word for one thing: the terms of this field, and none of those that they took the place of."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

# what no text of this repository says, and what it says in its place
TERMS = {
    r"\w*(?<![a-z])[Ll]anes?(?![a-z])\w*": "stream",
    r"\bDraft\b": "TracedGraph, PartitionedGraph",
    r"\bdraft_graph\b": "trace_graph",
    r"\w*stand_ins?\b|\bStandIns\b": "fake inputs",
    r"\bcopy_of\b|\bfind_copies\b": "duplicate_of, find_duplicates",
    r"\b[Tt]win(s|ned)?\b": "out variant; meta tensor",
    r"\banchors?\b": "parameter addresses",
    r"\b[Ee]pilogue\b": "output assembly",
    r"\b[Bb]reakages?\b": "mutation",
    r"\bstays? put\b": "static",
    r"\breads? (a value )?back to the host\b": "device-to-host sync",
    r"\bread off data\b": "data-dependent",
    r"\bworking[_ ]nodes?\b|\bfree nodes?\b|\bis_free\b": "compute node, view node",
    r"\bwritten[_ ]back\b|\bWRITTEN_BACK\b": "copied out",
    r"\bwhy_no_graph_holds\b": "cudagraph_unsafe_reason",
    r"\bstep_back\b|\b_step_back\b": "fall back",
    r"\bcounted\(\d": "pluralize",
    r"\bwhole number\b": "integer",
    r"\b_why_(tied|lazy|entangled|layered|useless|outside)\b": "a reason with its subject",
    r"\b(Host|Cuda)?Recording\b": "CapturedGraph, LaunchRecord",
}
# Modules of the standard library or of others, and words of another meaning.
ALLOWED = {"tests/docs/test_terms.py"}


def tracked() -> Iterator[Path]:
    """Every text file that is committed, or would be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split() or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.*")]
    for name in names:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".j2"} and path.is_file() and not path.is_symlink():
            yield path


FILES = sorted(path for path in tracked() if str(path.relative_to(ROOT)) not in ALLOWED)


@pytest.mark.parametrize(("old", "new"), TERMS.items(), ids=TERMS.values())
def test_old_terms_are_gone(old: str, new: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}: say {new}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(old, line)
    ]
    assert found == []


def test_one_class_name_means_one_thing() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path in FILES:
        name = str(path.relative_to(ROOT))
        if path.suffix == ".py" and name.startswith(("dsv4_compile", "passes", "ops")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(name)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
