"""Flows run in this process, what they leave, and the trouble they are put in.

Needs a Prefect server: see `tests.prefect_server`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.flows import Flow

from engines.experience import Experience
from trinity_tasks.buffer.shards import decode
from trinity_tasks.config import Config
from trinity_tasks.inspection import describe
from trinity_tasks.job import job_url

FLOW_MARKS = [
    pytest.mark.integration,
    pytest.mark.usefixtures("api"),
    pytest.mark.timeout(300),  # of the first test: a fresh Prefect server takes a minute on a busy machine
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # prefect 3.9 leaves sockets open
]
"""Of a module whose tests run flows."""


def run(flow: Flow[..., Any], *args: Any) -> State[Any]:
    """The flow run's last state, as the server has accepted it."""
    return asyncio.run(flow(*args, return_state=True))


def result(state: State[Any]) -> Any:
    """What the flow returned or raised."""
    return asyncio.run(state.aresult(raise_on_failure=False))


def folder(config: Config) -> Path:
    return Path(job_url(config))


def tracked(config: Config) -> tuple[str, list[int]]:
    """Status of the job's MLflow run, and the steps whose loss it has."""
    client = MlflowClient(f"sqlite:///{config.checkpoint_root_dir}/mlflow.db")
    run_id = json.loads((folder(config) / "job.json").read_text())["mlflow_run_id"]
    status = client.get_run(run_id).info.status
    return status, [point.step for point in client.get_metric_history(run_id, "loss/policy")]


def artifacts(state: State[Any], kind: str) -> list[Any]:
    """Data of the flow run's artifacts of that kind."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts()
    return [item.data for item in found if item.type == kind and item.flow_run_id == state.state_details.flow_run_id]


def committed(config: Config) -> list[int]:
    return [commit.step for commit in describe(job_url(config)).commits]


def shards(config: Config, writer: str) -> list[list[Experience]]:
    """Rows of each shard that the writer has written, in order."""
    files = sorted((folder(config) / "experiences" / "main").glob(f"{writer}-*.parquet"))
    found = [decode(file.read_bytes(), file.name) for file in files]
    return [shard.rows(0, shard.num_rows) for shard in found]


def written(config: Config, writer: str = "explorer") -> list[str]:
    """Identities of all rows that the writer has written, in order."""
    return [row.eid.uid for rows in shards(config, writer) for row in rows]


# -- trouble -----------------------------------------------------------------------------------------------------------


def fails(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, errors: Sequence[Exception | None]) -> list[int]:
    """Make a method raise what is given for each of its calls in turn; None: it works. Returns a list of its calls."""
    original, planned = getattr(owner, method), iter(errors)
    calls: list[int] = []

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls) + 1)
        if (error := next(planned, None)) is not None:
            raise error
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, failing)
    return calls


def signals_at(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int, number: int = signal.SIGTERM
) -> list[int]:
    """Have this process signalled within a call of a method. Returns a list of its calls."""
    calls = fails(monkeypatch, owner, method, [])
    counted = getattr(owner, method)

    def signalling(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(calls) + 1 == call:
            os.kill(os.getpid(), number)
        return counted(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, signalling)
    return calls
