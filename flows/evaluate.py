"""The flow `evaluate`: accuracy of a job's last checkpoint on tasks never trained on."""

from __future__ import annotations

from typing import Any

from prefect import flow

from trinity_tasks.config import Config
from trinity_tasks.standalone import evaluate_checkpoint


@flow(name="evaluate", flow_run_name="{config.name}", persist_result=False)
async def evaluate(config: Config) -> dict[str, Any]:
    """Measure the last checkpoint of the job; of a config with stages, that of its last stage.

    A result belongs to (checkpoint, task set) and is kept with the job: measuring again reads it.

    Args:
        config: The job, as it was trained.
    """
    job = config.stage(config.stages[-1].stage_name) if config.stages else config
    results = await evaluate_checkpoint(job)
    return {"name": job.name, "evaluations": [result.model_dump(mode="json") for result in results]}
