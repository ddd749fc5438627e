"""`Tracker` against a real sqlite store and a real MLflow server: each metric once per step, whatever happens."""

import itertools
import json
import logging
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from engines.errors import ConfigError, DataError
from trinity_tasks.config import MonitorConfig
from trinity_tasks.delivery import Pace
from trinity_tasks.spool import Point
from trinity_tasks.tracking import Tracker
from trinity_tasks.tracking_uri import sqlite_file, tracking_uri

FAST = Pace(interval_s=0.05, first_backoff_s=0.05, max_backoff_s=0.2, closing_backoff_s=0.1)
Open = Callable[..., Tracker]


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sqlite file for all tests: making its tables takes seconds. Every test has a job of its own."""
    return tmp_path_factory.mktemp("mlflow") / "mlflow.db"


@pytest.fixture
def open_tracker(database: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Open]:
    opened: list[Tracker] = []

    def open_(**changes: Any) -> Tracker:
        arguments: dict[str, Any] = {
            "job_id": request.node.name,
            "job_url": "file:///jobs/test",
            "run_name": "test",
            "spool_dir": tmp_path / "spool",
            "pace": FAST,
        }
        monitor = MonitorConfig(tracking_uri=changes.pop("uri", f"sqlite:///{database}"), experiment="tests")
        opened.append(Tracker.open(monitor, **{**arguments, **changes}))
        return opened[-1]

    yield open_
    for tracker in opened:
        tracker.close("FAILED", timeout_s=0)


@pytest.mark.parametrize(
    ("uri", "file"),
    [
        ("sqlite:////data/mlflow.db", Path("/data/mlflow.db")),
        ("sqlite:////data/mlflow.db?timeout=5", Path("/data/mlflow.db")),
        ("sqlite:///runs/mlflow.db", Path.cwd() / "runs" / "mlflow.db"),
        ("sqlite:///:memory:", None),
        ("sqlite://", None),
        ("http://host:5000", None),
        ("postgresql://host/db?sslmode=require", None),
    ],
)
def test_the_file_of_a_database_is_known_from_its_address(uri: str, file: Path | None) -> None:
    assert sqlite_file(uri) == file


def test_mlflows_tables_are_whole_or_absent(
    open_tracker: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that ended within their making left a file with which MLflow could not go on, ever."""
    from mlflow.store.db import utils

    database = tmp_path / "new" / "mlflow.db"
    make = utils._upgrade_db
    tries = itertools.count(1)

    def interrupted_once(engine: Any) -> None:
        if next(tries) == 1:
            raise OSError("no space left on device")
        make(engine)

    monkeypatch.setattr(utils, "_upgrade_db", interrupted_once)
    tracker = open_tracker(uri=f"sqlite:///{database}")
    tracker.log(1, {"loss": 0.5})
    assert tracker.close()
    assert next(tries) == 3
    assert rows(database, tracker) == [("loss", 1, 0.5)]


def rows(database: Path, tracker: Tracker) -> list[tuple[str, int, float]]:
    """(key, step, value) of every metric row of the tracker's run, markers left out."""
    with sqlite3.connect(database) as connection:
        found = connection.execute(
            "SELECT key, step, value FROM metrics WHERE run_uuid = ? AND key NOT LIKE 'progress/%' ORDER BY key, step",
            (tracker.run_id,),
        ).fetchall()
    connection.close()
    return found


def run_of(tracker: Tracker, uri: str | None = None) -> Any:
    from mlflow import MlflowClient

    assert tracker.run_id is not None
    return MlflowClient(tracking_uri=uri or tracker.uri).get_run(tracker.run_id)


