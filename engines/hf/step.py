"""One train step on one process: the rows of a batch become optimizer updates and metrics.

Owns: the order of forward passes, the split into updates, skipping of updates that cannot be made. Does not own: the
formulas (`engines.algorithms`), advantages (`engines.advantage_stage`), threads and files (`engines.hf.engine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engines.advantage_stage import needs_scores, penalised, with_advantages, with_selection
from engines.algorithms.inputs import LossInputs
from engines.algorithms.kl import adapted, penalty
from engines.algorithms.objective import Objective
from engines.algorithms.reduce import Number, StatTotals, counts_by_part, over_updates
from engines.algorithms.spec import Algorithm, KlParams, function_of, name_of
from engines.hf.batch import MicroBatch, micro_batches
from engines.hf.model import Policy
from engines.hf.models import Models
from engines.rows import Column, PerRow, StepRows

KL_MEASURES = {"kl": "kl/reference", "kl_penalty": "kl/penalty"}
"""Part of the algorithm -> metric that an adaptive coefficient follows."""
FINITE: tuple[Column, ...] = ("old_logprobs", "reference_logprobs", "rollout_logprobs", "advantages")
"""Checked before an update; the clamp of a loss might hide what is not finite."""


@dataclass(slots=True)
class StepReport:
    """What a step did."""

    num_applied: int = 0
    num_empty: int = 0
    """Updates without anything to learn from: no row, or every advantage 0."""
    num_nonfinite: int = 0
    """Updates skipped because a loss, a gradient or an input was not finite."""
    consecutive_nonfinite: int = 0
    """Skipped for that reason without an applied update in between, earlier steps included."""
    num_trained_tokens: int = 0
    num_read_tokens: int = 0
    """Tokens of the rows that trained, prompts included."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class TrainStep:
    """Makes the updates of a step."""

    def __init__(self, models: Models, algorithm: Algorithm, token_budget: int, critic_warmup: int = 0) -> None:
        """critic_warmup: train steps in which only the critic learns. Raises ConfigError for a function that is not
        there.
        """
        for part in (algorithm.advantage, *algorithm.filters):
            if part is not None:
                function_of(part)
        self._selects = algorithm.loss.selection is not None
        self._models = models
        self._algorithm = algorithm
        self._objective = Objective(algorithm)
        self._budget = token_budget
        self._critic_warmup = critic_warmup
        self.kl_coefficients = {
            part: params.kl_coef
            for part in KL_MEASURES
            if isinstance(params := getattr(algorithm, part), KlParams) and params.active and params.adaptive
        }
        """Adapted so far; part of the snapshot."""

    def run(self, rows: StepRows, num_updates: int, step: int, seed: int, consecutive_nonfinite: int = 0) -> StepReport:
        """All updates of a step, after `step` steps; `consecutive_nonfinite` is what the last report said.

        Raises DataError if the rows are not what the advantage needs; nothing has changed then.
        """
        rows, stats = self._prepared(rows, num_updates, seed)
        report = StepReport(consecutive_nonfinite=consecutive_nonfinite, metrics=stats)
        made: list[dict[str, Number]] = []
        for members in _split_groups(rows.groups, num_updates):
            if not members:
                report.num_empty += 1
                continue
            share = rows.chosen(members)
            if not self._algorithm.bypass_old_logprobs and not report.num_applied:
                # The weights are still the old ones: a ratio to the update's own forward pass is exactly 1, one to a
                # pass over other micro-batches only nearly.
                share = share.without_column("old_logprobs")
            learns = self._has_signal(share)
            applied, metrics = self._update(share, step, learns)
            made.append(metrics)
            if not learns:
                report.num_empty += 1
                continue
            report.num_applied += applied
            report.num_nonfinite += not applied
            report.consecutive_nonfinite = 0 if applied else report.consecutive_nonfinite + 1
        report.num_trained_tokens = int(rows.lengths.sum())
        report.num_read_tokens = sum(len(row.tokens) for row in rows.rows)
        report.metrics |= over_updates(made)
        self._adapt_kl(report.metrics, len(rows))
        return report

    # -- before the first update --------------------------------------------------------------------------------------

    def _prepared(self, rows: StepRows, num_updates: int, seed: int) -> tuple[StepRows, dict[str, float]]:
        """The rows that train, with all columns that the loss reads, and stats."""
        algorithm, stats = self._algorithm, dict[str, float]()
        if needs_scores(algorithm, rows):
            rows = self._scored(rows, num_updates)
            if algorithm.has_reward_penalty:
                rows, stats["kl/penalty"] = self._penalised(rows)
            rows, advantage_stats = with_advantages(rows, algorithm, seed)
        else:
            rows, advantage_stats = with_advantages(rows, algorithm, seed)
            rows = self._scored(rows, num_updates)
        return with_selection(rows, algorithm, seed), stats | advantage_stats

    def _scored(self, rows: StepRows, num_updates: int) -> StepRows:
        """The rows with what takes a forward pass before the first update.

        In the first update the old logprobs are the current ones, and `_loss_inputs` takes them from its own forward
        pass: with one update they are computed here only if something else reads them first.
        """
        algorithm, models, needs = self._algorithm, self._models, self._algorithm.needs
        columns: dict[Column, PerRow] = {}
        if "old_logprobs" in needs and "old_logprobs" not in rows.columns:
            read_first = self._selects or needs_scores(algorithm, rows)
            if num_updates > 1 or read_first:
                columns["old_logprobs"] = self._logprobs(models.policy, rows)
        if models.reference is not None:
            columns["reference_logprobs"] = self._logprobs(models.reference, rows)
        if "teacher_logprobs" in needs and "teacher_logprobs" not in rows.columns:
            assert models.teacher is not None
            columns["teacher_logprobs"] = self._logprobs(models.teacher, rows)
        if "distribution" in needs:
            columns |= self._distributions(rows)
        rows = rows.with_columns(columns)
        return rows if models.critic is None else models.critic.with_values(rows, self._budget)

    def _penalised(self, rows: StepRows) -> tuple[StepRows, float]:
        """The rows with lower rewards, and the mean KL of the sampled ones: what an expert wrote is no sample."""
        params = self._algorithm.kl_penalty
        old, reference = rows.flat("old_logprobs"), rows.flat("reference_logprobs")
        assert old is not None
        assert reference is not None
        divergence = penalty(name_of(params), torch.from_numpy(old), torch.from_numpy(reference)).numpy()
        sampled = divergence[np.repeat(~np.array(rows.is_expert, np.bool_), rows.lengths)]
        measured = float(sampled.mean()) if len(sampled) else 0.0
        coefficient = self.kl_coefficients.get("kl_penalty", params.kl_coef)
        return penalised(rows, divergence, coefficient), measured

    @torch.no_grad()
    def _logprobs(self, policy: Policy, rows: StepRows) -> PerRow:
        """Per row [A]."""
        result: PerRow = [np.empty(0)] * len(rows)
        for batch in self._batches(rows):
            batch.scatter(policy.logprobs(batch)[0], result)
        return result

    @torch.no_grad()
    def _distributions(self, rows: StepRows) -> dict[Column, PerRow]:
        """Entropies and expected scores under the policy, per row [A]."""
        entropies: PerRow = [np.empty(0)] * len(rows)
        scores: PerRow = [np.empty(0)] * len(rows)
        for batch in self._batches(rows):
            entropy, score = self._models.policy.distributions(batch)
            batch.scatter(entropy, entropies)
            batch.scatter(score, scores)
        return {"entropies": entropies, "expected_scores": scores}

    def _batches(self, rows: StepRows) -> list[MicroBatch]:
        policy = self._models.policy
        together = 2 if "pairs" in self._algorithm.needs else 1
        return micro_batches(rows.rows, self._budget, policy.layout, policy.model.device, together=together)

    # -- updates ------------------------------------------------------------------------------------------------------

    def _has_signal(self, rows: StepRows) -> bool:
        """False if every advantage is 0, so that a KL term alone would move the policy.

        Beside the reference its gradient is rounding noise, which Adam scales up to whole steps.
        """
        others = self._models.critic is not None or any(rows.is_expert) or "entropy" in self._algorithm.needs
        if others or not self._algorithm.loss.takes_advantages:
            return True
        advantages = rows.columns.get("advantages")
        return advantages is None or any(values.any() for values in advantages)

    def _update(self, rows: StepRows, step: int, learns: bool) -> tuple[bool, dict[str, Number]]:
        """One update of the critic, if there is one, and of the policy: was it applied, and its metrics.

        learns: False measures only.
        """
        optimizer, critic = self._models.optimizer, self._models.critic
        if not _finite_inputs(rows):
            return False, {"lr": Number(optimizer.next_lr, "last")}
        metrics = {} if critic is None else critic.update(rows, self._budget, self._algorithm.aggregation)
        if critic is not None and step < self._critic_warmup:
            return critic.last_applied, metrics
        counts = counts_by_part(rows.lengths.tolist(), rows.response_lengths, rows.is_expert)
        totals = StatTotals()
        for batch in self._batches(rows):
            with torch.set_grad_enabled(learns):
                loss, stats = self._objective.loss(self._loss_inputs(rows, batch, step), counts)
            if learns:
                loss.backward()
            totals.add(stats)
        metrics |= totals.numbers(counts)
        if not learns:
            return False, metrics | {"grad/norm": Number(0.0, "mean"), "lr": Number(optimizer.next_lr, "last")}
        update = optimizer.update(metrics["loss/total"].value)
        metrics |= {"grad/norm": Number(update.grad_norm, "mean"), "lr": Number(update.lr, "last")}
        return update.applied, metrics

    def _loss_inputs(self, rows: StepRows, batch: MicroBatch, step: int) -> LossInputs:
        """Forward pass of one micro-batch."""
        needs = self._algorithm.needs
        logprobs, entropies = self._models.policy.logprobs(batch, entropy="entropy" in needs)

        def gather(column: Column) -> Tensor | None:
            if column not in rows.columns:
                return None
            values = batch.gather(rows.columns[column])
            return values.to(logprobs.device) if values.dtype == torch.bool else values.to(logprobs)

        old_logprobs = gather("old_logprobs")
        if old_logprobs is None and "old_logprobs" in needs:
            old_logprobs = logprobs.detach()
        is_expert = None
        if any(rows.is_expert):
            of_row = torch.tensor([rows.is_expert[index] for index in batch.rows], device=logprobs.device)
            is_expert = of_row[batch.row_of_token]
        return LossInputs(
            logprobs=logprobs,
            row_of_token=batch.row_of_token,
            num_actions=batch.num_actions,
            old_logprobs=old_logprobs,
            advantages=gather("advantages"),
            reference_logprobs=gather("reference_logprobs"),
            rollout_logprobs=gather("rollout_logprobs"),
            entropies=entropies,
            selected=gather("selected"),
            is_expert=is_expert,
            step=step,
        )

    # -- after the last update ----------------------------------------------------------------------------------------

    def set_kl_coefficients(self, coefficients: dict[str, float]) -> None:
        """Go on with these; of a snapshot."""
        self.kl_coefficients |= coefficients
        if "kl" in self.kl_coefficients:
            self._objective.set_kl_coefficient(self.kl_coefficients["kl"])

    def _adapt_kl(self, metrics: dict[str, float], num_rows: int) -> None:
        for part, coefficient in self.kl_coefficients.items():
            metrics[f"kl/{part}_coef"] = coefficient
            if (measured := metrics.get(KL_MEASURES[part])) is not None and np.isfinite(measured):
                params: KlParams = getattr(self._algorithm, part)
                self.kl_coefficients[part] = adapted(coefficient, params, measured, num_rows)
        self.set_kl_coefficients({})


def _finite_inputs(rows: StepRows) -> bool:
    """False if a number that the loss reads is not finite."""
    return all(bool(np.isfinite(values).all()) for name in FINITE for values in rows.columns.get(name, ()))


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
