"""Benchmark suites: a module per suite, found by its name."""
