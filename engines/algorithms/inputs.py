"""What a loss is given and what it gives back. Owns: the layout of action tokens and the meaning of a stat.

There is no padding and no mask here: only action tokens exist, A of them, row after row, in the B rows of a
micro-batch. So a loss cannot touch a token that does not train.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Unit(StrEnum):
    """Which global count of the update divides a loss."""

    TOKEN = "token"
    SEQUENCE = "sequence"


class Reduction(StrEnum):
    """How a stat becomes one number over the micro-batches and ranks of an update."""

    TOKEN_MEAN = "token-mean"
    """Sum over the global number of action tokens."""
    SEQUENCE_MEAN = "sequence-mean"
    """Sum over the global number of sequences with an action token."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Stat(NamedTuple):
    """A sum (or extremum) over one micro-batch, never a mean; detached, on device."""

    value: Tensor
    reduction: Reduction


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """One micro-batch, seen by a loss. Optional fields are there if the algorithm needs them."""

    logprobs: Tensor
    """[A] of the policy being trained, at the sampling temperature; carries the gradient."""
    row_of_token: Tensor
    """[A] int64, ascending: which row a token is in."""
    num_actions: Tensor
    """[B] action tokens of each row, at least 1."""
    old_logprobs: Tensor | None = None
    """[A] of the policy that the ratio is taken to; no gradient."""
    advantages: Tensor | None = None
    """[A]."""
    reference_logprobs: Tensor | None = None
    """[A] of the frozen reference model, at the same temperature."""
    entropies: Tensor | None = None
    """[A] nats, of the distribution that each token was drawn from; carries the gradient."""

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[A] -> [B] sums over each row."""
        return torch.zeros_like(self.num_actions, dtype=values.dtype).index_add(0, self.row_of_token, values)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[A] -> [B] means over each row."""
        return self.sequence_sum(values) / self.num_actions


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """An unreduced loss. `engines.algorithms.reduce` alone divides it."""

    value: Tensor
    """[A] for unit token, [B] for unit sequence; carries the gradient."""
    unit: Unit = Unit.TOKEN
    stats: dict[str, Stat] = field(default_factory=dict[str, Stat])
    """Metric key -> sum over the micro-batch."""


def token_mean(values: Tensor) -> Stat:
    """Stat of [A] values whose mean over all action tokens is wanted."""
    return Stat(values.detach().sum(), Reduction.TOKEN_MEAN)
