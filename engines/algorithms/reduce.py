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

from engines.algorithms.inputs import LossInputs, Part, Reduction, Stat, TokenLoss, Unit
from engines.algorithms.spec import Aggregation

ACROSS_UPDATES: dict[Reduction, Literal["mean", "max", "min"]] = {
    Reduction.TOKEN_MEAN: "mean",
    Reduction.SEQUENCE_MEAN: "mean",
    Reduction.PAIR_MEAN: "mean",
    Reduction.SUM: "mean",
    Reduction.MAX: "max",
    Reduction.MIN: "min",
}
"""SUM is a share of an update's total, such as its loss: the step reports the mean over its updates."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Global denominators of one update, or of the rows of one part of it."""

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

    @property
    def pairs(self) -> int:
        """Pairs of rows, if rows come in pairs."""
        return self.sequences // 2


CountsByPart = Mapping[Part, Counts]


def counts_by_part(
    num_actions: Sequence[int], response_lengths: Sequence[int], is_expert: Sequence[bool]
) -> CountsByPart:
    """Count all rows, and the sampled and the expert ones among them."""

    def of(rows: Sequence[int]) -> Counts:
        return Counts.of([num_actions[row] for row in rows], [response_lengths[row] for row in rows])

    rows = range(len(num_actions))
    return {
        Part.ALL: of(rows),
        Part.SAMPLED: of([row for row in rows if not is_expert[row]]),
        Part.EXPERT: of([row for row in rows if is_expert[row]]),
    }


def aggregate(loss: TokenLoss, x: LossInputs, mode: Aggregation, counts: Counts) -> Tensor:
    """This micro-batch's share of the loss of the update, a scalar; the shares of all micro-batches add up to it.

    `x` and `counts` are those of the loss's part.
    """
    if loss.unit is Unit.SEQUENCE:
        return loss.value.sum() / max(counts.sequences, 1)
    if loss.unit is Unit.PAIR:
        return loss.value.sum() / max(counts.pairs, 1)
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
            self.totals[key] = stat if known is None else stat._replace(value=_combine(known, stat))

    def numbers(self, counts: CountsByPart) -> dict[str, Number]:
        """Finish: one transfer from the device for all of them."""
        if not self.totals:
            return {}
        values = torch.stack([stat.value.double() for stat in self.totals.values()]).tolist()
        return {
            key: Number(value / _divisor(stat, counts[stat.part]), ACROSS_UPDATES[stat.reduction])
            for (key, stat), value in zip(self.totals.items(), values, strict=True)
        }


def _divisor(stat: Stat, counts: Counts) -> int:
    match stat.reduction:
        case Reduction.TOKEN_MEAN:
            return max(counts.tokens, 1)
        case Reduction.SEQUENCE_MEAN:
            return max(counts.sequences, 1)
        case Reduction.PAIR_MEAN:
            return max(counts.pairs, 1)
        case _:
            return 1


def _combine(one: Stat, other: Stat) -> Tensor:
    match one.reduction:
        case Reduction.MAX:
            return torch.maximum(one.value, other.value)
        case Reduction.MIN:
            return torch.minimum(one.value, other.value)
        case _:
            return one.value + other.value
