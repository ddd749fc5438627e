"""The only door to MLflow: one run per job, each metric once per step, never in the way of training.

Owns: finding or creating the run, what a call carries, closing. Does not own: what training hands in (`outbox.py`), the
queue (`spool.py`), when to send and retry (`delivery.py`), legal names and secrets (`tracked_values.py`). mlflow is
imported by the sending thread, because that takes two seconds.

Exactly once. A call of `log` is one point of one *stream* ("train", "eval", ...). All its metrics go in one atomic
`log_batch` together with the marker metric `progress/<stream>_step`. Before anything is sent the markers are read back,
and points at or below them are skipped: a resumed run replays its steps bit for bit, so the server already has the same
numbers. After a call whose outcome is unknown the markers are read again. Hence a key belongs to one stream, and a
stream logs each step once, in growing order. (Atomic in MLflow's SQL stores, directly and behind a server; its file
store is refused.)
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, cast
from urllib.parse import quote

from engines.errors import ConfigError, StorageError
from trinity_tasks.delivery import Delivery, Health, Pace
from trinity_tasks.outbox import Outbox
from trinity_tasks.spool import Point, Spool, default_folder
from trinity_tasks.storage import Storage
from trinity_tasks.tracked_values import MAX_TAG_LENGTH, flatten_params, legal_tags, mask_secrets, sanitize_name
from trinity_tasks.tracking_uri import MonitorLike, sqlite_file, tracking_uri

logger = logging.getLogger(__name__)

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
JOB_TAG = "trinity.job_id"
"""Tag by which the run of a job is found again when its id was never learnt."""

ATTEMPT_TAG = "trinity.attempt"
"""Tag with the number of processes that have worked on the job."""

_MAX_METRICS_PER_CALL = 1000
_REFUSED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
_TABLES_TAG = "mlflow.loggedArtifacts"


@dataclass(slots=True)
class _Identity:
    """Which run, and what is written on it when it is opened."""

    uri: str
    experiment: str
    run_name: str
    job_id: str
    parent_job_id: str | None
    """Job whose run this one is shown under; None as soon as that is written."""
    tags: dict[str, str]
    config: dict[str, Any]
    run_id: str | None


@dataclass(slots=True)
class _Sent:
    """What the server is known to have."""

    steps: dict[str, int] = field(default_factory=dict[str, int])
    """Stream -> last step."""
    nonfinite: Counter[str] = field(default_factory=Counter[str])
    """Metric name -> how often it was NaN or infinite."""
    tables: list[str] = field(default_factory=list[str])
    """Paths of tables that MLflow's UI offers."""


