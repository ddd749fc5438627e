"""GRPO advantages by hand: groups of one, equal rewards, thresholds on whole groups."""

import dataclasses
import math

import numpy as np
import pytest

from engines.advantage_stage import with_advantages
from engines.algorithms.advantages import AdvantageInputs, group_indices, grpo
from engines.algorithms.spec import (
    AdvantageParams,
    Algorithm,
    ClipV,
    Gigpo,
    Grpo,
    Opmd,
    PpoClip,
    Rec,
    Rloo,
    function_of,
)
from engines.algorithms.token_advantages import clip_v
from engines.experience import EID, Experience
from engines.intake import Limits, take_in


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


@pytest.mark.parametrize(
    "params", [Rloo(), Opmd(), Rec(), Rec(std_normalize=True, epsilon=0.0), Gigpo(), Gigpo(fnorm="std", epsilon=0.0)]
)
def test_equal_rewards_give_exactly_zero_without_a_std_too(params: AdvantageParams) -> None:
    """A residue of 1e-10 is a direction for an optimizer that divides by the gradient's size."""
    x = inputs([1e6 / 3] * 7, "a" * 7)
    x = dataclasses.replace(x, eids=[EID(0, 0, run) for run in range(7)], infos=[{}] * 7)
    assert function_of(params)(x, params).values.tolist() == [0.0] * 7


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


def test_dropped_groups_are_made_up_for_by_kept_ones() -> None:
    """a and d are dropped; so two groups, drawn from b and c, train once more, whole."""
    x = inputs([1, 1, 0, 1, 2, 0, 5, 4], "aabbbccd")
    result = grpo(x, Grpo(std_threshold=0.1, duplicate_experiences=True))
    assert result.repeated is not None
    rows = result.repeated.tolist()
    assert rows in [one + other for one in ([2, 3, 4], [5, 6]) for other in ([2, 3, 4], [5, 6])]
    nothing_kept = grpo(inputs([1, 1], "aa"), Grpo(std_threshold=0.1, duplicate_experiences=True))
    assert nothing_kept.repeated is not None
    assert not len(nothing_kept.repeated)


def test_clip_v_caps_negative_tokens_alone_and_drops_none_without_spread() -> None:
    """Shortfalls 0, 4, 3, 2, 5; A: 0.7, -0.7 (3 tokens), 0. Far are 4, 3 and 5; of the negative ones, one may go."""
    x = dataclasses.replace(
        inputs([1, 0, 7], "aab"),
        lengths=np.array([1, 3, 1]),
        old_logprobs=np.zeros(5),
        entropies=np.zeros(5),
        expected_scores=np.array([0.0, 4, 3, 2, 5]),
    )
    result = clip_v(x, ClipV(mu=1.5, max_frac=0.2))
    assert result.kept_tokens is not None
    assert result.kept_tokens.tolist() == [True, False, True, True, False]
    equal = clip_v(dataclasses.replace(x, expected_scores=np.ones(5)), ClipV(mu=1.5, max_frac=0.2))
    assert equal.kept_tokens is not None
    assert equal.kept_tokens.all()


def test_repeated_rows_train_twice() -> None:
    """Through the stage: b is dropped, so a is there twice, with its advantages and its group."""
    algorithm = Algorithm(advantage=Grpo(std_threshold=0.1, duplicate_experiences=True), loss=PpoClip())
    exps = [
        Experience(
            tokens=np.array([1, 2, 3], np.int32),
            prompt_length=1,
            logprobs=np.array([-1.0, -2.0], np.float32),
            reward=reward,
            eid=EID(task=task),
        )
        for task, reward in (("a", 1.0), ("b", 1.0), ("a", 0.0), ("b", 1.0))
    ]
    rows = take_in(exps, algorithm, Limits(vocab_size=8, max_model_len=8)).rows
    trained, _ = with_advantages(rows, algorithm, seed=0)
    assert [eid.task for eid in trained.eids] == ["a"] * 4
    assert len(set(trained.groups)) == 1
    signs = [float(np.sign(values[0])) for values in trained.columns["advantages"]]
    assert signs == [1.0, -1.0, 1.0, -1.0]
