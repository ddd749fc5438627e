"""Benchmarks of the whole product: `python -m tests.benchmarks`. Ratios within one run, raw figures beside them."""
