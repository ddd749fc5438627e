"""The table of rollouts on a real Prefect server: what it shows is what the ledger says has trained."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import Artifact

from flows import progress
from flows.finetune import finetune
from flows.train import train
from tests.fake_engine import FakeEngine
from tests.fake_job import STAGES, fake_config
from tests.integration.flow_runs import FLOW_MARKS, run, shards
from trinity_tasks.config import Config
from trinity_tasks.inspection import describe, trace_step
from trinity_tasks.job import job_url

pytestmark = FLOW_MARKS


def tables(key: str) -> list[Artifact]:
    """All artifacts of this key, oldest first."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts()
    return sorted((item for item in found if item.key == key), key=lambda item: str(item.created))


def expected(config: Config) -> list[dict[str, Any]]:
    """Of each step in the ledger the first row of the lowest and of the highest reward, newest step first."""
    lengths = {row.eid.uid: row.response_length for rows in shards(config, "explorer") for row in rows}
    shown: list[dict[str, Any]] = []
    for step in range(describe(job_url(config)).num_steps_recorded, 0, -1):
        rows = trace_step(job_url(config), step)["experiences"]
        rewards = [row["reward"] for row in rows]
        ends = dict.fromkeys((rewards.index(min(rewards)), rewards.index(max(rewards))))
        shown += [
            {
                "step": step,
                "task": "/".join(rows[index]["eid"].split("/")[:2]),
                "prompt": rows[index]["prompt"],
                "response": rows[index]["response"],
                "reward": rows[index]["reward"],
                "response_length": lengths[rows[index]["eid"]],
                "policy_version": rows[index]["model_version"],
            }
            for index in ends
        ]
    return shown


def test_the_table_of_a_run_is_what_the_ledger_says(job_root: Path) -> None:
    config = fake_config(job_root, "name=shown_rollouts")
    state = run(train, config)
    (table,) = tables("rollouts-shown-rollouts")
    assert (table.type, table.flow_run_id) == ("table", state.state_details.flow_run_id)
    rows = json.loads(str(table.data))
    assert rows == expected(config)
    assert len(rows) > 6
    assert table.description == "shown_rollouts: lowest and highest reward of each step, up to step 6"


def test_the_table_grows_while_the_run_trains(job_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the fourth step, the table must come to show the third."""
    config = fake_config(job_root, "name=growing")
    monkeypatch.setattr(progress, "ROLLOUTS_INTERVAL_S", 0.05)
    original, seen = FakeEngine.train_step, list[int]()

    async def waiting(self: FakeEngine, rows: Any) -> Any:
        end = time.monotonic() + 60
        while self.train_step_num == 3 and 3 not in seen:
            seen.extend(json.loads(str(table.data))[0]["step"] for table in tables("rollouts-growing"))
            assert time.monotonic() < end, seen
        return await original(self, rows)

    monkeypatch.setattr(FakeEngine, "train_step", waiting)
    assert run(train, config).is_completed()
    assert 3 in seen
    (table,) = tables("rollouts-growing")
    assert json.loads(str(table.data))[0]["step"] == 6


def test_each_stage_has_a_table_of_its_own(job_root: Path) -> None:
    config = fake_config(job_root, "name=staged_rollouts", STAGES)
    assert run(finetune, config).is_completed()
    for stage, num_steps in (("sft", 2), ("grpo", 6)):
        (table,) = tables(f"rollouts-staged-rollouts-{stage}")
        rows = json.loads(str(table.data))
        assert [row["step"] for row in rows][:: len(rows) - 1] == [num_steps, 1]
        (ends,) = ({key: row[key] for key in ("prompt", "reward")} for row in rows[-1:])
        (first, *_) = trace_step(job_url(config.stage(stage)), 1)["experiences"]
        assert stage == "grpo" or ends == {"prompt": first["prompt"], "reward": None}
