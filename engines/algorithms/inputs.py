"""What a loss is given and what it gives back. Owns: the layout of action tokens and the meaning of a stat.

There is no padding and no mask here: only action tokens exist, A of them, row after row, in the B rows of a
micro-batch. So a loss cannot touch a token that does not train.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Unit(StrEnum):
    """What a loss has one number of, and so which count divides it."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    PAIR = "pair"


class Part(StrEnum):
    """Which rows a loss is about; it is divided by the global counts of those alone."""

    ALL = "all"
    SAMPLED = "sampled"
    """All but the expert's."""
    EXPERT = "expert"


class Reduction(StrEnum):
    """How a stat becomes one number over the micro-batches and ranks of an update."""

    TOKEN_MEAN = "token-mean"
    """Sum over the global number of action tokens."""
    SEQUENCE_MEAN = "sequence-mean"
    """Sum over the global number of sequences with an action token."""
    PAIR_MEAN = "pair-mean"
    """Sum over the global number of pairs."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Stat(NamedTuple):
    """A sum (or extremum) over one micro-batch, never a mean; detached, on device."""

    value: Tensor
    reduction: Reduction
    part: Part = Part.ALL
    """Whose counts divide a mean; `Objective` sets it to the part of the loss."""


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """One micro-batch, seen by a loss. Optional fields are there if the algorithm needs them."""

    logprobs: Tensor
    """[A] of the policy being trained, at the sampling temperature; carries the gradient."""
    row_of_token: Tensor
    """[A] int64, ascending: which row a token is in."""
    num_actions: Tensor
    """[B] action tokens of each row, at least 1. With pairs, rows 2k and 2k + 1 are preferred and refused."""
    old_logprobs: Tensor | None = None
    """[A] of the policy that the ratio is taken to; no gradient."""
    advantages: Tensor | None = None
    """[A]."""
    reference_logprobs: Tensor | None = None
    """[A] of the frozen reference model, at the same temperature."""
    rollout_logprobs: Tensor | None = None
    """[A] of the sampler; 0 in expert rows."""
    entropies: Tensor | None = None
    """[A] nats, of the distribution that each token was drawn from; carries the gradient."""
    selected: Tensor | None = None
    """[A] bool, what the loss's `select` has chosen."""
    is_expert: Tensor | None = None
    """[A] bool, tokens of expert rows. None: there are none."""
    step: int = 0
    """Train steps done before this one, for schedules."""

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[A] -> [B] sums over each row."""
        return torch.zeros_like(self.num_actions, dtype=values.dtype).index_add(0, self.row_of_token, values)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[A] -> [B] means over each row."""
        return self.sequence_sum(values) / self.num_actions

    def part(self, part: Part) -> LossInputs:
        """The rows of this part alone, counted anew from 0."""
        if part is Part.ALL or (part is Part.SAMPLED and self.is_expert is None):
            return self
        expert = torch.zeros_like(self.row_of_token, dtype=torch.bool) if self.is_expert is None else self.is_expert
        wanted = expert if part is Part.EXPERT else ~expert
        rows = torch.zeros_like(self.num_actions, dtype=torch.bool).index_fill(0, self.row_of_token[wanted], True)
        number = rows.cumsum(0) - 1
        chosen = {name: value[wanted] for name in _PER_TOKEN if (value := getattr(self, name)) is not None}
        chosen["row_of_token"] = number[chosen["row_of_token"]]
        return dataclasses.replace(self, num_actions=self.num_actions[rows], **chosen)


_PER_TOKEN = tuple(f.name for f in dataclasses.fields(LossInputs) if f.name not in ("num_actions", "step"))


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """An unreduced loss. `engines.algorithms.reduce` alone divides it."""

    value: Tensor
    """[A] for unit token, [B] for sequence, [B / 2] for pair, of the rows of its part; carries the gradient."""
    unit: Unit = Unit.TOKEN
    stats: dict[str, Stat] = field(default_factory=dict[str, Stat])
    """Metric key -> sum over the micro-batch, of the rows of its part."""
    part: Part = Part.ALL


def token_mean(values: Tensor) -> Stat:
    """Stat of [A] values whose mean over all action tokens is wanted."""
    return Stat(values.detach().sum(), Reduction.TOKEN_MEAN)


def sequence_mean(values: Tensor) -> Stat:
    """Stat of [B] values whose mean over all sequences is wanted."""
    return Stat(values.detach().sum(), Reduction.SEQUENCE_MEAN)


def pair_mean(values: Tensor) -> Stat:
    """Stat of [B / 2] values whose mean over all pairs is wanted."""
    return Stat(values.detach().sum(), Reduction.PAIR_MEAN)


def maximum(values: Tensor) -> Stat:
    """Stat of the largest value; of none, 0."""
    return Stat(values.detach().max() if values.numel() else values.new_zeros(()), Reduction.MAX)
