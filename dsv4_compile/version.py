"""The version, as pyproject.toml has it; what is installed tells its own, a checkout on the path has no other."""

__version__ = "0.1.0"
