"""What each built-in operator does with scored experiences.

Owns: one function for each class of parameters, and which is whose. Does not own: parameters
(`trinity_tasks.operator_params`), the order of operators and the account of what they drop (`trinity_tasks.operators`).
Operators own the rows that they get: they change rewards and masks in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from engines.algorithms.advantages import sample_std
from engines.errors import DataError
from engines.experience import Experience
from engines.intake import reward_of
from trinity_tasks.operator_params import (
    Deduplicate,
    DynamicSampling,
    InvalidRewardFilter,
    MaskResponseTruncated,
    OperatorParams,
    PassRateCalculator,
    RewardFilter,
    RewardShapingMapper,
    RewardStdFilter,
    ShapingConfig,
)


@dataclass(slots=True)
class Outcome:
    """What one operator did with rows 0 to R - 1."""

    drops: dict[int, str] = field(default_factory=dict[int, str])
    """Row that goes -> the reason."""
    measured: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics, by their names within the operator's."""
    pass_rates: dict[int, float] = field(default_factory=dict[int, float])
    """Task index -> mean reward."""


def reward_filter(rows: list[Experience], p: RewardFilter) -> Outcome:
    """Rows with enough reward stay."""
    scores, drops = _judged(map(reward_of, rows))
    drops |= {row: f"reward is below {p.threshold:g}" for row, score in scores.items() if score < p.threshold}
    return Outcome(drops)


def invalid_reward_filter(rows: list[Experience], p: InvalidRewardFilter) -> Outcome:
    """Rows with a finite reward stay."""
    return Outcome(_judged(map(reward_of, rows))[1])


def reward_std_filter(rows: list[Experience], p: RewardStdFilter) -> Outcome:
    """Groups whose rewards vary enough stay."""
    scores, drops = _judged(map(reward_of, rows))
    means, stds = list[float](), list[float]()
    for members in _groups(rows, scores):
        if len(members) < 2:
            drops[members[0]] = "group of one"
            continue
        rewards = np.array([scores[row] for row in members], np.float64)
        means.append(float(rewards.mean()))
        stds.append(sample_std(rewards, ddof=0))
        if stds[-1] <= p.threshold:
            drops |= dict.fromkeys(members, f"std of the group's rewards is not above {p.threshold:g}")
    return Outcome(drops, _spread("group_reward_mean", means) | _spread("group_reward_std", stds))


def dynamic_sampling(rows: list[Experience], p: DynamicSampling) -> Outcome:
    """Groups that are neither all right nor all wrong stay."""
    scores, drops = _judged(row.metrics.get(p.metric_key, reward_of(row)) for row in rows)
    counts = {"all right": 0, "all wrong": 0, "group of one": 0}
    for members in _groups(rows, scores):
        num_right = sum(scores[row] > p.correct_threshold for row in members)
        if 0 < num_right < len(members):
            continue
        reason = "group of one" if len(members) == 1 else "all right" if num_right else "all wrong"
        counts[reason] += len(members)
        drops |= dict.fromkeys(members, reason)
    return Outcome(drops, {f"num_{reason.replace(' ', '_')}": float(count) for reason, count in counts.items()})


def mask_response_truncated(rows: list[Experience], p: MaskResponseTruncated) -> Outcome:
    """No token of a response that was cut trains. Each row gets a mask of its own."""
    num_masked = 0
    for row in rows:
        if row.truncate_status == "response_truncated" and row.action_mask is not None:
            row.action_mask = np.zeros(len(row.action_mask), np.bool_)
            num_masked += 1
    return Outcome(measured={"num_masked": float(num_masked)})


_OPERATIONS: Final[dict[str, Callable[[float, float], float]]] = {
    "ADD": lambda reward, operand: reward + operand,
    "SUB": lambda reward, operand: reward - operand,
    "MUL": lambda reward, operand: reward * operand,
    "DIV": lambda reward, operand: reward / operand,
}


def reward_shaping_mapper(rows: list[Experience], p: RewardShapingMapper) -> Outcome:
    """Rewards changed by what stands in `info`.

    num_skipped counts changes that a row did not get. Raises DataError for a value that is no finite number, a reward
    that would not be one, and a row with rewards of tokens: those win over the one that would be changed.
    """
    differences, num_skipped = list[float](), 0
    for row in rows:
        if row.token_level_reward is not None:
            raise _unusable(row, "it has token_level_reward, which wins over reward; leave one of the two out")
        if row.reward is None or not math.isfinite(row.reward):
            continue
        reward = float(row.reward)
        for change in p.reward_shaping_configs:
            operand = _operand(row, change)
            if operand is None:
                num_skipped += 1
            else:
                reward = _OPERATIONS[change.op_type](reward, operand)
        if not math.isfinite(reward):
            raise _unusable(row, f"its reward of {row.reward} would become {reward}; lower the weight")
        differences.append(reward - row.reward)
        row.reward = reward
    counts = {"num_unscored": float(len(rows) - len(differences)), "num_skipped": float(num_skipped)}
    return Outcome(measured=counts | _spread("reward_diff", differences))


