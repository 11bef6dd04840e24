"""Environments, evaluation and buffer warm-up for examples and benchmarks."""
