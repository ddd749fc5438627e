"""The critic: a model of its own with one number per token, its optimizer, and its part of the snapshot.

Owns: values before a step, the update of the critic. Does not own: the loss (`engines.algorithms.value`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engines.algorithms.inputs import LossInputs, Part, Reduction, Stat
from engines.algorithms.reduce import Number, StatTotals, aggregate, counts_by_part
from engines.algorithms.spec import Aggregation
from engines.algorithms.value import clipped_value_loss
from engines.config import CriticConfig
from engines.errors import CheckpointError
from engines.hf import model as hf_model
from engines.hf.batch import MicroBatch, micro_batches
from engines.hf.model import LoadedModel, Policy
from engines.hf.optim import AdamW
from engines.rows import PerRow, Row, StepRows

HEAD = "value_head.safetensors"


class Critic:
    """Values V of the state before each action token.

    Example:
        >>> rows = critic.with_values(rows, 2048)                  # doctest: +SKIP
        >>> metrics = critic.update(rows, 2048, "token-mean")      # doctest: +SKIP
    """

    last_applied = True
    """Whether the last update was applied."""

    def __init__(self, loaded: LoadedModel, policy: Policy, config: CriticConfig, total_updates: int | None) -> None:
        """`policy` runs the trunk of `loaded`. The head begins at 0: so do all values."""
        self._loaded, self._trunk, self._config = loaded, policy, config
        width = policy.head.weight.shape[1]
        self.head = nn.Linear(width, 1, device=loaded.model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.optimizer = AdamW(
            nn.ModuleDict({"trunk": loaded.model.base_model, "head": self.head}), config.optimizer, total_updates
        )

    def values(self, batch: MicroBatch) -> Tensor:
        """[A], in the precision of the head, with gradient."""
        return self.head(self._trunk.hidden(batch).to(self.head.weight.dtype)).squeeze(1)

    @torch.no_grad()
    def with_values(self, rows: StepRows, budget: int) -> StepRows:
        """The rows with the column `values`, and what a truncated response would have been worth from there on."""
        longer = [_one_longer(row) if cut else row for row, cut in zip(rows.rows, rows.is_truncated, strict=True)]
        result: PerRow = [np.empty(0)] * len(rows)
        for batch in micro_batches(longer, budget, self._trunk.layout, self._loaded.model.device):
            batch.scatter(self.values(batch), result)
        bootstrap = np.array(
            [float(v[-1]) if cut and len(v) else 0.0 for v, cut in zip(result, rows.is_truncated, strict=True)]
        )
        values = [v[:-1] if cut and len(v) else v for v, cut in zip(result, rows.is_truncated, strict=True)]
        return dataclasses.replace(rows.with_columns({"values": values}), bootstrap=bootstrap)

    def update(self, rows: StepRows, budget: int, mode: Aggregation) -> dict[str, Number]:
        """One update towards the column `returns`; its metrics."""
        counts = counts_by_part(rows.lengths.tolist(), rows.response_lengths, rows.is_expert)
        totals = StatTotals()
        for batch in micro_batches(rows.rows, budget, self._trunk.layout, self._loaded.model.device):
            values = self.values(batch)
            old_values, returns = (batch.gather(rows.columns[name]).to(values) for name in ("values", "returns"))
            loss = clipped_value_loss(values, old_values, returns, self._config.cliprange_value)
            inputs = LossInputs(logprobs=values, row_of_token=batch.row_of_token, num_actions=batch.num_actions)
            share = aggregate(loss, inputs, mode, counts[Part.ALL])
            share.backward()
            totals.add(loss.stats | {"critic/loss": Stat(share.detach(), Reduction.SUM)})
        metrics = totals.numbers(counts)
        update = self.optimizer.update(metrics["critic/loss"].value)
        self.last_applied = update.applied
        return metrics | {"critic/grad_norm": Number(update.grad_norm, "mean"), "critic/lr": Number(update.lr, "last")}

    def save(self, folder: Path) -> None:
        """Write the trunk as an HF folder, and the head beside it."""
        hf_model.save(self._loaded, folder)
        save_file({name: value.detach().contiguous() for name, value in self.head.state_dict().items()}, folder / HEAD)

    def load_head(self, folder: Path) -> None:
        """Take the head back from a folder that `save` wrote. Raises CheckpointError if it is not there."""
        try:
            self.head.load_state_dict(load_file(folder / HEAD))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"the critic's head in {folder} cannot be restored: {error}") from error


def _one_longer(row: Row) -> Row:
    """With one more action after the last token: its predictor is the state there. What it would be is never read."""
    if not len(row.actions):
        return row
    return Row(np.append(row.tokens, 0), np.append(row.actions, len(row.tokens)))