def artifact(database: Path, tracker: Tracker, name: str) -> str:
    return (database.parent / "mlflow-artifacts/tests" / str(tracker.run_id) / "artifacts" / name).read_text()


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_each_metric_once_per_step_with_its_time(open_tracker: Open, database: Path) -> None:
    tracker = open_tracker(tags={"code": "1.0"}, params={"trainer": {"lr": 1e-4}})
    for step in range(1, 31):
        tracker.log(step, {"loss/policy": 1 / step, "acc@1": 0.5}, timestamp_ms=1000 + step)
        if step % 10 == 0:
            tracker.log(step, {"eval/accuracy": step / 100}, stream="eval", timestamp_ms=1000 + step)
    assert tracker.close("FINISHED")
    assert rows(database, tracker) == (
        [("acc_at_1", step, 0.5) for step in range(1, 31)]
        + [("eval/accuracy", step, step / 100) for step in (10, 20, 30)]
        + [("loss/policy", step, 1 / step) for step in range(1, 31)]
    )
    run = run_of(tracker)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "test"
    assert run.data.metrics["progress/train_step"] == run.data.metrics["progress/eval_step"] == 30
    assert run.data.params == {"trainer.lr": "0.0001"}
    assert run.data.tags["code"] == "1.0"
    assert run.data.tags["trinity.job_url"] == "file:///jobs/test"
    assert artifact(database, tracker, "config/config.yaml") == "trainer:\n  lr: 0.0001\n"
    assert tracker.high_water == {"train": 30, "eval": 30}


def test_killed_run_resumes_without_gap_or_repeat(open_tracker: Open, database: Path, tmp_path: Path) -> None:
    """Checkpoint at 10, killed at 17 with some of it unsent; the resumed run replays 11 to 17."""
    first = open_tracker(pace=Pace(interval_s=600, eager_metrics=10**9))
    assert first.wait_opened(20)
    for step in range(1, 11):
        first.log(step, {"loss": float(step)})
    checkpoint = first.spool_state(11, {"loss": 11.0})
    assert [point["step"] for point in checkpoint] == list(range(1, 12))
    for step in range(11, 18):
        first.log(step, {"loss": float(step)})
    first._deliver(False)  # what a flush would have sent before the kill; nobody closes this tracker
    for resumed_from, pending in ((11, json.loads(json.dumps(checkpoint))), (9, [])):
        second = open_tracker(run_id=first.run_id, pending=pending, spool_dir=tmp_path / f"other-{resumed_from}")
        for step in range(resumed_from + 1, 21):
            second.log(step, {"loss": float(step)})
        assert second.close("FINISHED")
        assert second.run_id == first.run_id
        assert rows(database, second) == [("loss", step, float(step)) for step in range(1, 21)]
    assert second.health.num_skipped_points == 11


def test_run_is_found_by_its_job_when_its_id_was_never_learnt(open_tracker: Open, database: Path) -> None:
    first = open_tracker()
    first.log(1, {"loss": 1.0})
    assert first.close("KILLED")
    assert run_of(first).info.status == "KILLED"
    second = open_tracker()
    assert second.wait_opened(20)
    assert second.run_id == first.run_id
    assert run_of(second).info.status == "RUNNING"
    second.log(2, {"loss": 2.0})
    assert second.close("FINISHED")
    assert rows(database, second) == [("loss", 1, 1.0), ("loss", 2, 2.0)]
    assert run_of(second).data.tags["trinity.attempt"] == "2"


def test_values_that_are_not_finite_are_counted_across_a_resume(open_tracker: Open, database: Path) -> None:
    tracker = open_tracker()
    tracker.log(1, {"loss": math.nan, "kl": math.inf, "lr": 0.1})
    tracker.log(2, {"loss": -math.inf, "kl": 0.5, "lr": 0.1})
    assert tracker.close("KILLED")
    resumed = open_tracker()
    resumed.log(2, {"loss": -math.inf, "kl": 0.5, "lr": 0.1})  # replay
    resumed.log(3, {"loss": math.nan, "kl": 0.25, "lr": 0.1})
    assert resumed.close("FINISHED")
    assert rows(database, resumed) == [
        ("kl", 2, 0.5),
        ("kl", 3, 0.25),
        *[("lr", step, 0.1) for step in (1, 2, 3)],
        ("nonfinite/kl", 1, 1.0),
        *[("nonfinite/loss", step, float(step)) for step in (1, 2, 3)],
    ]


