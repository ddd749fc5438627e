"""What a batch of experiences must be before it trains: checked, filtered, made into rows. Torch-free, for all engines.

Owns: refusal of bad rows, rewards with their shaping, groups, which rows take part before anything is computed. Refusal
comes before anything is changed, and names the row. Does not own: advantages (`engines.advantage_stage`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engines.algorithms.advantages import Bools, Float64s, group_indices
from engines.algorithms.filters import FilterInputs, overlong
from engines.algorithms.spec import Algorithm, FilterParams, function_of, name_of
from engines.errors import DataError, EngineError
from engines.experience import Experience
from engines.rows import Column, PerRow, Row, StepRows


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can take."""

    vocab_size: int
    max_model_len: int
    """Prompt plus response, tokens."""
    max_response_tokens: int | None = None
    """None: what the prompt leaves."""
    has_teacher: bool = False
    """Whether there is a teacher for rows that come without its logprobs."""


@dataclass(frozen=True, slots=True, eq=False)
class Intake:
    """The rows that go on, those without an action token included: they may be compared with the others."""

    rows: StepRows
    stats: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics of the whole batch, rows that are left out included."""


def take_in(exps: Sequence[Experience], algorithm: Algorithm, limits: Limits) -> Intake:
    """Check every row, shape its reward, leave out what the filters refuse.

    Raises DataError naming the first row that is not what this algorithm and model need.
    """
    if not exps:
        raise DataError("train_step got no experiences; a batch has at least one row")
    for exp in exps:
        _check_tokens(exp, limits)
        _check_needs(exp, algorithm, limits)
    if "pairs" in algorithm.needs:
        return Intake(_pairs(exps), _length_stats(exps))
    rewards = _rewards(exps, algorithm)
    stats = _length_stats(exps) | _reward_stats(exps)
    rows = _rows(exps, _shaped(exps, rewards, algorithm, limits), algorithm)
    if rewards is None or not algorithm.filters:
        return Intake(rows, stats)
    kept, filter_stats = filtered(exps, rewards, algorithm.filters)
    return Intake(rows.chosen(np.flatnonzero(kept).tolist()), stats | filter_stats)


def reward_of(exp: Experience) -> float | None:
    """Sum of the token rewards if there are any, else the reward of the sequence."""
    if exp.token_level_reward is not None:
        return float(exp.token_level_reward.sum(dtype=np.float64))
    return None if exp.reward is None else float(exp.reward)


def is_expert(exp: Experience, algorithm: Algorithm) -> bool:
    """Whether the row was written by an expert, and the algorithm makes a difference of it."""
    return "expert_rows" in algorithm.needs and bool(exp.info.get("is_expert"))


def filtered(
    exps: Sequence[Experience], rewards: Float64s, filters: Sequence[FilterParams]
) -> tuple[Bools, dict[str, float]]:
    """[R] which rows all filters let through, one after another, and how many rows each of them dropped.

    rewards [R], NaN for an expert's row: those pass. Raises EngineError if a filter gives back no such flags.
    """
    kept, stats = np.ones(len(exps), np.bool_), dict[str, float]()
    for params in filters:
        candidates = np.flatnonzero(kept & ~np.isnan(rewards)).tolist()
        inputs = FilterInputs(
            rewards=rewards[candidates],
            groups=group_indices([exps[row].eid.tid for row in candidates]),
            metrics=[exps[row].metrics for row in candidates],
        )
        passed = np.asarray(function_of(params)(inputs, params), np.bool_)
        if passed.shape != (len(candidates),):
            raise EngineError(
                f"{params.function} gave flags of shape {list(passed.shape)}; it must return [{len(candidates)}], for "
                "each row whether it is kept"
            )
        kept[candidates] = passed
        stats[f"filter/{name_of(params)}_num_dropped"] = float(len(passed) - passed.sum())
    return kept, stats


def _check_tokens(exp: Experience, limits: Limits) -> None:
    name = f"experience {exp.eid.uid}"
    if exp.prompt_length < 1:
        raise DataError(
            f"{name}: prompt_length is {exp.prompt_length}; the first token cannot be predicted from nothing"
        )
    parts = [exp.tokens, *(part for part in (exp.chosen, exp.rejected) if part is not None)]
    length = len(exp.tokens) + max([len(part) for part in parts[1:]], default=0)
    if length > limits.max_model_len:
        raise DataError(
            f"{name}: {length} tokens ({exp.prompt_length} of prompt) are more than model.max_model_len = "
            f"{limits.max_model_len}; shorten it or raise the limit"
        )
    low = min(int(part.min(initial=0)) for part in parts)
    high = max(int(part.max(initial=0)) for part in parts)
    if low < 0 or high >= limits.vocab_size:
        raise DataError(
            f"{name}: token id {low if low < 0 else high} is outside the vocabulary of {limits.vocab_size}; "
            "it was encoded with another tokenizer"
        )


def _check_needs(exp: Experience, algorithm: Algorithm, limits: Limits) -> None:
    name, needs = f"experience {exp.eid.uid}", algorithm.needs
    if (exp.experience_type == "dpo") != ("pairs" in needs):
        have, want = (
            ("a preference pair", "single sequences") if "pairs" not in needs else ("a single sequence", "pairs")
        )
        raise DataError(f"{name} is {have}; this algorithm trains on {want}")
    if "pairs" in needs and any(response is None or not len(response) for response in (exp.chosen, exp.rejected)):
        raise DataError(f"{name}: a response of the pair is empty; both need at least one token")
    if is_expert(exp, algorithm):
        return
    if "rollout_logprobs" in needs and exp.logprobs is None:
        raise DataError(
            f"{name} has no logprobs, and this algorithm needs those of the sampler; record them when sampling"
            + ("" if algorithm.correction else ", or set algorithm.bypass_old_logprobs: false")
        )
    if "teacher_logprobs" in needs and exp.teacher_logprobs is None and not limits.has_teacher:
        raise DataError(f"{name} has no teacher_logprobs, and this algorithm needs them; set model.teacher_model_path")


def _rewards(exps: Sequence[Experience], algorithm: Algorithm) -> Float64s | None:
    """[R] as given, NaN for an expert's row; None if the algorithm has no rewards."""
    if "rewards" not in algorithm.needs:
        return None
    return np.array([math.nan if is_expert(exp, algorithm) else _required_reward(exp) for exp in exps])


