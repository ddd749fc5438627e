"""Errors, retries, outages and stop requests: how a flow ends, what it keeps, and that it goes on to the same bits."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.flows import Flow
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from engines.errors import EngineError, StorageError, TrinityFlowsError
from flows.explore import explore
from flows.finetune import finetune
from flows.train import train
from tests.fake_engine import FakeEngine, FakeSampler
from tests.fake_job import STAGES, fake_config
from tests.faulty_s3 import FaultyS3
from tests.integration.flow_runs import (
    FLOW_MARKS,
    artifacts,
    committed,
    fails,
    folder,
    result,
    run,
    signals_at,
    tracked,
    written,
)
from tests.integration.job_digest import final_state, ledger, metrics
from trinity_tasks import tasks
from trinity_tasks.buffer.strategies import Fifo
from trinity_tasks.config import Config
from trinity_tasks.inspection import describe
from trinity_tasks.job import job_url

pytestmark = FLOW_MARKS


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat at once what is repeated."""
    for task in (tasks.explore_step, tasks.sync_weight, tasks.save_checkpoint, tasks.evaluate):
        monkeypatch.setattr(task, "retry_delay_seconds", [0, 0, 0])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, empty_database: Path, api: str) -> Config:
    """A job that nothing happened to."""
    root = tmp_path_factory.mktemp("undisturbed")
    (root / "mlflow.db").write_bytes(empty_database.read_bytes())
    config = fake_config(root)
    assert run(train, config).is_completed()
    return config


def assert_same(config: Config, undisturbed: Config) -> None:
    assert final_state(folder(config)) == final_state(folder(undisturbed))
    assert ledger(folder(config)) == ledger(folder(undisturbed))
    roots = [Path(each.checkpoint_root_dir) for each in (config, undisturbed)]
    assert metrics(roots[0], folder(config)) == metrics(roots[1], folder(undisturbed))


# -- errors ------------------------------------------------------------------------------------------------------------


def down(count: int) -> list[Exception]:
    return [StorageError("s3://bucket/job: the store does not answer") for _ in range(count)]


