"""The flow `compare`: several jobs side by side."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.artifacts import acreate_table_artifact

from trinity_tasks.config import Config
from trinity_tasks.inspection import describe
from trinity_tasks.job import job_url


@flow(name="compare", persist_result=False)
async def compare(configs: list[Config]) -> dict[str, Any]:
    """One row per job and stage: step, accuracy before and after, checkpoint, MLflow run. Also a table in the UI.

    Args:
        configs: The jobs; of a job with stages, every stage.
    """
    jobs = [job for config in configs for job in _stages(config)]
    rows = [row for job in jobs for row in _rows(job)]
    await acreate_table_artifact(key="compare", table=rows, description="Jobs side by side")
    return {"jobs": rows}


def _stages(config: Config) -> list[Config]:
    return [config.stage(stage.stage_name) for stage in config.stages] or [config]


def _rows(config: Config) -> list[dict[str, Any]]:
    state = describe(job_url(config))
    shared = {
        "name": state.name,
        "step": state.step,
        "finished": state.finished,
        "experiences": state.num_experiences_trained,
        "checkpoint": state.checkpoint_url,
        "mlflow_run_id": state.mlflow_run_id,
    }
    names = list(dict.fromkeys(item.taskset for item in state.evaluations))
    measured = [[item for item in state.evaluations if item.taskset == name] for name in names]
    return [
        {**shared, "taskset": items[0].taskset, "accuracy_before": items[0].accuracy, "accuracy": items[-1].accuracy}
        for items in measured
    ] or [{**shared, "taskset": None, "accuracy_before": None, "accuracy": None}]
