"""Benchmarks: every claim as a command that measures it."""
