"""Which rows take part, and rewards by length: decided on whole groups, before anything is computed. Torch-free.

Formulas are cited on the params, in `engines.algorithms.spec.terms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engines.algorithms.advantages import Bools, Float64s, Int64s, sample_std
from engines.algorithms.spec import BestOfGroup, DynamicSampling, OverlongShaping, RewardFilter, RewardStdFilter


@dataclass(frozen=True, slots=True, eq=False)
class FilterInputs:
    """R rows, whole groups."""

    rewards: Float64s
    """[R]."""
    groups: tuple[Int64s, ...]
    """Row indices of each group."""
    metrics: Sequence[Mapping[str, float]]
    """[R] `metrics` of each row."""


def dynamic_sampling(x: FilterInputs, p: DynamicSampling) -> Bools:
    """[R] in a group that is neither all right nor all wrong."""
    right = np.array(
        [
            metrics.get(p.metric_key, reward) > p.correct_threshold
            for metrics, reward in zip(x.metrics, x.rewards, strict=True)
        ],
        np.bool_,
    )
    return _in_groups(x, lambda members: 0 < right[members].sum() < len(members))


def reward_std(x: FilterInputs, p: RewardStdFilter) -> Bools:
    """[R] in a group whose rewards vary enough."""
    return _in_groups(x, lambda members: sample_std(x.rewards[members], ddof=0) > p.threshold)


def reward(x: FilterInputs, p: RewardFilter) -> Bools:
    """[R] with enough reward."""
    return x.rewards >= p.threshold


def best_of_group(x: FilterInputs, p: BestOfGroup) -> Bools:
    """[R] among the best of the group, if there is a difference."""
    kept = np.zeros(len(x.rewards), np.bool_)
    for members in x.groups:
        if len(members) > 1 and sample_std(x.rewards[members]) == 0:
            continue
        best = members[np.argsort(-x.rewards[members], kind="stable")[: p.num_kept]]
        kept[best] = True
    return kept if p.min_reward is None else kept & (x.rewards >= p.min_reward)


def _in_groups(x: FilterInputs, wanted: Callable[[Int64s], bool]) -> Bools:
    kept = np.zeros(len(x.rewards), np.bool_)
    for members in x.groups:
        kept[members] = wanted(members)
    return kept


def overlong(lengths: Int64s, longest: int, p: OverlongShaping) -> Float64s:
    """[R] what is added to the rewards of responses of these lengths, tokens; `longest` is the most allowed."""
    cache = p.cache_share * longest
    excess: Float64s = (lengths.astype(np.float64) - (longest - cache)) / cache
    return -p.penalty * excess.clip(0.0, 1.0)
