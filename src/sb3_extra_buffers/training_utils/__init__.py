"""Environments, evaluation and warm-up: what examples and benchmarks share."""
