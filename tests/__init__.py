"""Tests of trinity-flows. A package, so that `python -m tests.benchmarks` and shared fakes can be imported."""
