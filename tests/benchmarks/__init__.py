"""Benchmarks of the whole product: `python -m tests.benchmarks`. Ratios are taken within one run, figures kept beside them."""
