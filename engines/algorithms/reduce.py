"""From unreduced losses and sums to numbers. The only place that divides.

Every denominator is a count over the whole update, all its micro-batches and ranks: so a result cannot depend on how
the batch was cut. A row without action tokens counts nowhere; counts of 0 give 0, not NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engines.algorithms.inputs import LossInputs, Reduction, Stat, TokenLoss, Unit
from engines.algorithms.spec import Aggregation

ACROSS_UPDATES: dict[Reduction, Literal["mean", "max", "min"]] = {
    Reduction.TOKEN_MEAN: "mean",
    Reduction.SEQUENCE_MEAN: "mean",
    Reduction.SUM: "mean",
    Reduction.MAX: "max",
    Reduction.MIN: "min",
}
"""SUM is a share of an update's total, such as its loss: the step reports the mean over its updates."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Global denominators of one update."""

    tokens: int
    """Action tokens."""
    sequences: int
    """Rows with at least one action token."""
    longest: int
    """Tokens of the longest response, trained or not; divides seq-mean-token-sum-norm."""

    @classmethod
    def of(cls, num_actions: Sequence[int], response_lengths: Sequence[int]) -> Counts:
        """Count rows given their action tokens and response tokens."""
        return cls(sum(num_actions), sum(count > 0 for count in num_actions), max(response_lengths, default=0))


def aggregate(loss: TokenLoss, x: LossInputs, mode: Aggregation, counts: Counts) -> Tensor:
    """This micro-batch's share of the loss of the update, a scalar; the shares of all micro-batches add up to it."""
    if loss.unit is Unit.SEQUENCE:
        return loss.value.sum() / max(counts.sequences, 1)
    match mode:
        case "token-mean":
            return loss.value.sum() / max(counts.tokens, 1)
        case "seq-mean-token-sum":
            return loss.value.sum() / max(counts.sequences, 1)
        case "seq-mean-token-mean":
            return x.sequence_mean(loss.value).sum() / max(counts.sequences, 1)
        case "seq-mean-token-sum-norm":
            return loss.value.sum() / max(counts.longest, 1)


class Number(NamedTuple):
    """A finished metric of one update, and how it becomes one of the step."""

    value: float
    across_updates: Literal["mean", "max", "min", "last"]


def over_updates(updates: Sequence[Mapping[str, Number]]) -> dict[str, float]:
    """One number per key for a step of several updates, each by its declared reduction."""
    gathered: dict[str, list[Number]] = {}
    for numbers in updates:
        for key, number in numbers.items():
            gathered.setdefault(key, []).append(number)
    return {key: _across([n.value for n in numbers], numbers[0].across_updates) for key, numbers in gathered.items()}


def _across(values: list[float], how: str) -> float:
    match how:
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "last":
            return values[-1]
        case _:
            return sum(values) / len(values)


@dataclass(slots=True)
class StatTotals:
    """Adds up the stats of the micro-batches of one update, on device."""

    totals: dict[str, Stat] = field(default_factory=dict[str, Stat])

    def add(self, stats: Mapping[str, Stat]) -> None:
        """Take in one micro-batch."""
        for key, stat in stats.items():
            known = self.totals.get(key)
            self.totals[key] = stat if known is None else Stat(_combine(known, stat), stat.reduction)

    def numbers(self, counts: Counts) -> dict[str, Number]:
        """Finish: one transfer from the device for all of them."""
        if not self.totals:
            return {}
        values = torch.stack([stat.value.double() for stat in self.totals.values()]).tolist()
        divisors = {Reduction.TOKEN_MEAN: max(counts.tokens, 1), Reduction.SEQUENCE_MEAN: max(counts.sequences, 1)}
        return {
            key: Number(value / divisors.get(stat.reduction, 1), ACROSS_UPDATES[stat.reduction])
            for (key, stat), value in zip(self.totals.items(), values, strict=True)
        }


def _combine(one: Stat, other: Stat) -> Tensor:
    match one.reduction:
        case Reduction.MAX:
            return torch.maximum(one.value, other.value)
        case Reduction.MIN:
            return torch.minimum(one.value, other.value)
        case _:
            return one.value + other.value
