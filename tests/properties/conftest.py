"""How deep a property is explored: a few batches, always the same ones; under the mark slow many new ones."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

Explore = Callable[..., Callable[[Callable[..., None]], None]]
PROFILES = {
    "quick": settings(max_examples=2, derandomize=True, database=None, deadline=None, phases=[Phase.generate]),
    "deep": settings(
        max_examples=30,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors here are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["quick", pytest.param("deep", marks=pytest.mark.slow)])
def explore(request: pytest.FixtureRequest) -> Explore:
    """`@explore(strategy, ...)` runs the function below it on what the strategies draw, at once.

    quick: the simplest batch and one more, which differs from algorithm to algorithm and never from run to run.
    """
    profile = PROFILES[request.param]
    fixed = seed(zlib.crc32(request.node.name.encode())) if profile.derandomize else lambda test: test

    def with_strategies(*strategies: SearchStrategy[Any]) -> Callable[[Callable[..., None]], None]:
        return lambda holds: profile(fixed(given(*strategies)(holds)))()

    return with_strategies
