"""GRPO advantages against the reference system's numbers (float32 there, so 1e-6)."""

from typing import Any

import numpy as np
import pytest

from engines.algorithms.advantages import AdvantageInputs, group_indices, grpo
from engines.algorithms.spec import Grpo
from tests.golden.cases import cases

IN_SCOPE = [case for case in cases("advantage_grpo") if not case["init_args"]["duplicate_experiences"]]
"""Refilling a batch with copies is a matter of the buffer."""


def advantage_inputs(rows: list[Any]) -> AdvantageInputs:
    lengths = np.array([int(mask.sum()) for mask in masks(rows)], np.int64)
    rewards = np.array([row["reward"] for row in rows], np.float64)
    logprobs = [
        np.array(row["logprobs"])[mask] if "logprobs" in row else np.zeros(mask.sum())
        for row, mask in zip(rows, masks(rows), strict=True)
    ]
    return AdvantageInputs(
        token_rewards=np.zeros(lengths.sum()),
        rewards=rewards,
        lengths=lengths,
        groups=group_indices([str(row["task"]) for row in rows]),
        rollout_logprobs=np.concatenate([*logprobs, np.empty(0)]),
    )


def masks(rows: list[Any]) -> list[np.ndarray]:
    return [np.array(row.get("mask", [True] * row.get("rlen", 0))) for row in rows]


@pytest.mark.parametrize("case", IN_SCOPE, ids=[case["name"] for case in IN_SCOPE])
def test_grpo(case: Any) -> None:
    args = {key: value for key, value in case["init_args"].items() if key != "duplicate_experiences"}
    rows = case["inputs"]
    x = advantage_inputs(rows)
    result = grpo(x, Grpo(**args))
    assert result.kept is not None
    order = [int(i) for members in x.groups for i in members if result.kept[i]]
    assert order == case["outputs"]["order"]
    assert len(rows) - len(order) == case["outputs"]["metrics"]["filtered_count"]
    ones = {int(members[0]) for members in x.groups if len(members) == 1}
    for index, expected in zip(order, case["outputs"]["advantages"], strict=True):
        ours = np.zeros(len(masks(rows)[index]))
        ours[masks(rows)[index]] = np.split(result.values, np.cumsum(x.lengths)[:-1])[index]
        if index in ones:
            assert not ours.any()  # difference 6
        elif args["rank_penalty"] is None:
            np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)


def test_rank_penalty_is_penalised_throughout() -> None:
    """Difference 11, derived by hand: group rewards 1, 0.5, 1 with mean logprobs -0.15, -0.5, -2; penalty 0.25.

    Ascending ranks 2, 1, 0 -> 1 - 2/12 = 5/6, 0.5 (1 - 1/12) = 11/24, 1.
    """
    (case,) = (c for c in IN_SCOPE if c["name"] == "interleaved_order/v4")
    x = advantage_inputs(case["inputs"])
    result = grpo(x, Grpo(epsilon=1e-6, rank_penalty=0.25))
    penalised = np.array([5 / 6, 11 / 24, 1.0])
    expected = (penalised - penalised.mean()) / (penalised.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(result.values[x.starts][[0, 2, 4]], expected, rtol=1e-12)
    # mean and std are those of the reference, whose metrics show them
    assert case["outputs"]["metrics"]["group_advantages/reward_mean/max"] == pytest.approx(penalised.mean(), rel=1e-6)
