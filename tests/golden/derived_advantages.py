"""Advantages derived once more from their papers: plain loops in float64. Nothing of `engines` is used here.

`faults` are numbers of listed differences: with them a function gives what the reference system gives, faults included.
With rewards of float32, the same loops run in float32, as there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Args = dict[str, Any]
Faults = frozenset[int]
NONE: Faults = frozenset()
MAX_CHOICES = 20_000
"""Random choices that are tried."""


@dataclass(slots=True)
class Sample:
    """One row."""

    index: int
    task: str
    reward: float
    mask: list[bool]
    run: int = 0
    step: int = 0
    logprobs: list[float] = field(default_factory=list[float])
    info: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Derived:
    """Advantages of rows."""

    values: dict[int, float] = field(default_factory=dict[int, float])
    sizes: dict[int, float] = field(default_factory=dict[int, float])
    """Largest reward of the group over what divides it: what rounding leaves of an advantage is a share of this."""
    order: list[int] = field(default_factory=list[int])
    """Kept rows, as that system orders them."""
    dropped_groups: int = 0
    per_group: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """What that system averages over groups."""

    def note(self, **numbers: float) -> None:
        """Of one more group."""
        for name, number in numbers.items():
            self.per_group.setdefault(name, []).append(number)

    def give(self, row: Sample, value: float, size: float) -> None:
        """The advantage of one more row."""
        self.values[row.index], self.sizes[row.index] = value, size
        self.order.append(row.index)


def grouped(samples: Iterable[Sample], key: Callable[[Sample], Hashable]) -> list[list[Sample]]:
    """Rows of equal keys, groups in order of first appearance."""
    groups: dict[Hashable, list[Sample]] = {}
    for row in samples:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def by_task(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Groups that are compared."""
    return grouped(samples, lambda row: row.task)


def mean(values: Sequence[float]) -> float:
    """0 for none."""
    return sum(values) / len(values) if values else 0.0


def std(values: Sequence[float], ddof: int = 1) -> float:
    """0 for fewer values than are needed."""
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - ddof)) if len(values) > ddof else 0.0


def largest(values: Sequence[float]) -> float:
    """Size of the largest one."""
    return max(map(abs, values), default=0.0)


def penalised(group: Sequence[Sample], penalty: float, faults: Faults) -> list[float]:
    """He et al. 2025, arXiv:2506.02355: R (1 - rank / n penalty), rank 0 for the least likely sample."""
    means = [mean([lp for lp, on in zip(row.logprobs, row.mask, strict=True) if on or 11 in faults]) for row in group]
    order = sorted(range(len(group)), key=lambda i: means[i])
    return [row.reward * (1 - order.index(i) / len(group) * penalty) for i, row in enumerate(group)]


def grpo(samples: Sequence[Sample], a: Args, faults: Faults = NONE) -> Derived:
    """Shao et al. 2024, arXiv:2402.03300, 4.1.2: (R - mean) / (std + epsilon) over the group; std over the batch: Liu
    et al. 2025, arXiv:2508.08221. Differences 6 (group of one) and 11 (raw rewards over penalised mean and std).
    """
    result, groups, epsilon = Derived(), by_task(samples), a.get("epsilon", 1e-6)
    penalty = a.get("rank_penalty")
    rewards = [
        [row.reward for row in group] if penalty is None or len(group) == 1 else penalised(group, penalty, faults)
        for group in groups
    ]
    raw = [row.reward for row in samples]
    everything = raw if 11 in faults else [reward for of_group in rewards for reward in of_group]
    batch_std = std(everything) if len(everything) > 1 else 1.0
    for group, of_group in zip(groups, rewards, strict=True):
        single = len(group) == 1
        centre, spread = (0.0, 1.0) if single else (mean(of_group), std(of_group))
        result.note(reward_mean=centre, reward_std=spread)
        if a.get("std_threshold") is not None and (single or spread <= a["std_threshold"]):
            result.dropped_groups += 1
            continue
        scale = epsilon + (batch_std if a.get("std_cal_level") == "batch" else spread)
        for row, reward in zip(group, of_group, strict=True):
            value = ((row.reward if 11 in faults else reward) - centre) / scale if scale else 0.0
            if len(set(of_group)) == 1 and not (single and 6 in faults) and not (not single and 11 in faults):
                value = 0.0  # nothing to compare
            result.give(row, value, largest(of_group) / scale if scale else 0.0)
    return result