def _shaped(
    exps: Sequence[Experience], rewards: Float64s | None, algorithm: Algorithm, limits: Limits
) -> Float64s | None:
    """[R] less what a response loses by its length."""
    if rewards is None or algorithm.shaping is None:
        return rewards
    if limits.max_response_tokens is None:
        raise DataError("overlong shaping needs model.max_response_tokens: how long is too long")
    lengths = np.array([exp.response_length for exp in exps])
    return rewards + overlong(lengths, limits.max_response_tokens, algorithm.shaping)


def _required_reward(exp: Experience) -> float:
    reward = reward_of(exp)
    if reward is None:
        raise DataError(f"experience {exp.eid.uid} has no reward; score it before it is written to the buffer")
    if not math.isfinite(reward):
        raise DataError(f"experience {exp.eid.uid} has reward {reward}; the reward function must give a finite number")
    return reward


def _rows(exps: Sequence[Experience], rewards: Float64s | None, algorithm: Algorithm) -> StepRows:
    masks = [_mask(exp, algorithm) for exp in exps]
    keys = [exp.eid.tid for exp in exps] if rewards is not None else [str(index) for index in range(len(exps))]
    columns: dict[Column, PerRow] = {}
    if "rollout_logprobs" in algorithm.needs:
        columns["rollout_logprobs"] = _column(exps, masks, "logprobs")
        if "old_logprobs" in algorithm.needs and algorithm.bypass_old_logprobs:
            columns["old_logprobs"] = columns["rollout_logprobs"]
    if "teacher_logprobs" in algorithm.needs and all(exp.teacher_logprobs is not None for exp in exps):
        columns["teacher_logprobs"] = _column(exps, masks, "teacher_logprobs")
    if rewards is not None:
        columns["token_rewards"] = [
            _token_rewards(exp, mask, reward) for exp, mask, reward in zip(exps, masks, rewards, strict=True)
        ]
    columns |= _given_advantages(exps, masks, algorithm)
    return StepRows(
        rows=[
            Row.of(exp.tokens, np.flatnonzero(mask) + exp.prompt_length) for exp, mask in zip(exps, masks, strict=True)
        ],
        eids=[exp.eid for exp in exps],
        infos=[exp.info for exp in exps],
        groups=_group_numbers(keys),
        response_lengths=[exp.response_length for exp in exps],
        is_expert=[is_expert(exp, algorithm) for exp in exps],
        is_truncated=[exp.truncate_status == "response_truncated" for exp in exps],
        rewards=rewards,
        columns=columns,
    )


