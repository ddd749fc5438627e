"""The flow `finetune`: the stages of a config one after another (sft, grpo, ...), then the proof that it learnt."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any, cast

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled

from flows import environment
from flows.summary import Summary
from flows.train import train
from trinity_tasks.config import Config
from trinity_tasks.stages import StagedRun


@flow(name="finetune", flow_run_name="{config.name}", persist_result=False)
async def finetune(config: Config) -> dict[str, Any] | State[Any]:
    """Fine-tune a model: every stage is a job of its own, and starts from the last checkpoint of the one before.

    Run it again to resume: finished stages are skipped, the one that was interrupted goes on; if all are finished,
    nothing is trained. Returns the summary: held-out accuracy before and after, the reward curve, sample rollouts, the
    checkpoint's URL.

    Args:
        config: The job; its stages run in this order.
    """
    started = environment.COMMAND_STARTED or time.monotonic()
    run = StagedRun(config)
    if (summary := run.finished_summary()) is not None:
        return {**summary, "already_finished": True}
    status = "FAILED"
    try:
        run.open()
        for stage in run.remaining():
            call = train(stage, run.parent_job_id, return_state=True)
            state = await cast("Awaitable[State[Any]]", call)  # Prefect's type of it lacks the coroutine
            if state.is_cancelled():
                status = "KILLED"
                return Cancelled(message=state.message)
            run.finished((await state.aresult())["url"])
        result = Summary.of(
            run.results,
            {"reward": run.history("data/reward_mean")},
            time.monotonic() - started,
            reward_curve=run.url_of("summary/reward_curve.png"),
            mlflow_ui=run.mlflow_ui,
            flow_run_id=flow_run.id,
        )
        run.publish(result.texts(), result.files(), result.metrics())
        status = "FINISHED"
    finally:
        run.close(status)
    return {**result.model_dump(mode="json"), "already_finished": False}
