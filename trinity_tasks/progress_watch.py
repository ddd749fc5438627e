"""`ProgressWatch`: tells the user when a run goes on and nothing comes of it.

Owns: counting steps without an update, and explored shards without a batch. Does not own: either kind of step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from engines.errors import StarvedError

logger = logging.getLogger(__name__)

IDLE_STEPS = (10, 100, 1000)
"""Steps in a row without an update after which the user is told."""
MAX_SHARDS_IN_VAIN = 100
"""Shards in a row that leave the buffer short of a batch, after which exploring is given up."""


class ProgressWatch:
    """Of one run; `name` is for messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_idle_steps = 0
        self._idle_steps_told = 0
        self._num_shards = 0
        self._num_rows = 0.0
        self._dropped: dict[str, float] = {}

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """A train step has measured this."""
        self._num_shards, self._num_rows, self._dropped = 0, 0.0, {}
        if num_nonfinite := metrics.get("update/num_nonfinite", 0):
            logger.warning(
                "%s: %d updates of step %d were left out: a loss, a gradient or a logprob was not finite. The policy "
                "loss, the rewards or the learning rate are to blame",
                *(self._name, num_nonfinite, step),
            )
        idle = metrics.get("update/num_applied", 1) == 0
        self._num_idle_steps = self._num_idle_steps + 1 if idle else 0
        if self._num_idle_steps in IDLE_STEPS and self._num_idle_steps > self._idle_steps_told:
            self._idle_steps_told = self._num_idle_steps
            logger.warning(
                "%s: the last %d steps up to step %d made no update: there was nothing to learn from. Either all "
                "answers to a task get the same reward (data/reward_std says so) and the reward function or the tasks "
                "are to blame, or the updates were not finite (update/num_nonfinite)",
                *(self._name, self._num_idle_steps, step),
            )

    def explored(self, metrics: Mapping[str, float]) -> None:
        """An explorer's step has measured this. Raises StarvedError after very many without a train step between."""
        self._num_shards += 1
        self._num_rows += metrics.get("explore/num_rows", 0.0)
        for name, value in metrics.items():
            if name.startswith("operator/") and name.endswith("/num_dropped"):
                operator = name.split("/")[1]
                self._dropped[operator] = self._dropped.get(operator, 0.0) + value
        if self._num_shards >= MAX_SHARDS_IN_VAIN:
            dropped = ", ".join(f"{operator} {count:.0f}" for operator, count in self._dropped.items()) or "nothing"
            raise StarvedError(
                f"{self._name}: {self._num_shards} explorer steps gave {self._num_rows:.0f} experiences and no batch "
                f"to train on; operators dropped: {dropped}. Loosen buffer.operators, use easier or harder tasks, or "
                "lower buffer.train_batch_size"
            )