def _less(
    samples: Sequence[Sample], faults: Faults, baseline: Callable[[list[float], int], float], factor: float = 1.0
) -> Derived:
    """R - baseline(rewards of the group, which of them); difference 6: of a group of one, R there."""
    result = Derived()
    for group in by_task(samples):
        rewards = [row.reward for row in group]
        for position, row in enumerate(group):
            value = row.reward - baseline(rewards, position)
            if len(group) == 1:
                value = row.reward if 6 in faults else 0.0
            result.give(row, value, largest(rewards) * factor)
    return result


def reinforce(samples: Sequence[Sample], a: Args, faults: Faults = NONE) -> Derived:
    """Williams 1992: R."""
    del a, faults
    result = Derived()
    for group in by_task(samples):
        result.note(reward_mean=mean([row.reward for row in group]))
        for row in group:
            result.give(row, row.reward, abs(row.reward))
    return result


def rloo(samples: Sequence[Sample], a: Args, faults: Faults = NONE) -> Derived:
    """Ahmadian et al. 2024, arXiv:2402.14740, 3.4: R less the mean of the others."""
    del a

    def others(rewards: list[float], position: int) -> float:
        return mean(rewards[:position] + rewards[position + 1 :])

    return _less(samples, faults, others, factor=2.0)


def opmd(samples: Sequence[Sample], a: Args, faults: Faults = NONE) -> Derived:
    """Kimi 2025, arXiv:2501.12599, 2.3.2: R - mean, or R - tau log(mean(exp(R / tau)))."""
    tau = a.get("tau", 1.0)

    def baseline(rewards: list[float], position: int) -> float:
        del position
        if a.get("opmd_baseline", "mean") == "mean":
            return mean(rewards)
        top = max(rewards)
        return top + tau * math.log(mean([math.exp((reward - top) / tau) for reward in rewards]))

    result = _less(samples, faults, baseline)
    for group in by_task(samples):
        rewards = [row.reward for row in group]
        result.note(group_baseline=baseline(rewards, 0) if len(group) > 1 else 0.0, reward_mean=mean(rewards))
    return result


def asymre(samples: Sequence[Sample], a: Args, faults: Faults = NONE) -> Derived:
    """Arnal et al. 2025, arXiv:2506.20520: R - (mean + shift)."""
    shift = a.get("baseline_shift", -0.1)
    result = _less(samples, faults, lambda rewards, position: mean(rewards) + shift)
    for group in by_task(samples):
        centre = mean([row.reward for row in group]) + shift if len(group) > 1 else 0.0
        result.note(group_baseline=centre, reward_mean=centre - shift)
    return result


def rec(samples: Sequence[Sample], a: Args, given: dict[int, float]) -> Derived:
    """Yao et al. 2025, arXiv:2509.24203: R - mean; with drop: balance, surplus rows below the mean are set aside at
    random. Of all choices, the one that comes closest to the given advantages. A group of one has 0.
    """
    result = Derived()
    for group in by_task(samples):
        rewards = [row.reward for row in group]
        below = [i for i, reward in enumerate(rewards) if reward < mean(rewards)]
        surplus = max(2 * len(below) - len(group), 0) if a.get("drop") == "balance" else 0
        if math.comb(len(below), surplus) > MAX_CHOICES:
            raise ValueError(f"{math.comb(len(below), surplus)} choices of {surplus} rows are too many to try")
        choices = [_rec_group(group, set(aside), a) for aside in itertools.combinations(below, surplus)]
        values, scale, centre, spread = min(
            choices, key=lambda c: max(abs(v - given.get(row.index, v)) for row, v in zip(group, c[0], strict=True))
        )
        for row, value in zip(group, values, strict=True):
            result.give(row, value, largest(rewards) / scale)
        result.note(drop_balance=surplus / len(group), reward_mean=centre, reward_std=spread)
    return result


def _rec_group(group: Sequence[Sample], aside: set[int], a: Args) -> tuple[list[float], float, float, float]:
    """(advantages, what they are divided by, mean, std)."""
    kept = [row.reward for i, row in enumerate(group) if i not in aside]
    if len(group) == 1:
        return [0.0], 1.0, 0.0, 1.0
    centre, spread = mean(kept), std(kept, ddof=0)
    scale = spread + a.get("epsilon", 1e-6) if a.get("std_normalize") else 1.0
    values = [0.0 if i in aside else (row.reward - centre) / scale for i, row in enumerate(group)]
    return values, scale, centre, spread


