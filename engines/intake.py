"""What a batch of experiences must be before it trains, and its advantages. Torch-free, shared by all engines.

Owns: refusal of bad rows, rewards, groups, which rows take part. Refusal comes before anything is changed, and names
the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engines.algorithms.advantages import AdvantageInputs, Advantages, Float64s, group_indices
from engines.algorithms.spec import Algorithm
from engines.errors import DataError
from engines.experience import Experience

AdvantageFn = Callable[[AdvantageInputs], Advantages]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model can take."""

    vocab_size: int
    max_model_len: int
    """Prompt plus response, tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Intake:
    """The rows that train: kept by the advantage function, with at least one action token."""

    rows: list[Experience]
    advantages: list[Float64s] | None
    """Per row [A], on its action tokens; None if the algorithm has no advantages."""
    groups: list[int]
    """Per row, the number of its group; rows of one group are never spread over two updates."""
    stats: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics of the whole batch, dropped rows included."""


def take_in(
    exps: Sequence[Experience], algorithm: Algorithm, advantage_fn: AdvantageFn | None, limits: Limits
) -> Intake:
    """Check every row, compute advantages on whole groups, and keep what trains.

    Raises DataError naming the first row that is not what this algorithm and model need.
    """
    if not exps:
        raise DataError("train_step got no experiences; a batch has at least one row")
    for exp in exps:
        _check_tokens(exp, limits)
        if "old_logprobs" in algorithm.needs and algorithm.bypass_old_logprobs and exp.logprobs is None:
            raise DataError(
                f"experience {exp.eid.uid} has no logprobs, and they are the old logprobs of this algorithm; "
                "record them when sampling, or set algorithm.bypass_old_logprobs: false"
            )
    kept = np.ones(len(exps), np.bool_)
    stats = _length_stats(exps)
    keys = [exp.eid.tid for exp in exps] if "rewards" in algorithm.needs else [str(i) for i in range(len(exps))]
    groups = group_indices(keys)
    per_row: list[Float64s] | None = None
    if advantage_fn is not None:
        per_row, kept, advantage_stats = _advantages(exps, groups, advantage_fn)
        stats |= advantage_stats
    stats |= _reward_stats(exps)
    group_of = np.empty(len(exps), np.int64)
    for number, members in enumerate(groups):
        group_of[members] = number
    chosen = [i for i, exp in enumerate(exps) if kept[i] and exp.action_mask is not None and exp.action_mask.any()]
    return Intake(
        rows=[exps[i] for i in chosen],
        advantages=None if per_row is None else [per_row[i] for i in chosen],
        groups=[int(group_of[i]) for i in chosen],
        stats=stats,
    )


def reward_of(exp: Experience) -> float | None:
    """Sum of the token rewards if there are any, else the reward of the sequence."""
    if exp.token_level_reward is not None:
        return float(exp.token_level_reward.sum(dtype=np.float64))
    return None if exp.reward is None else float(exp.reward)


def _check_tokens(exp: Experience, limits: Limits) -> None:
    name = f"experience {exp.eid.uid}"
    if exp.experience_type == "dpo":
        raise DataError(f"{name} is a preference pair; this algorithm trains on single sequences")
    if exp.prompt_length < 1:
        raise DataError(
            f"{name}: prompt_length is {exp.prompt_length}; the first token cannot be predicted from nothing"
        )
    if len(exp.tokens) > limits.max_model_len:
        raise DataError(
            f"{name}: {len(exp.tokens)} tokens ({exp.prompt_length} of prompt) are more than model.max_model_len = "
            f"{limits.max_model_len}; shorten it or raise the limit"
        )
    low, high = int(exp.tokens.min(initial=0)), int(exp.tokens.max(initial=0))
    if low < 0 or high >= limits.vocab_size:
        raise DataError(
            f"{name}: token id {low if low < 0 else high} is outside the vocabulary of {limits.vocab_size}; "
            "it was encoded with another tokenizer"
        )


def _advantages(
    exps: Sequence[Experience], groups: tuple[npt.NDArray[np.int64], ...], advantage_fn: AdvantageFn
) -> tuple[list[Float64s], npt.NDArray[np.bool_], dict[str, float]]:
    """Per row [A] advantages, which rows are kept, and stats. If all rows came with advantages, those are taken."""
    given = [exp.advantages is not None for exp in exps]
    if all(given):
        per_row = [np.asarray(exp.advantages, np.float64)[exp.action_mask] for exp in exps]
        return per_row, np.ones(len(exps), np.bool_), {}
    if any(given):
        raise DataError(f"experience {exps[given.index(False)].eid.uid} has no advantages, others of its batch have")
    rewards = np.array([_required_reward(exp) for exp in exps])
    try:
        result = advantage_fn(AdvantageInputs(rewards, groups, _mean_logprobs(exps)))
    except ValueError as error:
        raise DataError(f"advantages of a batch of {len(exps)} rows: {error}") from error
    counts = [0 if exp.action_mask is None else int(exp.action_mask.sum()) for exp in exps]
    per_row = [np.full(count, value) for count, value in zip(counts, result.values, strict=True)]
    return per_row, result.kept, result.stats


def _required_reward(exp: Experience) -> float:
    reward = reward_of(exp)
    if reward is None:
        raise DataError(f"experience {exp.eid.uid} has no reward; score it before it is written to the buffer")
    if not math.isfinite(reward):
        raise DataError(f"experience {exp.eid.uid} has reward {reward}; the reward function must give a finite number")
    return reward


def _mean_logprobs(exps: Sequence[Experience]) -> Float64s | None:
    """[R] mean sampler logprob over the action tokens, 0 for a row without any; None if a row has no logprobs."""
    means: list[float] = []
    for exp in exps:
        if exp.logprobs is None or exp.action_mask is None:
            return None
        chosen = exp.logprobs[exp.action_mask]
        means.append(float(chosen.mean(dtype=np.float64)) if len(chosen) else 0.0)
    return np.array(means)


def _length_stats(exps: Sequence[Experience]) -> dict[str, float]:
    return {
        "data/response_length_mean": float(np.mean([exp.response_length for exp in exps])),
        "data/num_tokens": float(sum(len(exp.tokens) for exp in exps)),
    }


def _reward_stats(exps: Sequence[Experience]) -> dict[str, float]:
    """Mean and population std over the rows that have a reward; nothing if none has."""
    rewards = [reward for exp in exps if (reward := reward_of(exp)) is not None]
    if not rewards:
        return {}
    return {"data/reward_mean": float(np.mean(rewards)), "data/reward_std": float(np.std(rewards))}
