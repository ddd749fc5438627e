"""From the rows of a step to their advantages: what an advantage function is told, and what its answer leaves out.

Owns: the KL penalty in the rewards, rows of experts, the choice of tokens that a loss treats differently. Torch-free.
Does not own: formulas (`engines.algorithms`), forward passes (the engine).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from engines.algorithms.advantages import AdvantageInputs, Advantages, Bools, Float64s, group_indices
from engines.algorithms.selection import SelectionInputs
from engines.algorithms.spec import AdvantageParams, Algorithm, Need, failure, function_of
from engines.errors import DataError, EngineError
from engines.rows import Column, PerRow, StepRows


def needs_scores(algorithm: Algorithm, rows: StepRows) -> bool:
    """Whether advantages need a forward pass of all rows; if not, rows without a signal are never read by a model."""
    if algorithm.advantage is None or "advantages" in rows.columns:
        return False
    of_engine: set[Need] = {"values", "distribution"}
    if not algorithm.bypass_old_logprobs:
        of_engine.add("old_logprobs")
    if "teacher_logprobs" not in rows.columns:
        of_engine.add("teacher_logprobs")
    return algorithm.has_reward_penalty or bool(of_engine & algorithm.advantage.needs)


def penalised(rows: StepRows, divergence: Float64s, coefficient: float) -> StepRows:
    """The rows with `coefficient` times the KL estimates [N] taken off their token rewards."""
    assert rows.rewards is not None
    parts = rows.split(coefficient * divergence)
    rewards = [values - part for values, part in zip(rows.columns["token_rewards"], parts, strict=True)]
    sums = np.array([part.sum() for part in parts])
    return dataclasses.replace(rows.with_columns({"token_rewards": rewards}), rewards=rows.rewards - sums)


def with_advantages(rows: StepRows, algorithm: Algorithm, seed: int) -> tuple[StepRows, dict[str, float]]:
    """The rows that train, with the column `advantages` (and `returns`), and stats of the whole batch.

    Rows of experts have advantage 0. Raises DataError if the rows are not what the advantage needs, EngineError if its
    function gives back what it must not.
    """
    if algorithm.advantage is None or "advantages" in rows.columns:
        return rows.trained(), {}
    sampled = [index for index, expert in enumerate(rows.is_expert) if not expert]
    result = _computed(rows.chosen(sampled), algorithm, seed)
    columns: dict[Column, PerRow] = {"advantages": _merged(rows, sampled, result.values)}
    if result.returns is not None:
        columns["returns"] = _merged(rows, sampled, result.returns)
    kept = np.ones(len(rows), np.bool_)
    if result.kept is not None:
        kept[sampled] = result.kept
    rows = rows.with_columns(columns)
    if result.kept_tokens is not None:
        kept_tokens = _merged(rows, sampled, result.kept_tokens, of_expert=1)
        rows = rows.without_tokens(np.concatenate([*kept_tokens, np.empty(0)]).astype(np.bool_))
    repeated = [] if result.repeated is None else [sampled[row] for row in result.repeated]
    return rows.chosen([*np.flatnonzero(kept).tolist(), *repeated]).trained(), result.stats


def _computed(rows: StepRows, algorithm: Algorithm, seed: int) -> Advantages:
    assert algorithm.advantage is not None
    zeros = np.zeros(int(rows.lengths.sum()))
    token_rewards = rows.flat("token_rewards")
    inputs = AdvantageInputs(
        token_rewards=zeros if token_rewards is None else token_rewards,
        rewards=np.zeros(len(rows)) if rows.rewards is None else rows.rewards,
        lengths=rows.lengths,
        groups=group_indices([str(group) for group in rows.groups]),
        eids=rows.eids,
        infos=rows.infos,
        rollout_logprobs=rows.flat("rollout_logprobs"),
        old_logprobs=rows.flat("old_logprobs"),
        teacher_logprobs=rows.flat("teacher_logprobs"),
        values=rows.flat("values"),
        bootstrap=rows.bootstrap,
        entropies=rows.flat("entropies"),
        expected_scores=rows.flat("expected_scores"),
        seed=seed,
    )
    try:
        result = function_of(algorithm.advantage)(inputs, algorithm.advantage)
    except ValueError as error:
        raise DataError(f"advantages of a batch of {len(rows)} rows: {error}") from error
    except (TypeError, AttributeError) as error:  # of None, mostly
        raise failure(algorithm.advantage, inputs, error) from error
    _check(result, rows, algorithm.advantage)
    return result


def _check(result: Any, rows: StepRows, params: AdvantageParams) -> None:
    """Raises EngineError if it is not what an advantage function must give back."""
    if not isinstance(result, Advantages):
        raise EngineError(f"{params.function} gave a {type(result).__name__}; it must return Advantages(values)")
    num_rows, num_tokens = len(rows), int(rows.lengths.sum())
    expected = {"values": num_tokens, "returns": num_tokens, "kept_tokens": num_tokens, "kept": num_rows}
    for name, count in expected.items():
        values = getattr(result, name)
        if values is not None and np.shape(values) != (count,):
            each = "row" if name == "kept" else "action token; x.spread(values) makes that of one for each row"
            raise EngineError(
                f"{params.function} gave Advantages with {name} of shape {list(np.shape(values))}; it must be "
                f"[{count}], one number for each {each}"
            )


def _merged(rows: StepRows, sampled: list[int], values: Float64s | Bools, of_expert: float = 0.0) -> PerRow:
    """[N of the sampled rows] -> one array for each row, `of_expert` in those of experts."""
    merged: PerRow = [np.full(len(row.actions), of_expert) for row in rows.rows]
    for index, part in zip(sampled, rows.chosen(sampled).split(values), strict=True):
        merged[index] = part
    return merged


def with_selection(rows: StepRows, algorithm: Algorithm, seed: int) -> StepRows:
    """The rows with the column `selected`, if the loss treats some tokens differently."""
    select = algorithm.loss.selection
    if select is None or not len(rows):
        return rows
    old, advantages = rows.flat("old_logprobs"), rows.flat("advantages")
    assert old is not None
    assert advantages is not None
    selected = select(SelectionInputs(old, advantages, seed), algorithm.loss)
    return rows.with_columns({"selected": rows.split(np.asarray(selected, np.bool_))})
