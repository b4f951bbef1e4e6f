"""Benchmarks, run by hand; each prints ratios of one run."""
