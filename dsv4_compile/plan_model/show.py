"""A `ModelPlan` as text and as one HTML page, which loads nothing from elsewhere."""

from __future__ import annotations

import textwrap
from pathlib import Path

from ..errors import ExplainError
from ..inspect.report.page import template_environment
from .figures import ModelPlan
from .tables import headline, tables_of

WIDTH = 118


def plan_text(plan: ModelPlan, heading: str = "") -> str:
    """What the command prints.

    Args:
        plan: what is shown.
        heading: stands before each title: "### " on a page of the docs.
    """
    parts = [textwrap.fill(headline(plan), WIDTH), *(textwrap.fill(f"note: {note}", WIDTH) for note in plan.notes)]
    for table in tables_of(plan):
        parts += [f"{heading}{table.title}", textwrap.fill(table.said, WIDTH), str(table)]
    return "\n\n".join(parts)


def plan_page(plan: ModelPlan) -> str:
    """The page."""
    room = plan.room
    shares = (
        ("weights", room.weights),
        ("buffers", room.buffers),
        ("workspace", room.workspace),
        ("eager ops", room.eager),
        ("captured (estimate)", room.captured),
        ("left for caches", max(room.left, 0)),
    )
    template = template_environment().get_template("model_plan.html.j2")
    whole = max(room.memory, sum(nbytes for _, nbytes in shares))
    return template.render(plan=plan, headline=headline(plan), tables=tables_of(plan), shares=shares, whole=whole)


def write_plan_page(plan: ModelPlan, output: Path) -> None:
    """Write the page.

    Raises:
        ExplainError: the file cannot be written.
    """
    try:
        output.write_text(plan_page(plan), encoding="utf-8")
    except OSError as error:
        raise ExplainError(
            f"cannot write {str(output)!r}: {error.strerror}; give another file with --output"
        ) from error
