"""Filters and overlong shaping, against numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest

from engines.algorithms.advantages import group_indices
from engines.algorithms.filters import FilterInputs, overlong
from engines.algorithms.spec import (
    BestOfGroup,
    DynamicSampling,
    FilterParams,
    OverlongShaping,
    RewardFilter,
    RewardStdFilter,
    function_of,
)

REWARDS = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.25, 0.5, 0.5, 0.7]
GROUPS = "aabbccdddf"
"""Mixed; all right; all wrong; three values, two of them equal; a group of one."""


def kept(params: FilterParams, metrics: list[dict[str, float]] | None = None) -> str:
    """Groups of the rows that are kept, with their position: a0 a1 ..."""
    inputs = FilterInputs(
        np.array(REWARDS), group_indices(list(GROUPS)), metrics or [dict[str, float]() for _ in REWARDS]
    )
    flags = function_of(params)(inputs, params)
    return " ".join(f"{GROUPS[row]}{row}" for row in np.flatnonzero(flags))


@pytest.mark.parametrize(
    ("params", "rows"),
    [
        (DynamicSampling(), "a0 a1"),
        (DynamicSampling(correct_threshold=0.3), "a0 a1 d6 d7 d8"),
        (RewardStdFilter(), "a0 a1 d6 d7 d8"),
        (RewardStdFilter(threshold=0.2), "a0 a1"),
        (RewardFilter(threshold=0.5), "a0 b2 b3 d7 d8 f9"),
        (BestOfGroup(), "a0 d7 f9"),
        (BestOfGroup(num_kept=2), "a0 a1 d7 d8 f9"),
        (BestOfGroup(num_kept=2, min_reward=0.6), "a0 f9"),
    ],
)
def test_a_filter_keeps_these_rows(params: FilterParams, rows: str) -> None:
    assert kept(params) == rows


def test_dynamic_sampling_reads_the_metric_where_there_is_one() -> None:
    metrics: list[Any] = [{"accuracy": 1.0}, {"accuracy": 1.0}, {"accuracy": 0.0}, *({} for _ in REWARDS[3:])]
    assert kept(DynamicSampling(), metrics) == "b2 b3"


@pytest.mark.parametrize(("length", "taken"), [(0, 0.0), (80, 0.0), (85, 0.5), (90, 1.0), (100, 2.0), (130, 2.0)])
def test_overlong_shaping_is_linear_within_the_cache(length: int, taken: float) -> None:
    """The longest is 100, the cache 20, the penalty 2."""
    (less,) = overlong(np.array([length]), 100, OverlongShaping(cache_share=0.2, penalty=2.0))
    assert less == pytest.approx(-taken, abs=1e-12)