def _operand(row: Experience, change: ShapingConfig) -> float | None:
    """weight * info[stats_key]; None if that is missing, or would divide by 0. Raises DataError if it is no number."""
    value: object = row.info.get(change.stats_key)
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise _unusable(row, f"info[{change.stats_key!r}] is {value!r}; it must be a finite number, or missing")
    operand = change.weight * value
    return None if change.op_type == "DIV" and operand == 0 else operand


def _unusable(row: Experience, fault: str) -> DataError:
    return DataError(f"operator reward_shaping_mapper, experience {row.eid.uid}: {fault}")


def pass_rate_calculator(rows: list[Experience], p: PassRateCalculator) -> Outcome:
    """The mean reward of each task. Drops nothing.

    Shares are of the tasks: valid is between 0 and 1, strictly valid between 1/16 and 15/16. Raises DataError for a
    scored row without the number of its task.
    """
    scores, unscored = _judged(map(reward_of, rows))
    rewards: dict[int, list[float]] = {}
    for row, score in scores.items():
        rewards.setdefault(_task_index(rows[row]), []).append(score)
    pass_rates = {task: float(np.mean(values)) for task, values in rewards.items()}
    measured = {"num_unscored": float(len(unscored))}
    if pass_rates:
        rates = np.array(list(pass_rates.values()))
        flags = {
            "valid_share": (rates > 0) & (rates < 1),
            "strictly_valid_share": (rates > 1 / 16) & (rates < 15 / 16),
            "below_1_share": rates < 1,
            "above_0_share": rates > 0,
            "below_15_16_share": rates < 15 / 16,
            "above_1_16_share": rates > 1 / 16,
        }
        measured |= {name: float(flag.mean()) for name, flag in flags.items()}
    return Outcome(measured=measured, pass_rates=pass_rates)


def _task_index(row: Experience) -> int:
    index: object = row.info.get("task_index")
    if not isinstance(index, int) or isinstance(index, bool):
        raise DataError(
            f"operator pass_rate_calculator, experience {row.eid.uid}: info['task_index'] is {index!r}; it must be the "
            "number of the task, so that the selector can be told its pass rate"
        )
    return index


def deduplicate(rows: list[Experience], p: Deduplicate) -> Outcome:
    """The first of equal rows stays."""
    seen: set[tuple[str | int | bytes, ...]] = set()
    drops: dict[int, str] = {}
    for index, row in enumerate(rows):
        group = row.eid.tid if p.within == "group" else ""
        pair = (b"" if response is None else response.tobytes() for response in (row.chosen, row.rejected))
        key = (group, row.prompt_length, row.tokens.tobytes(), *pair)
        if key in seen:
            drops[index] = "same tokens as an earlier row"
        seen.add(key)
    return Outcome(drops)


OPERATORS: Final[dict[type[OperatorParams], Callable[[list[Experience], Any], Outcome]]] = {
    RewardFilter: reward_filter,
    InvalidRewardFilter: invalid_reward_filter,
    RewardStdFilter: reward_std_filter,
    DynamicSampling: dynamic_sampling,
    MaskResponseTruncated: mask_response_truncated,
    RewardShapingMapper: reward_shaping_mapper,
    PassRateCalculator: pass_rate_calculator,
    Deduplicate: deduplicate,
}
"""Parameters -> the function that takes (rows, these parameters). It may change rows, but not the list."""


def _judged(scores: Iterable[float | None]) -> tuple[dict[int, float], dict[int, str]]:
    """Row -> score of those that have a finite one, and row -> reason of the others."""
    judged, others = dict[int, float](), dict[int, str]()
    for row, score in enumerate(scores):
        if score is None:
            others[row] = "unscored"
        elif not math.isfinite(score):
            others[row] = "score is not finite"
        else:
            judged[row] = score
    return judged, others


def _groups(rows: Sequence[Experience], chosen: Iterable[int]) -> Iterator[list[int]]:
    """The chosen rows of each task."""
    groups: dict[str, list[int]] = {}
    for row in chosen:
        groups.setdefault(rows[row].eid.tid, []).append(row)
    yield from groups.values()


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, least and greatest, if there are any."""
    if not values:
        return {}
    return {f"{name}_mean": float(np.mean(values)), f"{name}_min": min(values), f"{name}_max": max(values)}
