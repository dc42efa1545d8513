"""Benchmarks: programs to run from the root of the project, for example ``python -m bench.steps``."""
