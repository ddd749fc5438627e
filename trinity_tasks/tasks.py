"""The loop's steps as Prefect tasks: the only module of this package that knows Prefect.

Arguments are the plain `Trainer` (Prefect does not walk plain classes), results are small dicts of floats; nothing is
cached or persisted. Retries only where repeating is harmless: sampling, transfer, saving. Never on `train_step`:
recovery there is the flow's retry, which prepares again from the last commit.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import FlowRunContext
from prefect.tasks import Task, exponential_backoff

from engines.errors import ConfigError, DataError, LeaseLost, TrinityFlowsError
from trinity_tasks.loop import Step, Steps
from trinity_tasks.trainer import Trainer

logger = logging.getLogger(__name__)

Worker = TypeVar("Worker")
Result = TypeVar("Result")

NEVER_RETRIED = (ConfigError, DataError, LeaseLost)
"""Repeating cannot help, or must not happen."""

PLAIN: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}


async def _may_help(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    error = await state.aresult(raise_on_failure=False)
    return not isinstance(error, NEVER_RETRIED)


RETRIED: dict[str, Any] = {
    **PLAIN,
    "retries": 3,
    "retry_delay_seconds": exponential_backoff(backoff_factor=2),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": _may_help,
}


class Explores(Protocol):
    """A trainer in mode both, or an explorer of its own."""

    async def explore_step(self) -> dict[str, float]:
        """Write the next shard."""
        ...


@task(**PLAIN)
async def prepare(trainer: Trainer) -> None:
    """Take the lease, restore the last commit, build the engine, open the metrics."""
    await trainer.prepare()


@task(**RETRIED)
async def explore_step(explorer: Explores) -> dict[str, float]:
    """Sample one shard of experiences."""
    return await explorer.explore_step()


@task(**PLAIN)
async def train_step(trainer: Trainer) -> dict[str, float] | None:
    """Train on the next batch; None when the data has ended."""
    return await trainer.train_on_next_batch()


@task(**RETRIED)
async def sync_weight(trainer: Trainer) -> dict[str, float]:
    """Hand the current weights to the samplers."""
    return await trainer.sync_weight()


@task(**RETRIED)
async def save_checkpoint(trainer: Trainer) -> dict[str, float]:
    """Commit everything that a resume needs."""
    return await trainer.save_now()


@task(**RETRIED)
async def evaluate(trainer: Trainer) -> dict[str, float]:
    """Measure the current weights on tasks never trained on."""
    return await trainer.evaluate()


def prefect_steps(trainer: Trainer) -> Steps:
    """The loop's steps as task runs of the flow that is running.

    A task run costs milliseconds here and at the server. So what happens in this process in every step is a plain call:
    a hand-over of weights in memory, which has nothing to retry, and exploring, which becomes a task run once it fails.
    """

    def as_task(task: Callable[[Trainer], Awaitable[object]]) -> Step:
        return partial(forgotten, task, trainer)

    in_memory = trainer.config.synchronizer.sync_method == "memory"
    return Steps(
        explore_step=partial(_explore, trainer),
        train_step=as_task(train_step),
        sync_weight=trainer.sync_weight if in_memory else as_task(sync_weight),
        save_checkpoint=as_task(save_checkpoint),
        evaluate=as_task(evaluate),
    )


async def _explore(trainer: Trainer) -> object:
    """One step is the same whoever calls it, and however often: see `Explorer`."""
    try:
        return await trainer.explore_step()
    except NEVER_RETRIED:
        raise
    except TrinityFlowsError as error:
        logger.warning("exploring failed and is tried again as a task run: %s", error)
        return await forgotten(explore_step, trainer)


async def forgotten(task: Callable[[Worker], Awaitable[Result]], worker: Worker) -> Result:
    """Run a task and let Prefect forget its result.

    A flow run keeps every number that a task returned, to find out which task's input is another's output: a leak of
    kilobytes per step, for dependencies that these tasks do not have.
    """
    result = await task(worker)
    if (context := FlowRunContext.get()) is not None:
        context.run_results.clear()
    return result