class Tracker(Outbox):
    """The run of one job. Methods return at once; a thread of its own delivers. Of several ranks, one has a tracker.

    Example:
        tracker = Tracker.open(config.monitor, job_id=..., job_url=..., run_name="rft")
        tracker.log(1, {"loss/policy": 0.1})
        tracker.log(1, {"eval/accuracy": 0.3}, stream="eval")
        tracker.close("FINISHED")
    """

    @classmethod
    def open(
        cls,
        monitor: MonitorLike,
        *,
        job_id: str,
        job_url: str,
        run_name: str,
        run_id: str | None = None,
        parent_job_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        pending: Sequence[Mapping[str, Any]] = (),
        root_dir: str = ".",
        project: str = "trinity-flows",
        spool_dir: Path | None = None,
        pace: Pace | None = None,
    ) -> Self:
        """Start delivering to the run of this job, found by `run_id` or its job tag, else created; marked RUNNING.

        parent_job_id: the run is shown under that job's, once there is one. params: the nested config. pending:
        `spool_state` of the checkpoint that is resumed. root_dir, project: defaults of the sqlite file's folder and of
        the experiment. spool_dir: what cannot be delivered is kept there.
        Returns before the server was asked: an outage delays nothing. Raises ConfigError (file store), DataError.
        """
        for each in (job_id, parent_job_id or ""):
            if "'" in each:
                raise ConfigError(f"job id {each!r} has a quote in it; use letters, digits and - _ / . :")
        identity = _Identity(
            uri=tracking_uri(monitor, root_dir),
            experiment=monitor.experiment or project,
            run_name=run_name,
            job_id=job_id,
            parent_job_id=parent_job_id,
            tags={**(tags or {}), JOB_TAG: job_id, "trinity.job_url": job_url},
            config=json.loads(json.dumps(mask_secrets(params or {}), default=str)),
            run_id=run_id,
        )
        pace = pace or Pace()
        folder = spool_dir or default_folder(f"{job_id}\n{job_url}")
        tracker = cls(identity, Spool(folder, map(Point.from_json, pending), pace.max_memory_metrics), pace)
        tracker._delivery.start()
        return tracker

    def __init__(self, identity: _Identity, spool: Spool, pace: Pace) -> None:
        super().__init__(spool)
        self._identity = identity
        self._pace = pace
        self._delivery = Delivery(self._attempt, pace, on_failure=self._note_outage, on_recovery=self._note_recovery)
        self._status: RunStatus = "FINISHED"
        self._closed: bool | None = None
        self._client: Any = None  # used by the sending thread alone, like the next one
        self._sent = _Sent()
        self._connected = threading.Event()  # the run is known and its markers were read
        self._opened = threading.Event()  # ... at least once, and status, tags and params were written
        self._one_by_one = False  # after a refused call: find out which point it was

    def log(
        self, step: int, metrics: Mapping[str, float], *, stream: str = "train", timestamp_ms: int | None = None
    ) -> None:
        """As `Outbox.log`; after `close` nothing is taken."""
        if self._closed is not None:
            self._warn("closed", f"step {step} of {stream!r} was logged after close; it is not sent")
            return
        before = self._spool.num_metrics
        super().log(step, metrics, stream=stream, timestamp_ms=timestamp_ms)
        if before < self._pace.eager_metrics <= self._spool.num_metrics:  # once: what is being sent counts until it is
            self._delivery.nudge()

    # -- what it knows ------------------------------------------------------------------------------------------------

    @property
    def high_water(self) -> dict[str, int]:
        """Stream -> last step that the server is known to have."""
        return dict(self._sent.steps)

    @property
    def run_id(self) -> str | None:
        """MLflow run id; None as long as the server has not been reached."""
        return self._identity.run_id if self._opened.is_set() else None

    @property
    def uri(self) -> str:
        """Tracking URI in use, logins masked."""
        return str(mask_secrets(self._identity.uri))

    @property
    def ui_command(self) -> str:
        """What opens the MLflow UI: a command, or the server's address."""
        return self.uri if self.uri.startswith("http") else f"mlflow ui --backend-store-uri {shlex.quote(self.uri)}"

    @property
    def health(self) -> Health:
        """How delivery is going."""
        return Health(
            connected=self._connected.is_set() and not self._delivery.num_failures,
            num_pending_metrics=self._spool.num_metrics,
            num_overflow_metrics=self._spool.num_overflow_metrics,
            num_pending_artifacts=len(self._spool.artifacts()),
            num_consecutive_failures=self._delivery.num_failures,
            last_error=self._delivery.last_error,
            num_skipped_points=self._counts["skipped"],
            num_repeated_points=self._counts["repeated"],
            num_rejected_points=self._counts["rejected"],
            num_lost_artifacts=self._counts["lost_artifacts"],
        )

    def wait_opened(self, timeout_s: float) -> bool:
        """Wait until the run is known at the server, `run_id` included."""
        return self._opened.wait(timeout_s)

    def metric_history(self, key: str, run_id: str | None = None, timeout_s: float = 10.0) -> list[tuple[int, float]]:
        """(step, value) of a metric of this run, or of another by its id: what the server has, and what waits here.

        Asks the server, and first waits until the run is open. An outage is said, and leaves what waits here.
        """
        name = sanitize_name(key)
        points = self._spool.snapshot() if run_id is None else []
        found = {point.step: point.values[name] for point in points if name in point.values}
        if self._opened.wait(timeout_s):
            try:
                rows = self._client.get_metric_history(run_id or self._identity.run_id, name)
            except Exception as error:  # policy of the spool: an outage spoils a picture, not a run
                self._warn("history", f"the history of {key} cannot be read from {self.uri}: {error}")
            else:
                found |= {row.step: row.value for row in rows}
        return sorted(found.items())

    def close(self, status: RunStatus = "FINISHED", timeout_s: float = 30.0) -> bool:
        """Deliver everything and set the run's status. False: not all arrived in time; it is kept on disk, loudly."""
        if self._closed is None:
            self._status, self._closed = status, False
            self._closed = self._delivery.finish(timeout_s)
            if self._closed:
                self._spool.remove_if_empty()
            else:
                self._keep_undelivered(timeout_s)
        return self._closed

    def _keep_undelivered(self, timeout_s: float) -> None:
        health = self.health
        what = f"{health.num_pending_metrics} metrics, {health.num_pending_artifacts} artifacts, status {self._status}"
        try:
            self._spool.persist()
        except OSError as error:
            logger.error("tracking: MLflow at %s is not reached, nor can its data be kept: %s", self.uri, error)
            return
        message = (
            "tracking: MLflow at %s was not reached in the last %.0f s (%s). Not delivered: %s. All is kept in %s and "
            "sent when this job is run again on this machine."
        )
        logger.error(message, self.uri, timeout_s, health.last_error, what, self._spool.folder)

    # -- the sending thread -------------------------------------------------------------------------------------------

    def _attempt(self, last: bool) -> Exception | None:
        try:
            self._deliver(last)
        except Exception as error:  # policy of the spool: whatever goes wrong, training goes on, nothing is forgotten
            self._connected.clear()  # it is unknown what arrived: read the markers before anything is sent again
            return error
        return None

    def _deliver(self, last: bool) -> None:
        self._spool.balance()
        if not self._connected.is_set():
            self._connect()
        while points := self._spool.head(1 if self._one_by_one else _MAX_METRICS_PER_CALL):
            if self._delivery.abandoned:
                return
            self._send_points(points)
            self._spool.balance()
            few_left = self._spool.num_metrics < self._pace.eager_metrics
            if few_left and not (last or self._one_by_one):  # a call for each point that comes meanwhile is dear
                break
        self._one_by_one = False
        self._send_tags()
        self._send_datasets()
        self._link_parent(last)
        if last:
            self._client.set_terminated(self._identity.run_id, status=self._status)
        for staged in self._spool.artifacts():
            self._send_artifact(staged)

    def _note_outage(self, error: Exception) -> None:
        what = self._delivery.last_error
        self._warn("outage", f"MLflow at {self.uri} fails; training goes on, metrics are kept and sent later ({what})")

    def _note_recovery(self) -> None:
        logger.info("tracking: MLflow at %s works again; everything that was kept is sent", self.uri)
        self._warned.discard("outage")

    def _connect(self) -> None:
        """Find or create the run and read what it has."""
        if self._client is None:
            self._client = _mlflow_client(self._identity.uri)
        run = _find_run(self._client, self._identity)
        self._identity.run_id = str(run.info.run_id)
        self._sent = _read_sent(run)
        if not self._opened.is_set():
            self._announce(run)
        self._connected.set()
        self._opened.set()

    def _announce(self, run: Any) -> None:
        """Write status, tags and params. A param cannot be changed: a new value becomes a tag and a new config file."""
        from mlflow.entities import Param, RunTag

        stored: dict[str, str] = run.data.params
        params = flatten_params(self._identity.config)
        changed = {key: [stored[key], value] for key, value in params.items() if stored.get(key, value) != value}
        tags = dict(self._identity.tags)
        attempt = tags.setdefault(ATTEMPT_TAG, str(int(run.data.tags.get(ATTEMPT_TAG, 0)) + 1))
        if changed:
            tags[f"trinity.params_changed.attempt_{attempt}"] = json.dumps(changed)
        self._client.log_batch(
            run.info.run_id,
            params=[Param(key, value) for key, value in params.items() if key not in stored],
            tags=[RunTag(key, value) for key, value in legal_tags(tags).items()],
        )
        self._client.update_run(run.info.run_id, status="RUNNING")
        if changed or (params and not stored):
            name = f"config/config.attempt_{attempt}.yaml" if stored else "config/config.yaml"
            self.log_dict(self._identity.config, name)

    def _send_points(self, points: list[Point]) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        steps, nonfinite = dict(self._sent.steps), self._sent.nonfinite.copy()
        rows: list[Any] = []
        num_skipped = 0
        for point in points:
            if point.step <= steps.get(point.stream, point.step - 1):
                num_skipped += 1
                continue
            steps[point.stream] = point.step
            nonfinite.update(point.nonfinite)
            values = {**point.values, **{_counter(key): float(nonfinite[key]) for key in point.nonfinite}}
            values[f"progress/{point.stream}_step"] = float(point.step)
            rows += [Metric(key, value, point.timestamp_ms, point.step) for key, value in values.items()]
        if rows:
            try:
                self._client.log_batch(self._identity.run_id, metrics=rows, synchronous=True)
            except MlflowException as error:
                if error.error_code in _REFUSED:
                    self._set_refused_aside(points, error)
                raise
        self._spool.acknowledge(len(points))
        self._sent.steps, self._sent.nonfinite = steps, nonfinite
        self._counts["skipped"] += num_skipped

    def _set_refused_aside(self, points: list[Point], error: Exception) -> None:
        """A refusal is for good if the run is alive and the point was alone; else try the points one by one."""
        if self._one_by_one:
            self._counts["rejected"] += 1
            self._warn("rejected", f"MLflow refuses step {points[0].step}; it is kept in {self._spool.folder}: {error}")
            self._spool.reject(str(error))
        self._one_by_one = True

    def _send_tags(self) -> None:
        from mlflow.entities import RunTag

        with self._lock:
            tags = dict(self._tags)
        if tags:
            self._client.log_batch(self._identity.run_id, tags=[RunTag(key, value) for key, value in tags.items()])
            with self._lock:
                self._tags = {key: value for key, value in self._tags.items() if tags.get(key) != value}

    def _send_datasets(self) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        with self._lock:
            datasets = list(self._datasets)
        if datasets:
            inputs = [
                DatasetInput(
                    Dataset(row["name"], row["digest"], "trinity_flows", json.dumps({"uri": row["source"]})),
                    [InputTag("mlflow.data.context", row["context"])],
                )
                for row in datasets
            ]
            self._client.log_inputs(self._identity.run_id, datasets=inputs)
            with self._lock:
                del self._datasets[: len(datasets)]

    def _link_parent(self, last: bool) -> None:
        """The parent's tracker may open its run later than this one: look again at each delivery."""
        if (job_id := self._identity.parent_job_id) is None:
            return
        parent = _run_of_job(self._client, _experiment_id(self._client, self._identity), job_id)
        if parent is not None:
            self._client.set_tag(self._identity.run_id, "mlflow.parentRunId", parent)
            self._identity.parent_job_id = None
        elif last:
            self._warn("parent", f"job {job_id} has no MLflow run; this job's run is not shown under it")

    def _send_artifact(self, staged: Path) -> None:
        self._client.log_artifacts(self._identity.run_id, str(staged))
        if staged.name.endswith("-table"):
            files = [str(path.relative_to(staged)) for path in staged.rglob("*") if path.is_file()]
            tables = [path for path in self._sent.tables if path not in files] + files
            while len(tag := json.dumps([{"path": path, "type": "table"} for path in tables])) > MAX_TAG_LENGTH:
                del tables[0]
            self._client.set_tag(self._identity.run_id, _TABLES_TAG, tag)
            self._sent.tables = tables
        self._spool.discard(staged)


