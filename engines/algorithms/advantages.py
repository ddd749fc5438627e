"""Advantages with one number per row, on the host in float64, over whole groups and before a batch is cut. Torch-free.

Owns: what every advantage function is given and gives back. Formulas are cited on the params, in
`engines.algorithms.spec.advantages`. Advantages that differ from token to token: `engines.algorithms.token_advantages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.algorithms.spec import Asymre, Gigpo, Grpo, Opmd, Rec, Reinforce, Rloo, StepWiseGrpo
from engines.experience import EID

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class AdvantageInputs:
    """R rows of a train step with N action tokens, row after row. Optional fields are there if they are needed."""

    token_rewards: Float64s
    """[N] finite; the reward of a sequence lies on its last action token."""
    rewards: Float64s
    """[R] sums of the token rewards. A row without action tokens has one all the same."""
    lengths: Int64s
    """[R] action tokens of each row, 0 for one that does not train."""
    groups: tuple[Int64s, ...]
    """Row indices of each group (rows of one `eid.tid`), in order of first appearance."""
    eids: Sequence[EID] = ()
    """[R] identities, for advantages over runs and steps."""
    infos: Sequence[Mapping[str, Any]] = ()
    """[R] `info` of each row."""
    rollout_logprobs: Float64s | None = None
    """[N] of the sampler."""
    old_logprobs: Float64s | None = None
    """[N] of the policy before the step."""
    teacher_logprobs: Float64s | None = None
    """[N]."""
    values: Float64s | None = None
    """[N] of the critic, of the state before each token."""
    bootstrap: Float64s | None = None
    """[R] the critic's value after the last token, 0 where the response ended by itself."""
    entropies: Float64s | None = None
    """[N] nats, of the distribution that each token was drawn from."""
    expected_scores: Float64s | None = None
    """[N] sum over the vocabulary of p^2 (H + log p), of the same distributions."""
    seed: int = 0
    """For what is drawn at random; equal for equal steps of equal jobs."""

    @property
    def starts(self) -> Int64s:
        """[R] index of each row's first token."""
        return np.cumsum(self.lengths) - self.lengths

    def spread(self, per_row: Float64s) -> Float64s:
        """[R] -> [N] the row's number on each of its tokens."""
        return np.repeat(per_row, self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """What the loss gets, and which rows and tokens it gets."""

    values: Float64s
    """[N]."""
    kept: Bools | None = None
    """[R] False: the row takes no part in the step, denominators included. None: all do."""
    kept_tokens: Bools | None = None
    """[N] False: the token takes no part. None: all do."""
    repeated: Int64s | None = None
    """[C] rows that take part once more. None: none do."""
    returns: Float64s | None = None
    """[N] what the critic learns."""
    stats: dict[str, float] = field(default_factory=dict[str, float])
    """Metric key -> number over the whole batch."""


def group_indices(keys: Sequence[str]) -> tuple[Int64s, ...]:
    """Row indices of equal keys, groups in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return tuple(np.array(members, np.int64) for members in groups.values())


def sample_std(values: Float64s, ddof: int = 1) -> float:
    """Standard deviation; exactly 0 for one value and for equal ones (their rounded mean may differ)."""
    if len(values) < 2 or values.min() == values.max():
        return 0.0
    return float(values.std(ddof=ddof))


def centred(values: Float64s, std: float | None = None, epsilon: float = 0.0) -> Float64s:
    """Values less their mean, over std + epsilon if a std is given; exactly 0 for one value and for equal ones.

    A residue of rounding would otherwise be a direction, which Adam follows at full speed.
    """
    if len(values) < 2 or values.min() == values.max():
        return np.zeros(len(values))
    return (values - values.mean()) / (1.0 if std is None else std + epsilon)


def group_stats(x: AdvantageInputs) -> dict[str, float]:
    """How many groups there are, and how many have nothing to compare."""
    return {
        "groups/num_groups": float(len(x.groups)),
        "groups/num_zero_variance": float(sum(sample_std(x.rewards[members]) == 0 for members in x.groups)),
    }


def grpo(x: AdvantageInputs, p: Grpo) -> Advantages:
    """Rewards normalised within the group; see `Grpo`."""
    rewards = x.rewards if p.rank_penalty is None else _rank_penalised(x, p.rank_penalty)
    values, kept = normalised(rewards, x.groups, p.epsilon, p.std_threshold, p.std_cal_level, p.normalize)
    stats = group_stats(x) | {"groups/num_dropped_rows": float(len(kept) - kept.sum())}
    repeated = _in_place_of_dropped(x, kept) if p.duplicate_experiences else None
    return Advantages(x.spread(values), kept, repeated=repeated, stats=stats)


def _in_place_of_dropped(x: AdvantageInputs, kept: Bools) -> Int64s:
    """[C] rows of as many kept groups as were dropped, drawn with replacement; none if none was kept."""
    survivors = [members for members in x.groups if kept[members].all()]
    num_dropped = len(x.groups) - len(survivors) if survivors else 0
    drawn = np.random.default_rng(x.seed).integers(len(survivors), size=num_dropped) if num_dropped else []
    return np.concatenate([*(survivors[index] for index in drawn), np.empty(0, np.int64)])


def normalised(
    rewards: Float64s,
    groups: Sequence[Int64s],
    epsilon: float,
    std_threshold: float | None = None,
    std_cal_level: str = "group",
    normalize: bool = True,
) -> tuple[Float64s, Bools]:
    """[R] (R - mean) / (std + epsilon) over each group, 0 where its std is 0, and [R] whether its std is enough."""
    batch_std = sample_std(rewards)
    values, kept = np.zeros(len(rewards)), np.ones(len(rewards), np.bool_)
    for members in groups:
        group = rewards[members]
        std = sample_std(group)
        if std_threshold is not None and std <= std_threshold:
            kept[members] = False
        scale = batch_std if std_cal_level == "batch" else std
        values[members] = centred(group, scale if normalize else None, epsilon)
    return values, kept


def _rank_penalised(x: AdvantageInputs, penalty: float) -> Float64s:
    """[R] rewards times 1 - rank / n * penalty, rank 0 for the least likely sample of the group."""
    assert x.rollout_logprobs is not None
    sums = np.add.reduceat(np.append(x.rollout_logprobs, 0.0), x.starts) * (x.lengths > 0)
    means = sums / np.maximum(x.lengths, 1)
    rewards = x.rewards.copy()
    for members in x.groups:
        ranks = np.empty(len(members))
        ranks[np.argsort(means[members], kind="stable")] = np.arange(len(members))
        rewards[members] *= 1 - ranks / len(members) * penalty
    return rewards


def reinforce(x: AdvantageInputs, p: Reinforce) -> Advantages:
    """The reward itself; see `Reinforce`."""
    del p
    return Advantages(x.spread(x.rewards), stats=group_stats(x))


def _by_group(x: AdvantageInputs, advantage: Callable[[Float64s], Float64s]) -> Advantages:
    """`advantage` of the rewards of each group; 0 for a group of one."""
    values = np.zeros(len(x.rewards))
    for members in x.groups:
        if len(members) > 1:
            values[members] = advantage(x.rewards[members])
    return Advantages(x.spread(values), stats=group_stats(x))


def rloo(x: AdvantageInputs, p: Rloo) -> Advantages:
    """Rewards less the mean of the others, which is n / (n - 1) times the distance from the mean of all; see `Rloo`."""
    del p
    return _by_group(x, lambda group: centred(group) * len(group) / (len(group) - 1))


def opmd(x: AdvantageInputs, p: Opmd) -> Advantages:
    """Rewards less the group's mean, or less its log-average-exp; see `Opmd`."""
    if p.opmd_baseline == "mean":
        return _by_group(x, centred)
    return _by_group(x, lambda group: group - _log_average_exp(group, p.tau))


def _log_average_exp(values: Float64s, tau: float) -> float:
    highest = float(values.max())
    return highest + tau * float(np.log(np.exp((values - highest) / tau).mean()))


def asymre(x: AdvantageInputs, p: Asymre) -> Advantages:
    """Rewards less the shifted mean; see `Asymre`."""
    return _by_group(x, lambda group: centred(group) - p.baseline_shift)


def rec(x: AdvantageInputs, p: Rec) -> Advantages:
    """Rewards less the mean of the rows that are not set aside; see `Rec`."""
    random = np.random.default_rng(x.seed)
    values, num_dropped = np.zeros(len(x.rewards)), 0
    for members in x.groups:
        if len(members) < 2:
            continue
        if p.drop == "balance":
            balanced = _balanced(x.rewards[members], random)
            num_dropped += len(members) - len(balanced)
            members = members[balanced]
        group = x.rewards[members]
        values[members] = centred(group, sample_std(group, ddof=0) if p.std_normalize else None, p.epsilon)
    stats = group_stats(x) | {"groups/num_set_aside": float(num_dropped)}
    return Advantages(x.spread(values), stats=stats)


def _balanced(rewards: Float64s, random: np.random.Generator) -> Int64s:
    """Indices in order, without surplus ones below the mean."""
    below = np.flatnonzero(rewards < rewards.mean())
    surplus = 2 * len(below) - len(rewards)
    dropped = random.choice(below, surplus, replace=False) if surplus > 0 else []
    return np.setdiff1d(np.arange(len(rewards)), dropped)


def _runs(x: AdvantageInputs) -> dict[str, list[int]]:
    """Row indices of each run (`eid.rid`), by ascending step."""
    runs: dict[str, list[int]] = {}
    for index, eid in enumerate(x.eids):
        runs.setdefault(eid.rid, []).append(index)
    return {rid: sorted(rows, key=lambda row: x.eids[row].step) for rid, rows in runs.items()}


def step_wise_grpo(x: AdvantageInputs, p: StepWiseGrpo) -> Advantages:
    """GRPO on the last step of each run, for all of its steps; see `StepWiseGrpo`."""
    runs = list(_runs(x).values())
    finals = np.array([x.rewards[rows[-1]] for rows in runs])
    tasks = group_indices([x.eids[rows[-1]].tid for rows in runs])
    run_values, run_kept = normalised(finals, tasks, p.epsilon, p.std_threshold, p.std_cal_level)
    values, kept = np.zeros(len(x.rewards)), np.ones(len(x.rewards), np.bool_)
    for rows, value, keep in zip(runs, run_values, run_kept, strict=True):
        values[rows] = value / (len(rows) if p.enable_step_norm else 1)
        kept[rows] = keep
    zero_variance = sum(sample_std(finals[members]) == 0 for members in tasks)
    stats = {
        "groups/num_groups": float(len(tasks)),
        "groups/num_zero_variance": float(zero_variance),
        "groups/num_dropped_rows": float(len(kept) - kept.sum()),
    }
    return Advantages(x.spread(values), kept, stats=stats)


def gigpo(x: AdvantageInputs, p: Gigpo) -> Advantages:
    """Advantage of the run plus that of the step; see `Gigpo`."""
    runs = list(_runs(x).values())
    step_rewards = _step_rewards(x, runs, p.step_reward_key)
    returns, totals = np.zeros(len(x.rewards)), np.array([step_rewards[rows].sum() for rows in runs])
    for rows in runs:
        following = 0.0
        for row in reversed(rows):
            following = step_rewards[row] + p.gamma * following
            returns[row] = following
    of_run = np.zeros(len(x.rewards))
    for members in group_indices([x.eids[rows[0]].tid for rows in runs]):
        for run, value in zip(members, _compared(totals[members], p), strict=True):
            of_run[runs[run]] = value
    of_step, num_anchored = np.zeros(len(x.rewards)), 0
    anchors = [group for group in group_indices(_states(x, p.env_state_hash_key)) if len(group) > 1]
    for members in anchors:
        of_step[members] = _compared(returns[members], p)
        num_anchored += len(members)
    num_rows = max(len(x.rewards), 1)
    stats = group_stats(x) | {
        "gigpo/num_anchor_groups": float(len(anchors)),
        "gigpo/anchored_share": num_anchored / num_rows,
        "gigpo/mean_abs_run_advantage": float(np.abs(of_run).sum()) / num_rows,
        "gigpo/mean_abs_step_advantage": float(np.abs(of_step).sum()) / num_rows,
    }
    return Advantages(x.spread(of_run + p.omega * of_step), stats=stats)


def _step_rewards(x: AdvantageInputs, runs: Sequence[Sequence[int]], key: str) -> Float64s:
    """[R] `info[key]`, 0 where it is missing; if a run has none at all, its last row's reward and 0 before."""
    rewards = np.zeros(len(x.rewards))
    for rows in runs:
        if any(x.infos[row].get(key) is not None for row in rows):
            for row in rows:
                rewards[row] = float(x.infos[row].get(key) or 0.0)
        else:
            rewards[rows[-1]] = x.rewards[rows[-1]]
    return rewards


def _states(x: AdvantageInputs, key: str) -> list[str]:
    """[R] the state that a step began in; a row without one shares its state with none."""
    return [f"state {info[key]}" if info.get(key) is not None else f"row {row}" for row, info in enumerate(x.infos)]


def _compared(values: Float64s, p: Gigpo) -> Float64s:
    """Values less their mean, over (std + epsilon) or (1 + epsilon); 0 for a single one."""
    return centred(values, sample_std(values) if p.fnorm == "std" else 1.0, p.epsilon)
