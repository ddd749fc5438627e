"""GRPO advantages by hand: groups of one, equal rewards, thresholds on whole groups."""

import math

import numpy as np
import pytest

from engines.algorithms.advantages import AdvantageInputs, group_indices, grpo
from engines.algorithms.spec import Grpo


def inputs(rewards: list[float], keys: str) -> AdvantageInputs:
    """Rows of one token."""
    values = np.array(rewards, np.float64)
    return AdvantageInputs(values, values, np.ones(len(values), np.int64), group_indices(list(keys)))


def test_two_interleaved_groups_by_hand() -> None:
    """a: 1, 0 -> mean 0.5, std sqrt(0.5). b: 3, 1, 2 -> mean 2, std 1."""
    result = grpo(inputs([1, 3, 0, 1, 2], "ababb"), Grpo(epsilon=1e-4))
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    b = 1 / (1 + 1e-4)
    np.testing.assert_allclose(result.values, [a, b, -a, -b, 0], rtol=1e-12)
    assert result.kept is not None
    assert result.kept.all()
    assert result.stats == {"groups/num_groups": 2, "groups/num_zero_variance": 0, "groups/num_dropped_rows": 0}


@pytest.mark.parametrize("reward", [0.35, 0.1, 1e9, -7.3])
def test_equal_rewards_give_exactly_zero(reward: float) -> None:
    result = grpo(inputs([reward] * 8, "a" * 8), Grpo(epsilon=0.0))
    assert result.values.tolist() == [0.0] * 8
    assert result.stats["groups/num_zero_variance"] == 1


def test_group_of_one_has_no_advantage() -> None:
    assert grpo(inputs([5.0], "a"), Grpo()).values.tolist() == [0.0]


def test_threshold_drops_whole_groups_and_groups_of_one() -> None:
    result = grpo(inputs([1, 1, 0, 1, 5, 0.50, 0.52], "aabbcdd"), Grpo(std_threshold=0.1))
    assert result.kept is not None
    assert result.kept.tolist() == [False, False, True, True, False, False, False]
    assert result.stats == {"groups/num_groups": 4, "groups/num_zero_variance": 2, "groups/num_dropped_rows": 5}


def test_one_success_among_failures_is_kept() -> None:
    result = grpo(inputs([1, 0, 0, 0], "aaaa"), Grpo(std_threshold=0.0, epsilon=0.0))
    assert result.kept is not None
    assert result.kept.all()
    np.testing.assert_allclose(result.values, [1.5, -0.5, -0.5, -0.5])


def test_batch_level_std_with_group_means() -> None:
    rewards = [1.0, 0.0, 10.0, 4.0]
    result = grpo(inputs(rewards, "aabb"), Grpo(std_cal_level="batch", epsilon=0.0))
    std = float(np.std(rewards, ddof=1))
    np.testing.assert_allclose(result.values, [0.5 / std, -0.5 / std, 3 / std, -3 / std])