def test_params_beyond_every_limit_and_changed_on_resume(open_tracker: Open, database: Path) -> None:
    config: dict[str, Any] = {f"key_{index}": index for index in range(250)}
    config |= {"text": "x" * 20_000, "stages": [{"name": "sft"}, {"name": "grpo"}], "s3": {"secret_key": "hunter2"}}
    config |= {"store": "postgresql://user:hunter2@host/db"}
    first = open_tracker(params=config)
    assert first.close("FINISHED")
    params = run_of(first).data.params
    assert len(params) == 250 + 5
    assert len(params["text"]) == 6000
    assert "sha256:" in params["text"]
    assert params["stages.1.name"] == "grpo"
    assert params["s3.secret_key"] == "***"
    assert params["store"] == "postgresql://***@host/db"
    assert "x" * 20_000 in artifact(database, first, "config/config.yaml")
    assert "hunter2" not in artifact(database, first, "config/config.yaml")

    second = open_tracker(params={**config, "key_7": 70, "new": True})
    assert second.close("FINISHED")
    run = run_of(second)
    assert run.data.params == {**params, "new": "true"}
    assert json.loads(run.data.tags["trinity.params_changed.attempt_2"]) == {"key_7": ["7", "70"]}
    assert "key_7: 70\n" in artifact(database, second, "config/config.attempt_2.yaml")


