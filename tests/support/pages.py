"""The pages that a user reads, and the code blocks in them."""

from __future__ import annotations

import re
from pathlib import Path

from repository import ROOT

README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def headings(page: Path) -> list[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)
