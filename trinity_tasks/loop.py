"""The training loop, written once. `Trainer.train` runs it as plain calls, `flows.train` as Prefect tasks.

To change the loop, copy these few lines into a flow of your own: every step is an ordinary awaitable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

Step = Callable[[], Awaitable[object]]


class Steps(NamedTuple):
    """What the loop calls. Each does one thing that can be seen, timed and retried on its own."""

    explore_step: Step
    """Sample one shard of experiences and write it to the buffer."""
    train_step: Step
    """Train on the next batch of the buffer; None when the data has ended."""
    sync_weight: Step
    """Hand the current weights to the samplers."""
    save_checkpoint: Step
    """Commit everything that a resume needs."""
    evaluate: Step
    """Measure the current weights on tasks never trained on."""


class Standing(Protocol):
    """What the loop asks about where the run stands. `Trainer` answers; meanings are documented there."""

    stop_requested: bool

    @property
    def finished(self) -> bool: ...
    @property
    def needs_experiences(self) -> bool: ...
    @property
    def needs_evaluation(self) -> bool: ...
    @property
    def needs_final_save(self) -> bool: ...
    @property
    def save_publishes_weights(self) -> bool: ...
    async def need_sync(self) -> bool: ...
    def need_save(self) -> bool: ...
    def log_step(self) -> None: ...
    def raise_if_starved(self) -> None: ...


async def training_loop(trainer: Standing, steps: Steps) -> None:
    """Run until total_steps, the end of the data, or a stop request; then commit. Errors propagate and commit nothing.

    Raises StarvedError, after the commit, if the data ended before total_steps or before the first step.

    Order per step: explore (if the buffer lacks a batch), train, sync, save, evaluate, log. A full checkpoint is a
    superset of published weights, so a sync by method `checkpoint` that falls on a save is left to the save.
    """
    if trainer.needs_evaluation:
        await steps.evaluate()
    while not trainer.finished and not trainer.stop_requested:
        while trainer.needs_experiences:
            await steps.explore_step()
        if await steps.train_step() is None:
            break
        sync, save = await trainer.need_sync(), trainer.need_save()
        if sync and not (save and trainer.save_publishes_weights):
            await steps.sync_weight()
        if save:
            await steps.save_checkpoint()
        if trainer.needs_evaluation:
            await steps.evaluate()
        trainer.log_step()
    if trainer.needs_final_save:
        await steps.save_checkpoint()
    trainer.raise_if_starved()