def test_artifacts_tables_tags_and_data_sets_arrive(open_tracker: Open, database: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights.txt").write_text("w")
    tracker = open_tracker()
    tracker.log_artifact(tmp_path / "model", "export")
    (tmp_path / "model/weights.txt").write_text("changed after logging")
    tracker.log_bytes(b"png", "reward.png")
    tracker.log_dict({"a": 1}, "summary.json")
    tracker.log_table([{"prompt": "p", "reward": 1.0}, {"prompt": "q", "note": "n"}], "rollouts/step_00000010.json")
    tracker.set_tags({"prefect.flow_run_url": "http://me:pw@host/runs/1"})
    tracker.log_dataset("spell", "abc", "reasoning_gym:spell_backward")
    assert tracker.close("FINISHED")
    assert artifact(database, tracker, "export/model/weights.txt") == "w"
    assert artifact(database, tracker, "reward.png") == "png"
    assert json.loads(artifact(database, tracker, "rollouts/step_00000010.json")) == {
        "columns": ["prompt", "reward", "note"],
        "data": [["p", 1.0, None], ["q", None, "n"]],
    }
    run = run_of(tracker)
    assert run.data.tags["prefect.flow_run_url"] == "http://***@host/runs/1"
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [
        {"path": "rollouts/step_00000010.json", "type": "table"}
    ]
    assert [item.dataset.name for item in run.inputs.dataset_inputs] == ["spell"]
    assert not (tmp_path / "spool").exists()
    with pytest.raises(DataError, match="does not exist"):
        tracker.log_artifact(tmp_path / "nothing")
    with pytest.raises(DataError, match="leads out of the run"):
        tracker.log_text("", "../../etc/passwd")


def test_second_log_of_a_step_is_dropped_and_said(open_tracker: Open, database: Path, caplog: Any) -> None:
    tracker = open_tracker()
    for _ in range(3):
        tracker.log(1, {"loss": 1.0})
    tracker.log(2, {"loss": "high", "lr": 0.1})  # type: ignore[dict-item]
    assert tracker.close("FINISHED")
    tracker.log(3, {"loss": 1.0})
    assert rows(database, tracker) == [("loss", 1, 1.0), ("lr", 2, 0.1)]
    assert tracker.health.num_repeated_points == 2
    said = "\n".join(caplog.messages)
    assert said.count("step 1 of stream 'train' was logged again") == 1
    assert "metric loss is 'high' at step 2, not a number" in said
    assert "step 3 of 'train' was logged after close" in said


def test_a_point_of_2500_metrics_arrives_once(open_tracker: Open, database: Path) -> None:
    metrics = {f"m/{index:04d}": float(index) for index in range(2500)}
    for _ in range(2):
        tracker = open_tracker()
        tracker.log(1, metrics)
        assert tracker.close("FINISHED")
    assert rows(database, tracker) == [(key, 1, value) for key, value in metrics.items()]


def test_deleted_run_is_replaced(open_tracker: Open, database: Path, caplog: Any) -> None:
    from mlflow import MlflowClient

    first = open_tracker()
    first.log(1, {"loss": 1.0})
    wait_until(lambda: first.high_water == {"train": 1})
    old = first.run_id
    assert old is not None
    MlflowClient(tracking_uri=first.uri).delete_run(old)
    first.log(2, {"loss": 2.0})
    first.log(3, {"loss": 3.0})
    assert first.close("FINISHED")
    assert first.run_id != old
    assert rows(database, first) == [("loss", 2, 2.0), ("loss", 3, 3.0)]
    assert f"MLflow run {old} was deleted" in "\n".join(caplog.messages)
    assert first.health.num_rejected_points == 0


def test_refused_point_is_set_aside_and_the_rest_arrives(
    open_tracker: Open, database: Path, tmp_path: Path, caplog: Any
) -> None:
    points = [Point("train", step, 0, {"bad@name" if step == 2 else "loss": 1.0}).to_json() for step in (1, 2, 3)]
    tracker = open_tracker(pending=points)
    assert tracker.close("FINISHED")
    assert rows(database, tracker) == [("loss", 1, 1.0), ("loss", 3, 1.0)]
    assert tracker.health.num_rejected_points == 1
    kept = json.loads((tmp_path / "spool/rejected.jsonl").read_text())
    assert (kept["step"], kept["values"]) == (2, {"bad@name": 1.0})
    assert "MLflow refuses step 2" in "\n".join(caplog.messages)


def test_unreachable_server_never_delays_training_and_keeps_everything(
    open_tracker: Open, database: Path, tmp_path: Path, caplog: Any
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
    pace = Pace(interval_s=0.02, first_backoff_s=0.02, max_backoff_s=0.05, max_memory_metrics=100)
    tracker = open_tracker(uri=uri, pace=pace)
    metrics = {f"m/{index}": 1.0 for index in range(10)}
    durations: list[float] = []
    for step in range(1, 301):
        started = time.perf_counter()
        tracker.log(step, metrics)
        durations.append(time.perf_counter() - started)
    assert sorted(durations)[150] < 2e-4
    tracker.log_text("kept", "note.txt")
    wait_until(lambda: tracker.health.num_consecutive_failures > 1 and tracker.health.num_overflow_metrics > 0)
    assert not tracker.health.connected
    assert tracker.run_id is None
    assert len(tracker.spool_state()) == 300
    assert len(tracker._spool._memory) <= 9
    assert not tracker.close("FINISHED", timeout_s=0.2)
    said = [record for record in caplog.records if record.levelno >= logging.WARNING and "tracking" in record.name]
    assert [record.levelname for record in said] == ["WARNING", "ERROR"]
    assert "Not delivered: 3300 metrics, 1 artifacts, status FINISHED" in said[1].getMessage()
    assert str(tmp_path / "spool") in said[1].getMessage()

    again = open_tracker()  # the job runs again, and this time the store answers
    assert again.close("FINISHED")
    assert rows(database, again) == [(key, step, 1.0) for key in sorted(metrics) for step in range(1, 301)]
    assert artifact(database, again, "note.txt") == "kept"
    assert not (tmp_path / "spool").exists()


def test_trackers_of_two_threads_do_not_interfere(open_tracker: Open, database: Path, tmp_path: Path) -> None:
    done: dict[str, Tracker] = {}

    def train(name: str, value: float) -> None:
        tracker = open_tracker(job_id=f"two-{name}", spool_dir=tmp_path / name)
        for step in range(1, 51):
            tracker.log(step, {"loss": value})
        tracker.close("FINISHED")
        done[name] = tracker

    threads = [threading.Thread(target=train, args=item) for item in (("a", 1.0), ("b", 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done["a"].run_id != done["b"].run_id
    for name, value in (("a", 1.0), ("b", 2.0)):
        assert rows(database, done[name]) == [("loss", step, value) for step in range(1, 51)]


def test_run_is_shown_under_its_parents_even_if_that_comes_later(open_tracker: Open, tmp_path: Path) -> None:
    child = open_tracker(job_id="child", parent_job_id="the parent", spool_dir=tmp_path / "child")
    assert child.wait_opened(20)
    parent = open_tracker(job_id="the parent")
    assert parent.wait_opened(20)
    assert child.close("FINISHED")
    assert run_of(child).data.tags["mlflow.parentRunId"] == parent.run_id


def test_missing_parent_is_said(open_tracker: Open, caplog: Any) -> None:
    assert open_tracker(parent_job_id="nobody").close("FINISHED")
    assert "job nobody has no MLflow run" in "\n".join(caplog.messages)


def test_history_is_what_the_server_has_and_what_waits(open_tracker: Open, tmp_path: Path) -> None:
    done = open_tracker(job_id="history of another")
    for step in (1, 2):
        done.log(step, {"data/reward_mean": step / 10, "acc@1": 1.0})
    assert done.close("FINISHED")
    assert done.metric_history("data/reward_mean") == [(1, 0.1), (2, 0.2)]
    tracker = open_tracker(pace=Pace(interval_s=600))
    assert tracker.wait_opened(20)
    tracker.log(7, {"data/reward_mean": 0.7})
    assert tracker.metric_history("data/reward_mean") == [(7, 0.7)]
    assert tracker.metric_history("acc@1", run_id=done.run_id) == [(1, 1.0), (2, 1.0)]
    assert tracker.metric_history("never logged") == []


def test_default_uri_and_refused_file_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    none = MonitorConfig()
    assert tracking_uri(none, "runs") == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert tracking_uri(none, f"file://{tmp_path}/x") == f"sqlite:///{tmp_path}/x/mlflow.db"
    assert tracking_uri(none, "s3://bucket/runs") == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    assert tracking_uri(none, "runs") == "http://host:5000"
    assert tracking_uri(MonitorConfig(tracking_uri="databricks"), "runs") == "databricks"
    with pytest.raises(ConfigError, match=r"mlruns.*sqlite:////folder/mlflow.db"):
        tracking_uri(MonitorConfig(tracking_uri="./mlruns"), "runs")


# -- a real server ----------------------------------------------------------------------------------------------------


def start_server(port: int, folder: Path) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "DO_NOT_TRACK": "true"}
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", f"{folder}/files"]
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    wait_until(lambda: is_healthy(port), timeout_s=60)
    return server


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as response:
            return response.status == 200
    except (URLError, OSError):
        return False


def stop_server(server: "subprocess.Popen[bytes]") -> None:
    os.killpg(server.pid, signal.SIGKILL)  # its whole session: the server and its worker
    server.wait(10)


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_outage_of_a_server_while_training(open_tracker: Open, tmp_path: Path) -> None:
    """The server is killed at step 10 and back at step 40: every step arrives once, and the status is right."""
    from mlflow import MlflowClient

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start_server(port, tmp_path)
    try:
        tracker = open_tracker(uri=f"http://127.0.0.1:{port}")
        for step in range(1, 11):
            tracker.log(step, {"loss": float(step)})
        wait_until(lambda: tracker.high_water == {"train": 10})
        stop_server(server)
        for step in range(11, 41):
            tracker.log(step, {"loss": float(step)})
        tracker.log_text("written during the outage", "note.txt")
        wait_until(lambda: tracker.health.num_consecutive_failures >= 2)
        server = start_server(port, tmp_path)
        for step in range(41, 51):
            tracker.log(step, {"loss": float(step)})
        assert tracker.close("FINISHED")
        client = MlflowClient(tracking_uri=f"http://127.0.0.1:{port}")
        history = client.get_metric_history(str(tracker.run_id), "loss")
        assert [(item.step, item.value) for item in history] == [(step, float(step)) for step in range(1, 51)]
        assert client.get_run(str(tracker.run_id)).info.status == "FINISHED"
        assert [item.path for item in client.list_artifacts(str(tracker.run_id))] == ["note.txt"]
    finally:
        stop_server(server)


def test_lost_answer_does_not_repeat_a_step(open_tracker: Open, database: Path) -> None:
    """The store applies a call whose answer is lost: the outcome is unknown, and the markers tell."""
    tracker = open_tracker()
    assert tracker.wait_opened(20)
    client = tracker._client
    lost: list[int] = []

    class LosesOneAnswer:
        """The real client, but the first answer to a call with metrics never comes back."""

        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def log_batch(self, run_id: str, **content: Any) -> None:
            client.log_batch(run_id, **content)
            if content.get("metrics") and not lost:
                lost.append(len(content["metrics"]))
                raise ConnectionResetError("no answer")

    tracker._client = LosesOneAnswer()
    for step in range(1, 11):
        tracker.log(step, {"loss": float(step), "kl": math.nan})
    assert tracker.close("FINISHED")
    assert lost
    found: Mapping[tuple[str, int], float] = {(key, step): value for key, step, value in rows(database, tracker)}
    assert len(rows(database, tracker)) == len(found) == 20
    assert [found["nonfinite/kl", step] for step in range(1, 11)] == [float(step) for step in range(1, 11)]
    assert tracker.health.num_skipped_points > 0
