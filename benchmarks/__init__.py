"""Benchmarks, run by hand: `python -m benchmarks`. Each gives a section with tables of medians and ratios."""
