"""Advantages, on the host in float64, over whole groups and before a batch is cut. Torch-free.

A function gives one number or one array per row; the engine spreads a number over the action tokens of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engines.algorithms.spec import Grpo

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class AdvantageInputs:
    """R rows of a train step."""

    rewards: Float64s
    """[R] finite."""
    groups: tuple[npt.NDArray[np.int64], ...]
    """Row indices of each group, in order of first appearance."""
    mean_logprobs: Float64s | None = None
    """[R] mean sampler logprob over the action tokens; there if every row has logprobs."""


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """What the loss gets, and which rows it gets."""

    values: Float64s
    """[R] advantage of every action token of the row."""
    kept: npt.NDArray[np.bool_]
    """[R] False: the row takes no part in the step, denominators included."""
    stats: dict[str, float] = field(default_factory=dict[str, float])
    """Metric key -> number over the whole batch."""


def group_indices(keys: Sequence[str]) -> tuple[npt.NDArray[np.int64], ...]:
    """Row indices of equal keys, groups in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return tuple(np.array(members, np.int64) for members in groups.values())


def grpo(x: AdvantageInputs, p: Grpo) -> Advantages:
    """[R] rewards normalised within the group; see `Grpo`.

    Raises ValueError if the rank penalty is asked for and logprobs are missing.
    """
    rewards = x.rewards if p.rank_penalty is None else _rank_penalised(x, p.rank_penalty)
    batch_std = sample_std(rewards)
    values, kept = np.zeros(len(rewards)), np.ones(len(rewards), np.bool_)
    zero_variance = 0
    for members in x.groups:
        group = rewards[members]
        std = sample_std(group)
        zero_variance += std == 0
        if p.std_threshold is not None and std <= p.std_threshold:
            kept[members] = False
        if std > 0:
            scale = batch_std if p.std_cal_level == "batch" else std
            values[members] = (group - group.mean()) / (scale + p.epsilon)
    stats = {
        "groups/num_groups": float(len(x.groups)),
        "groups/num_zero_variance": float(zero_variance),
        "groups/num_dropped_rows": float(len(kept) - kept.sum()),
    }
    return Advantages(values, kept, stats)


def sample_std(values: Float64s) -> float:
    """Standard deviation, ddof 1; exactly 0 for one value and for equal ones (their rounded mean may differ)."""
    if len(values) < 2 or values.min() == values.max():
        return 0.0
    return float(values.std(ddof=1))


def _rank_penalised(x: AdvantageInputs, penalty: float) -> Float64s:
    """[R] rewards times 1 - rank / n * penalty, rank 0 for the least likely sample of the group."""
    if x.mean_logprobs is None:
        raise ValueError("advantage_fn_args.rank_penalty needs sampler logprobs on every row")
    rewards = x.rewards.copy()
    for members in x.groups:
        ranks = np.empty(len(members))
        ranks[np.argsort(x.mean_logprobs[members], kind="stable")] = np.arange(len(members))
        rewards[members] *= 1 - ranks / len(members) * penalty
    return rewards
