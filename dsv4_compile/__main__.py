"""`python -m dsv4_compile`."""

from .inspect.cli import main
from .plan_model.command import add_plan_command

raise SystemExit(main(more=[add_plan_command]))