def runs(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Rows of each run, as listed."""
    return grouped(samples, lambda row: (row.task, row.run))


def last_step(run: Sequence[Sample], faults: Faults) -> Sample:
    """Difference 10: the last one listed there, the largest step here."""
    return run[-1] if 10 in faults else max(enumerate(run), key=lambda pair: (pair[1].step, pair[0]))[1]


def step_wise_grpo(samples: Sequence[Sample], a: Args, faults: Faults = NONE) -> Derived:
    """GRPO on the last steps, for all steps of their runs. rLLM, Tan et al. 2025."""
    tasks = by_task(samples)
    finals = [last_step(run, faults) for task in tasks for run in runs(task)]
    inner = grpo(finals, {key: value for key, value in a.items() if key != "enable_step_norm"}, faults)
    result = Derived(dropped_groups=inner.dropped_groups, per_group=inner.per_group)
    for run in (run for task in tasks for run in runs(task)):
        final = last_step(run, faults).index
        if final in inner.values:
            share = len(run) if a.get("enable_step_norm") else 1
            for row in run:
                result.give(row, inner.values[final] / share, inner.sizes[final] / share)
    return result


def gigpo(samples: Sequence[Sample], a: Args, faults: Faults = NONE) -> Derived:
    """Feng et al. 2025, arXiv:2505.10978, 4.1 and 4.2: advantage of the run among its task's, plus omega times that of
    the step among all steps in the same state.
    """
    result, to_go, of_run = Derived(), dict[int, float](), dict[int, tuple[float, float]]()
    number = type(samples[0].reward) if samples else float
    for task in by_task(samples):
        totals: list[float] = []
        for run in runs(task):
            steps = sorted(run, key=lambda row: row.step)
            rewards, following = _step_rewards(steps, a.get("step_reward_key", "step_reward")), 0.0
            for row, reward in reversed(list(zip(steps, rewards, strict=True))):
                following = reward + a.get("gamma", 1.0) * following
                to_go[row.index] = following
            totals.append(number(sum(rewards)))
        compared = _compared(totals, a, single=6 in faults)
        for run, value in zip(runs(task), compared, strict=True):
            of_run |= dict.fromkeys((row.index for row in run), value)
        scale = std(totals) if a.get("fnorm") == "std" and len(totals) > 1 else 1.0
        result.note(episode_reward_mean=mean(totals) if len(totals) > 1 else 0.0, episode_reward_std=scale)
    key = a.get("env_state_hash_key", "env_state_hash")
    states = grouped([row for row in samples if row.info.get(key) is not None], lambda row: str(row.info[key]))
    of_step = dict.fromkeys((row.index for row in samples), (0.0, 0.0))
    for state in states:
        for row, value in zip(
            state, _compared([number(to_go[row.index]) for row in state], a, single=False), strict=True
        ):
            of_step[row.index] = value
    for row in samples:
        (run_value, run_size), (step_value, step_size) = of_run[row.index], of_step[row.index]
        omega = a.get("omega", 1.0)
        result.give(row, run_value + omega * step_value, run_size + omega * step_size)
        result.note(mean_abs_A_E=abs(run_value), mean_abs_A_S=abs(step_value))
    result.note(anchor_groups_total=len(states), anchor_groups_size_gt1=sum(len(state) > 1 for state in states))
    return result


def _step_rewards(steps: Sequence[Sample], key: str) -> list[float]:
    """Of the steps; the row's own reward on the last one if none has any."""
    if any(row.info.get(key) is not None for row in steps):
        return [float(row.info.get(key) or 0.0) for row in steps]
    return [0.0] * (len(steps) - 1) + [steps[-1].reward]


def _compared(values: Sequence[float], a: Args, single: bool) -> list[tuple[float, float]]:
    """(value, size) of each; `single`: a value alone is compared with 0."""
    epsilon = a.get("epsilon", 1e-6)
    if len(values) == 1:
        return [(values[0] / (1 + epsilon) if single else 0.0, abs(values[0]))]
    scale = epsilon + (std(values) if a.get("fnorm", "none") == "std" else 1.0)
    return [((value - mean(values)) / scale, largest(values) / scale) for value in values]


ROWS: dict[str, Callable[[Sequence[Sample], Args, Faults], Derived]] = {
    **{"grpo": grpo, "opmd": opmd, "asymre": asymre, "reinforce": reinforce, "rloo": rloo},
    **{"step_wise_grpo": step_wise_grpo, "gigpo": gigpo},
}
