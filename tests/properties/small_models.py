"""Models small enough for thousands of train steps, and one step of the real engine code on them.

`TablePolicy` reads logits from a table, by token and position: a step takes milliseconds and runs in float64. Owns: how
a step's gradient is read. Does not own: batches (`tests.properties.batches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from engines.algorithms.spec import Algorithm
from engines.config import CriticConfig, OptimizerConfig
from engines.experience import Experience
from engines.hf.batch import Layout, MicroBatch
from engines.hf.critic import Critic
from engines.hf.forward import Head
from engines.hf.model import LoadedModel, Policy
from engines.hf.models import Models
from engines.hf.optim import AdamW
from engines.hf.step import TrainStep
from engines.intake import Limits, take_in
from tests.properties.batches import LIMITS, VOCABULARY

POSITIONS = 16


class Table(nn.Module):
    """Logits [V] = by_token[token] + by_position[position]."""

    def __init__(self, seed: int, scale: float, dtype: torch.dtype, vocab_size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.by_token, self.by_position = (
            nn.Parameter((torch.randn(size, vocab_size, generator=generator) * scale).to(dtype))
            for size in (vocab_size, POSITIONS)
        )
        self.base_model = nn.Identity()  # the critic's trunk does not learn; its head does
        self.device = torch.device("cpu")

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[N] and [N] -> [N, V]."""
        return self.by_token[tokens] + self.by_position[positions]


class TablePolicy(Policy):
    """A policy of one table; the rest is the engine's own."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype = torch.float64,
        layout: Layout = "packed",
        scale: float = 1.0,
        vocab_size: int = VOCABULARY,
    ) -> None:
        self.table = Table(seed, scale, dtype, vocab_size)
        self.model = cast(Any, self.table)
        self.temperature, self.dtype, self.layout = 1.0, dtype, layout
        self.head = Head(torch.eye(vocab_size, dtype=dtype))

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[A, V] logits; the head is the identity."""
        every = self.table(batch.input_ids.flatten(), batch.position_ids.flatten())
        return every.index_select(0, batch.predictors)


GRADIENT = OptimizerConfig(lr=0.0, betas=(0.0, 0.0), clip_grad=1e30)
"""Changes nothing; its first moment is the gradient."""


def table_models(
    algorithm: Algorithm,
    dtype: torch.dtype = torch.float64,
    layout: Layout = "packed",
    optimizer: OptimizerConfig = GRADIENT,
    scale: float = 1.0,
    vocab_size: int = VOCABULARY,
) -> Models:
    """What this algorithm needs, each with its own table."""

    def table(seed: int) -> TablePolicy:
        return TablePolicy(seed, dtype, layout, scale, vocab_size)

    policy = table(1)
    return Models(
        loaded=cast(LoadedModel, policy),
        policy=policy,
        optimizer=AdamW(policy.table, optimizer, 10),
        reference=table(2) if "reference" in algorithm.needs else None,
        teacher=table(3) if "teacher_logprobs" in algorithm.needs else None,
        critic=_critic(table(4), optimizer) if "values" in algorithm.needs else None,
    )


def _critic(trunk: TablePolicy, optimizer: OptimizerConfig) -> Critic:
    critic = Critic(cast(LoadedModel, trunk), trunk, CriticConfig(optimizer=optimizer), 10)
    critic.head.to(trunk.dtype)
    with torch.no_grad():
        critic.head.weight.copy_(trunk.table.by_token[:1])
    return critic


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a step did."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    """Of policy and critic, by optimizer prefix and parameter; of the last update."""
    num_nonfinite: int
    num_applied: int
    kl_coefficients: dict[str, float]

    @property
    def flat(self) -> Tensor:
        """All gradients end to end, in float64; empty without an applied update."""
        parts = [self.gradients[name].flatten().double() for name in sorted(self.gradients)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def one_step(
    models: Models,
    algorithm: Algorithm,
    rows: Sequence[Experience],
    *,
    budget: int = 1000,
    num_updates: int = 1,
    step: int = 2,
    seed: int = 7,
    limits: Limits = LIMITS,
) -> Outcome:
    """One train step, as the engine makes it."""
    intake = take_in(rows, algorithm, limits)
    train_step = TrainStep(models, algorithm, budget)
    report = train_step.run(intake.rows, num_updates, step, seed)
    counts = {"num_trained_tokens": float(report.num_trained_tokens), "num_empty": float(report.num_empty)}
    return Outcome(
        metrics=intake.stats | report.metrics | counts,
        gradients={
            prefix + name: tensor.clone()
            for prefix, optimizer in models.optimizers.items()
            for name, tensor in optimizer.tensors().items()
            if name.startswith("exp_avg.")
        },
        num_nonfinite=report.num_nonfinite,
        num_applied=report.num_applied,
        kl_coefficients=train_step.kl_coefficients,
    )


def assert_same_metrics(one: Mapping[str, float], other: Mapping[str, float], rtol: float, atol: float) -> None:
    """Equal keys, close values."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert abs(other[key] - value) <= atol + rtol * abs(value), f"{key}: {value} and {other[key]}"


def assert_same(one: Outcome, other: Outcome, rtol: float = 1e-10) -> None:
    """Gradients that differ by less than rtol of their norm; metrics by less than rtol of themselves, or of 1."""
    assert one.num_applied == other.num_applied
    assert one.num_nonfinite == other.num_nonfinite == 0
    assert one.gradients.keys() == other.gradients.keys()
    assert float((one.flat - other.flat).norm()) <= rtol * max(float(one.flat.norm()), 1.0)
    assert_same_metrics(one.metrics, other.metrics, rtol, rtol)
    assert one.kl_coefficients.keys() == other.kl_coefficients.keys()
