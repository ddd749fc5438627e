"""The flow `finetune`: the stages of a config one after another (sft, grpo, ...), then the proof that it learnt."""

from __future__ import annotations

import time
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from flows.summary import Summary
from flows.train import train
from trinity_tasks.config import Config
from trinity_tasks.inspection import JobState
from trinity_tasks.stages import StagedRun


@flow(name="finetune", flow_run_name="{config.name}", persist_result=False)
async def finetune(config: Config) -> dict[str, Any] | State[Any]:
    """Fine-tune a model: every stage is a job of its own, and starts from the last checkpoint of the one before.

    Run it again to resume: finished stages are skipped, the one that was interrupted goes on. Returns the summary:
    held-out accuracy before and after, the reward curve, sample rollouts, the checkpoint's URL.
    """
    started = time.monotonic()
    run = StagedRun(config)
    try:
        run.open()
        for stage in run.remaining():
            state = await train(stage, run.parent_job_id, return_state=True)
            if state.is_cancelled():
                return Cancelled(message=state.message)
            run.finished((await state.aresult())["url"])
        summary = summarize(run.results, duration_s=time.monotonic() - started)
        ...
    finally:
        run.close()