def _mask(exp: Experience, algorithm: Algorithm) -> Bools:
    """[T] which response tokens train."""
    if exp.action_mask is None or (algorithm.mask_truncated and exp.truncate_status == "response_truncated"):
        return np.zeros(exp.response_length, np.bool_)
    return exp.action_mask


def _column(exps: Sequence[Experience], masks: Sequence[Bools], name: str) -> PerRow:
    """Per row [A] of a field, 0 where an expert's row lacks it."""
    values = [getattr(exp, name) for exp in exps]
    return [
        np.zeros(int(mask.sum()), np.float32) if value is None else value[mask]
        for value, mask in zip(values, masks, strict=True)
    ]


def _token_rewards(exp: Experience, mask: Bools, reward: float) -> Float64s:
    """[A] rewards of the action tokens, their sum is the row's.

    A reward on a token that does not train counts for the last action before it, or for the first one. What shaping
    changed, or a reward of the whole sequence, counts for the last action.
    """
    actions = np.flatnonzero(mask)
    values = np.zeros(len(actions))
    if not len(actions) or math.isnan(reward):
        return values
    if exp.token_level_reward is not None:
        positions = np.arange(len(mask))
        owners = np.maximum(np.searchsorted(actions, positions, side="right") - 1, 0)
        np.add.at(values, owners, exp.token_level_reward.astype(np.float64))
    values[-1] += reward - values.sum()
    return values


def _given_advantages(exps: Sequence[Experience], masks: Sequence[Bools], algorithm: Algorithm) -> dict[Column, PerRow]:
    """Advantages, if all rows came with them."""
    given = [exp.advantages is not None for exp in exps]
    if algorithm.advantage is None or not any(given):
        return {}
    if not all(given):
        raise DataError(f"experience {exps[given.index(False)].eid.uid} has no advantages, others of its batch have")
    return {"advantages": [values.astype(np.float64) for values in _column(exps, masks, "advantages")]}


def _pairs(exps: Sequence[Experience]) -> StepRows:
    """Two rows for each pair, the preferred one first."""
    rows: list[Row] = []
    lengths: list[int] = []
    for exp in exps:
        for response in (exp.chosen, exp.rejected):
            assert response is not None
            tokens = np.concatenate([exp.tokens, response])
            rows.append(Row.of(tokens, np.arange(len(exp.tokens), len(tokens))))
            lengths.append(len(response))
    twice = [exp for exp in exps for _ in range(2)]
    return StepRows(
        rows=rows,
        eids=[exp.eid for exp in twice],
        infos=[exp.info for exp in twice],
        groups=[index // 2 for index in range(len(twice))],
        response_lengths=lengths,
        is_expert=[False] * len(twice),
        is_truncated=[False] * len(twice),
    )


def _group_numbers(keys: Sequence[str]) -> list[int]:
    numbers: dict[str, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _length_stats(exps: Sequence[Experience]) -> dict[str, float]:
    return {
        "data/response_length_mean": float(np.mean([exp.response_length for exp in exps])),
        "data/num_tokens": float(sum(len(exp.tokens) for exp in exps)),
    }


def _reward_stats(exps: Sequence[Experience]) -> dict[str, float]:
    """Mean and population std over the rows that have a finite reward; nothing if none has."""
    rewards = [reward for exp in exps if (reward := reward_of(exp)) is not None and math.isfinite(reward)]
    if not rewards:
        return {}
    return {"data/reward_mean": float(np.mean(rewards)), "data/reward_std": float(np.std(rewards))}
