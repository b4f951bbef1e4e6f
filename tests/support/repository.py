"""Where the files of this repository are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SUPPORT = ROOT / "tests" / "support"