@pytest.mark.parametrize(
    ("flow", "owner", "method", "num_calls"),
    [
        (explore, FakeSampler, "generate", 7),
        (train, FakeSampler, "generate", 7),
        (train, FakeEngine, "save_state_dict", 4),  # after steps 1, 3 and 5; for the others a commit stands in
        (train, FakeEngine, "save_checkpoint", 4),
    ],
    ids=["explore", "train-explore", "train-sync", "train-save"],
)
def test_an_error_that_passes_is_ridden_out(
    flow: Flow[..., Any],
    owner: type,
    method: str,
    num_calls: int,
    job_root: Path,
    undisturbed: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = fake_config(job_root)
    calls = fails(monkeypatch, owner, method, [None, *down(1)])
    assert run(flow, config).is_completed()
    assert len(calls) == num_calls
    if flow is train:
        assert_same(config, undisturbed)
    else:
        assert written(config) == written(undisturbed)


@pytest.mark.parametrize(
    ("owner", "method", "plan", "num_calls", "steps", "weights"),
    [
        (FakeEngine, "prepare", down(9), 1, [], []),
        (FakeSampler, "generate", [None, None, None, *down(9)], 3 + 1 + 4, [2], [1, 2, 3]),
        (FakeEngine, "train_step", [None, None, None, EngineError("out of memory")], 4, [2], [1, 2, 3]),
        (FakeEngine, "save_state_dict", [None, *down(9)], 1 + 4, [2], [1, 2]),
        (FakeEngine, "save_checkpoint", [None, *down(9)], 1 + 4, [2], [1, 2, 3]),
    ],
    ids=["prepare", "explore", "train_step", "sync", "save"],
)
def test_an_error_that_stays_fails_the_run_and_nothing_is_committed_after_it(
    owner: type,
    method: str,
    plan: list[Exception | None],
    num_calls: int,
    steps: list[int],
    weights: list[int],
    job_root: Path,
    undisturbed: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Failed in Prefect, with that error; FAILED in MLflow. Once the cause is gone, it ends in the same bits."""
    config = fake_config(job_root)
    with monkeypatch.context() as patched:
        calls = fails(patched, owner, method, plan)
        state = run(train, config)
    assert state.is_failed()
    error = result(state)
    assert isinstance(error, TrinityFlowsError)
    assert str(error) == str(next(each for each in plan if each is not None))
    assert str(error) in str(state.message)
    assert len(calls) == num_calls
    assert committed(config) == steps
    assert [int(path.name[-8:]) for path in sorted(folder(config).glob("weights/*"))] == weights
    if method != "prepare":
        assert tracked(config)[0] == "FAILED"
        assert artifacts(state, "progress")[0] < 100
    assert run(train, config).is_completed()
    assert_same(config, undisturbed)


def test_a_retry_of_the_flow_goes_on_from_the_last_commit(
    job_root: Path, undisturbed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a crash: steps after the commit again, the same rows, each metric once, no train step twice."""
    config = fake_config(job_root)
    attempts = (2, 4, 6)
    plan: list[Exception | None] = []
    step = 0
    for fatal in attempts:
        plan += [*[None] * (fatal - step - 1), EngineError(f"step {fatal}: the device is gone")]
        step = (fatal - 1) // 2 * 2
    calls = fails(monkeypatch, FakeEngine, "train_step", plan)
    retried = train.with_options(retries=len(attempts), retry_delay_seconds=0)
    state = run(retried, config)
    assert state.is_completed()
    assert len(calls) == len(plan) + 6 - step
    assert describe(job_url(config)).attempt == 1 + len(attempts)
    assert_same(config, undisturbed)


@pytest.mark.parametrize("comes_back", [True, False])
def test_training_outlives_the_prefect_server(
    comes_back: bool, api: str, job_root: Path, undisturbed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage from step 2 on, or to step 5: it costs no step. If it lasts, the end cannot be told to the server."""
    config = fake_config(job_root)
    train_step = FakeEngine.train_step
    with FaultyS3(api) as proxy:  # it forwards any HTTP

        async def step(self: FakeEngine, *args: Any) -> Any:
            down = self.train_step_num >= 1 and not (comes_back and self.train_step_num >= 4)
            proxy.rule = lambda method, path, authorization: "cut_before" if down else None
            return await train_step(self, *args)

        monkeypatch.setattr(FakeEngine, "train_step", step)
        with temporary_settings({PREFECT_API_URL: f"{proxy.url}/api", PREFECT_CLIENT_MAX_RETRIES: 1}):
            if comes_back:
                assert run(train, config).is_completed()
            else:
                with pytest.raises(httpx.HTTPError):
                    run(train, config)
        asked = len(proxy.requests)
    assert asked > 0
    assert_same(config, undisturbed)
    assert run(train, config).is_completed()
    assert describe(job_url(config)).attempt == 1


# -- stop requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "owner", "method", "call", "stopped_at"),
    [
        (signal.SIGTERM, FakeSampler, "generate", 4, 3),
        (signal.SIGTERM, FakeEngine, "train_step", 3, 3),
        (signal.SIGINT, FakeEngine, "train_step", 3, 3),
        (signal.SIGTERM, FakeEngine, "save_state_dict", 2, 3),
        (signal.SIGTERM, FakeEngine, "save_checkpoint", 2, 4),
    ],
    ids=["explore", "train_step", "ctrl-c", "sync", "save"],
)
def test_a_stop_ends_after_the_step_that_runs_with_a_commit_and_goes_on_later(
    number: int,
    owner: type,
    method: str,
    call: int,
    stopped_at: int,
    job_root: Path,
    undisturbed: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancelled in Prefect, KILLED in MLflow, where every step has arrived."""
    config = fake_config(job_root)
    signals_at(monkeypatch, owner, method, call, number)
    state = run(train, config)
    assert state.is_cancelled()
    assert state.message == f"fake: stopped at step {stopped_at}, which is committed; run it again to go on"
    assert committed(config)[-1] == stopped_at
    assert tracked(config) == ("KILLED", [*range(1, stopped_at + 1)])
    assert artifacts(state, "progress") == [pytest.approx(100 * stopped_at / 6)]
    assert run(train, config).is_completed()
    assert_same(config, undisturbed)


def test_a_stop_ends_the_wait_for_data(job_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = fake_config(job_root, "mode=train")
    signals_at(monkeypatch, Fifo, "availability", 2)
    state = run(train, config)
    assert state.is_cancelled()
    assert state.message == "fake: stopped before its first step; run it again to go on"
    assert committed(config) == []
    assert tracked(config)[0] == "KILLED"


@pytest.mark.parametrize(
    ("error", "prefect", "mlflow"), [(None, "Cancelled", "KILLED"), (EngineError("gone"), "Failed", "FAILED")]
)
def test_a_stage_that_does_not_end_well_ends_the_whole(
    error: Exception | None, prefect: str, mlflow: str, job_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_config(job_root, STAGES)
    if error is None:
        signals_at(monkeypatch, FakeEngine, "train_step", 1)
    else:
        fails(monkeypatch, FakeEngine, "train_step", [error])
    state = run(finetune, config)
    assert state.name == prefect
    if error is None:
        assert state.message == "fake/sft: stopped at step 1, which is committed; run it again to go on"
    else:
        assert result(state) is error
    assert [tracked(each)[0] for each in (config, config.stage("sft"))] == [mlflow, mlflow]
    assert not folder(config.stage("grpo")).exists()
