"""Measurements, run by hand: `python -m benchmarks.train`. Nothing here is a test, and nothing is timed in a test."""
