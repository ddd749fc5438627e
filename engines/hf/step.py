"""One train step on one process: a batch of experiences becomes optimizer updates and metrics.

Owns: the order of forward passes, the split into updates, skipping of updates that cannot be made. Does not own: the
formulas (`engines.algorithms`), threads and files (`engines.hf.engine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engines.algorithms.advantages import Float64s
from engines.algorithms.inputs import LossInputs
from engines.algorithms.objective import total_loss
from engines.algorithms.reduce import Counts, Number, StatTotals, over_updates
from engines.algorithms.spec import Algorithm
from engines.hf.batch import MicroBatch, Row, micro_batches, trained_row
from engines.hf.model import Policy
from engines.hf.optim import AdamW
from engines.intake import Intake


@dataclass(slots=True, eq=False)
class StepRows:
    """The rows of a step and what is known of them before the first update. Lists are per row, arrays [A]."""

    rows: list[Row]
    response_lengths: list[int]
    groups: list[int]
    advantages: list[Float64s] | None
    old_logprobs: list[np.ndarray] | None
    reference_logprobs: list[np.ndarray] | None = None

    @classmethod
    def of(cls, intake: Intake, algorithm: Algorithm) -> StepRows:
        """The rows of an intake; old logprobs are the sampler's, if the algorithm takes those."""
        from_sampler = "old_logprobs" in algorithm.needs and algorithm.bypass_old_logprobs
        return cls(
            rows=[row for exp in intake.rows if (row := trained_row(exp)) is not None],
            response_lengths=[exp.response_length for exp in intake.rows],
            groups=intake.groups,
            advantages=intake.advantages,
            old_logprobs=[exp.logprobs[exp.action_mask] for exp in intake.rows] if from_sampler else None,  # type: ignore[index]
        )


@dataclass(slots=True)
class StepReport:
    """What a step did."""

    num_applied: int = 0
    num_empty: int = 0
    """Updates without a row to train on."""
    num_nonfinite: int = 0
    """Updates skipped because a loss, a gradient or an input was not finite."""
    consecutive_nonfinite: int = 0
    """Skipped for that reason without an applied update in between, earlier steps included."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class TrainStep:
    """Makes the updates of a step with one policy and its optimizer."""

    def __init__(
        self, policy: Policy, reference: Policy | None, optimizer: AdamW, algorithm: Algorithm, token_budget: int
    ) -> None:
        self._policy = policy
        self._reference = reference
        self._optimizer = optimizer
        self._algorithm = algorithm
        self._budget = token_budget

    def run(self, rows: StepRows, num_updates: int, consecutive_nonfinite: int = 0) -> StepReport:
        """All updates of a step; `consecutive_nonfinite` is what the last report said."""
        self._score(rows, num_updates)
        report = StepReport(consecutive_nonfinite=consecutive_nonfinite)
        shares = _split_groups(rows.groups, num_updates)
        made: list[dict[str, Number]] = []
        for members in shares:
            if not members:
                report.num_empty += 1
                continue
            applied, metrics = self._update(rows, members)
            report.num_applied += applied
            report.num_nonfinite += not applied
            report.consecutive_nonfinite = 0 if applied else report.consecutive_nonfinite + 1
            made.append(metrics)
        report.metrics = over_updates(made)
        return report

    def _score(self, rows: StepRows, num_updates: int) -> None:
        """Logprobs that need a forward pass before the first update: the reference's, and the old ones.

        With one update the old logprobs are the current ones; `_loss_inputs` takes them from its own forward pass.
        """
        if self._reference is not None:
            rows.reference_logprobs = self._logprobs(self._reference, rows.rows)
        if "old_logprobs" in self._algorithm.needs and rows.old_logprobs is None and num_updates > 1:
            rows.old_logprobs = self._logprobs(self._policy, rows.rows)

    @torch.no_grad()
    def _logprobs(self, policy: Policy, rows: Sequence[Row]) -> list[np.ndarray]:
        """Per row [A]."""
        result: list[np.ndarray] = [np.empty(0)] * len(rows)
        for batch in micro_batches(rows, self._budget, policy.layout, policy.model.device):
            values = policy.logprobs(batch)[0].cpu().numpy()
            cuts = np.cumsum([len(rows[index].actions) for index in batch.rows])[:-1]
            for index, part in zip(batch.rows, np.split(values, cuts), strict=True):
                result[index] = part
        return result

    def _update(self, rows: StepRows, members: list[int]) -> tuple[bool, dict[str, Number]]:
        """One optimizer update on these rows: was it applied, and its metrics."""
        chosen = [rows.rows[index] for index in members]
        counts = Counts.of([len(row.actions) for row in chosen], [rows.response_lengths[index] for index in members])
        if not _finite_inputs(rows, members):
            return False, {"lr": Number(self._optimizer.next_lr, "last")}
        totals = StatTotals()
        for batch in micro_batches(chosen, self._budget, self._policy.layout, self._policy.model.device):
            loss, stats = total_loss(self._algorithm, self._loss_inputs(rows, members, batch), counts)
            loss.backward()
            totals.add(stats)
        metrics = totals.numbers(counts)
        update = self._optimizer.update(metrics["loss/total"].value)
        metrics |= {"grad/norm": Number(update.grad_norm, "mean"), "lr": Number(update.lr, "last")}
        return update.applied, metrics

    def _loss_inputs(self, rows: StepRows, members: list[int], batch: MicroBatch) -> LossInputs:
        """Forward pass of one micro-batch of `members`."""
        logprobs, entropies = self._policy.logprobs(batch, entropy="entropy" in self._algorithm.needs)

        def gather(per_row: list[np.ndarray] | None) -> Tensor | None:
            if per_row is None:
                return None
            values = np.concatenate([per_row[members[index]] for index in batch.rows])
            return torch.from_numpy(values).to(logprobs)

        old_logprobs = gather(rows.old_logprobs)
        if old_logprobs is None and "old_logprobs" in self._algorithm.needs:
            old_logprobs = logprobs.detach()
        return LossInputs(
            logprobs=logprobs,
            row_of_token=batch.row_of_token,
            num_actions=torch.bincount(batch.row_of_token, minlength=len(batch.rows)),
            old_logprobs=old_logprobs,
            advantages=gather(rows.advantages),
            reference_logprobs=gather(rows.reference_logprobs),
            entropies=entropies,
        )


def _finite_inputs(rows: StepRows, members: list[int]) -> bool:
    """False if an old or reference logprob or an advantage is not finite; the clamp of a loss might hide it."""
    known = (rows.old_logprobs, rows.reference_logprobs, rows.advantages)
    return all(np.isfinite(values[index]).all() for values in known if values is not None for index in members)


def _split_groups(groups: Sequence[int], num_updates: int) -> list[list[int]]:
    """Row indices of each update: whole groups in order, near-equal numbers of rows."""
    shares: list[list[int]] = [[] for _ in range(num_updates)]
    last_group, share = -1, 0
    order = sorted(range(len(groups)), key=lambda index: groups[index])
    for position, index in enumerate(order):
        if groups[index] != last_group:
            last_group, share = groups[index], position * num_updates // len(order)
        shares[share].append(index)
    return shares
