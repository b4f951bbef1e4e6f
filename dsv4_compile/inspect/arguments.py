"""`argparse` for our commands, examples and benchmarks: a wrong command line gets one line, and exit code 2."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong and leaves the usage to `--help`; subcommands inherit it.

    Args:
        description: its first line is shown; a module's docstring will do.
        settings: as for `ArgumentParser`.
    """

    def __init__(self, *, description: str | None = None, **settings: Any) -> None:
        super().__init__(description=(description or "").partition("\n")[0], **settings)

    def error(self, message: str) -> NoReturn:
        """End the program with "error: " and the message on standard error."""
        self.exit(2, f"error: {message}\n")
