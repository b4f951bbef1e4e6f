"""`python -m dsv4_compile`."""

from .inspect.cli import main

raise SystemExit(main())