def _counter(key: str) -> str:
    return sanitize_name(f"nonfinite/{key}")


def _mlflow_client(uri: str) -> Any:
    for name, value in {
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # `Delivery` retries; one call must not be stuck for minutes
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    }.items():
        os.environ.setdefault(name, value)
    if (database := sqlite_file(uri)) is not None:
        database.parent.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", message="The ``noload`` loader strategy")  # mlflow 3.17 with SQLAlchemy 2.1
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    from mlflow import MlflowClient

    if database is not None and not database.exists():
        _create_database(database)
    return MlflowClient(tracking_uri=uri)


def _create_database(database: Path) -> None:
    """A sqlite file with all of MLflow's tables, or none: MLflow cannot go on with one that was left half made."""
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory(prefix="trinity-flows-") as name:
        new = Path(name) / "mlflow.db"
        client: Any = MlflowClient(tracking_uri=f"sqlite:///{new}")
        client.search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):  # another process was faster
            Storage(str(database.parent)).create(database.name, new.read_bytes())


def _find_run(client: Any, identity: _Identity) -> Any:
    """The live run by its id, else by its job tag, else a new one. Raises StorageError or what mlflow raises."""
    from mlflow.exceptions import MlflowException

    if identity.run_id is not None:
        try:
            run = client.get_run(identity.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        else:
            if run.info.lifecycle_stage == "active":
                return run
        logger.warning("tracking: MLflow run %s was deleted; going on in another one", identity.run_id)
    experiment_id = _experiment_id(client, identity)
    if (run_id := _run_of_job(client, experiment_id, identity.job_id)) is not None:
        return client.get_run(run_id)
    return client.create_run(experiment_id, tags=legal_tags(identity.tags), run_name=identity.run_name)


def _run_of_job(client: Any, experiment_id: str, job_id: str) -> str | None:
    by_job = f"tags.`{JOB_TAG}` = '{job_id}'"
    found = client.search_runs([experiment_id], by_job, order_by=["attributes.start_time ASC"], max_results=1)
    return str(found[0].info.run_id) if found else None


def _experiment_id(client: Any, identity: _Identity) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(identity.experiment)
    if experiment is None:
        database = sqlite_file(identity.uri)
        location = database and (database.parent / "mlflow-artifacts" / quote(identity.experiment, safe="")).as_uri()
        try:
            return str(client.create_experiment(identity.experiment, artifact_location=location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = client.get_experiment_by_name(identity.experiment)
    if experiment.lifecycle_stage != "active":
        raise StorageError(
            f"MLflow experiment {identity.experiment!r} is deleted; restore it, or set another monitor.experiment"
        )
    return str(experiment.experiment_id)


def _read_sent(run: Any) -> _Sent:
    metrics: dict[str, float] = run.data.metrics
    sent = _Sent()
    for key, value in metrics.items():
        if key.startswith("progress/") and key.endswith("_step"):
            sent.steps[key.removeprefix("progress/").removesuffix("_step")] = int(value)
        elif key.startswith("nonfinite/"):
            sent.nonfinite[key.removeprefix("nonfinite/")] = int(value)
    tables = cast("list[dict[str, str]]", json.loads(run.data.tags.get(_TABLES_TAG, "[]")))
    sent.tables = [row["path"] for row in tables if row.get("type") == "table"]
    return sent
