"""Everything about a finished job that must not depend on how often it was killed, as comparable values."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient

NOT_COMPARED = ("time/", "perf/")
"""Groups of metrics that measure the machine, not the training."""


def final_state(job: Path) -> dict[str, str]:
    """sha256 of every file of the last commit that training determines."""
    newest_first = sorted((job / "commits").glob("0*.json"), reverse=True)
    manifests = (json.loads(file.read_text()) for file in newest_first)
    manifest = next(each for each in manifests if each["kind"] == "checkpoint")
    names = [file["path"].removeprefix(manifest["prefix"] + "/") for file in manifest["files"]]
    kept = [name for name in names if name != "metrics_spool.json"]
    return {name: hashlib.sha256((job / manifest["prefix"] / name).read_bytes()).hexdigest() for name in kept}


def ledger(job: Path) -> dict[str, Any]:
    """Which rows each step took."""
    return {file.name: json.loads(file.read_text())["ranges"] for file in sorted((job / "ledger").glob("step_*.json"))}


def metrics(root: Path, job: Path) -> dict[str, list[tuple[int, float]]]:
    """History of every compared metric of the job's one MLflow run: (step, value), as the server has it."""
    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    job_id = json.loads((job / "job.json").read_text())["job_id"]
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"tags.`trinity.job_id` = '{job_id}'")
    assert run.info.status == "FINISHED"
    return {
        key: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
        if not key.startswith(NOT_COMPARED)
    }
