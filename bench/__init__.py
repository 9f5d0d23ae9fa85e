"""Benchmarks: measured on a machine, not part of the tests."""
