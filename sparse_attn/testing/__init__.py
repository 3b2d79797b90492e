"""Helpers for tests and benchmarks: inputs, poison, comparison, ahead-of-time compilation, timing. Nothing shipped
imports them."""
