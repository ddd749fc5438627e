"""The flow `train`: one job, from its last commit to its end. This file is the whole of it; copy and change it."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from flows.progress import Progress
from flows.signals import stop_on_signals
from trinity_tasks.config import Config
from trinity_tasks.inspection import describe
from trinity_tasks.job import already_done, job_url
from trinity_tasks.loop import training_loop
from trinity_tasks.tasks import prefect_steps, prepare
from trinity_tasks.trainer import Trainer


@flow(name="train", flow_run_name="{config.name}", persist_result=False)
async def train(config: Config, parent_job_id: str | None = None) -> dict[str, Any] | State[Any]:
    """Train one job to its end. Run it again to resume: it goes on from the last commit, to the bit.

    Returns the job's state: URL, step, commits, evaluations. A stop request (SIGTERM, Ctrl-C, cancel in the UI) commits
    a checkpoint and ends as Cancelled; an error ends as Failed and commits nothing.

    Args:
        config: The job.
        parent_job_id: Job whose MLflow run this one's is shown under; for a stage of `finetune`.
    """
    config.require_one_job("train")
    if already_done(config):
        return {**describe(job_url(config)).model_dump(mode="json"), "already_finished": True}
    trainer = Trainer(config)
    trainer.parent_job_id = parent_job_id
    try:
        with stop_on_signals(trainer.request_stop), Progress(config.name, config.trainer.total_steps) as progress:
            trainer.observers.append(progress.update)
            trainer.batch_observers.append(progress.rollouts.update)
            await prepare(trainer)
            await training_loop(trainer, prefect_steps(trainer))
    finally:
        await trainer.shutdown()
    state = describe(trainer.job.url)
    if not trainer.complete:
        stopped = f"at step {state.step}, which is committed" if state.step else "before its first step"
        return Cancelled(message=f"{config.name}: stopped {stopped}; run it again to go on")
    return {**state.model_dump(mode="json"), "already_finished": False}
