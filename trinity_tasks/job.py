"""`Job`: one job's folder. Its identity (job.json), its lease, and the handles to what lies in it.

Owns: who the job is, whether this config may continue it, and that only one process writes it. Does not own: the
content of checkpoints, shards or metrics.
"""

from __future__ import annotations

import importlib.metadata
import logging
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from engines.config import Frozen, Resume
from engines.errors import CheckpointError, ConfigError, StorageError
from trinity_tasks.buffer.choose import strategy_for
from trinity_tasks.buffer.cursor import Position
from trinity_tasks.buffer.layout import BufferFolder
from trinity_tasks.buffer.ledger import Ledger
from trinity_tasks.buffer.removal import remove_consumed
from trinity_tasks.checkpoint import COMMITTED_MODEL, CheckpointStore
from trinity_tasks.config import Config
from trinity_tasks.config_source import changes, fingerprint
from trinity_tasks.lease import Lease
from trinity_tasks.storage import DamagedObject, Storage
from trinity_tasks.tracking import Tracker
from trinity_tasks.weights import WeightStore

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
START_RETRY_S = 5.0
"""How long a start waits for a store that does not answer: a wrong endpoint shall be told at once."""


class JobRecord(Frozen):
    """job.json: the identity of a job."""

    format_version: int = FORMAT_VERSION
    job_id: str
    """Random; the MLflow run carries it as the tag trinity.job_id."""
    created_at: str
    """UTC, ISO 8601."""
    config: dict[str, Any]
    """The config that the job goes by now."""
    config_fingerprint: str
    """Sha256 of the fields that make it this experiment."""
    code_version: str
    """Version of trinity-flows that wrote it last."""
    attempt: int = 0
    """How many processes have worked on it."""
    mlflow_run_id: str | None = None
    """The one MLflow run of the job."""
    tasks_sha256: str | None = None
    """Content of the file of the training tasks; None if they are generated."""
    closed_at_step: int | None = None
    """Last step of a finished job whose metrics have all arrived; None while anything is left to do."""
    changes: tuple[dict[str, Any], ...] = ()
    """Config changes made by resumes: attempt, field, before, after."""


class Job:
    """A job that this process may write. Use `Job.open`, then `close`.

    Example:
        >>> job = Job.open(config)          # doctest: +SKIP
        >>> job.url                         # doctest: +SKIP
        'file:///data/runs/project/name'
    """

    def __init__(self, config: Config, store: Storage, lease: Lease, record: JobRecord) -> None:
        self.config = config
        self.store = store
        self.lease = lease
        self.record = record
        keep = config.trainer.max_checkpoints_to_keep
        remove = self.remove_consumed_shards if config.buffer.trainer_input.remove_consumed_shards else None
        self.checkpoints = CheckpointStore(store, lease, keep, after_commit=remove)
        self.ledger = Ledger(store, durable=False)  # every commit flushes, and a resume makes later ones again
        self.weights = WeightStore(store, lease)
        self.strategy = strategy_for(config, store)

    @property
    def url(self) -> str:
        """Where the job lies."""
        return self.store.url

    @classmethod
    def open(cls, config: Config) -> Job:
        """Take the job's lease and make or continue job.json.

        Raises StorageError (cannot be written), LeaseLost (someone else writes it), ConfigError (this config may not
        continue it; the message shows the difference).
        """
        store = job_store(config)
        store.with_retry_s(START_RETRY_S).check_writable()
        lease = Lease.acquire(store, ttl_s=config.lease.ttl_s)
        try:
            record = _continue(store, config)
            store.write_json("job.json", record.model_dump(mode="json"))
        except BaseException:
            lease.release()
            raise
        return cls(config, store, lease, record)

    def new_scratch(self) -> Path:
        """An empty local folder for this process; those that killed processes of the job left here are removed."""
        prefix = f"trinity-flows-{self.record.job_id}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=prefix))

    def update(self, **changed: Any) -> None:
        """Write fields of job.json that have become known. Does nothing if none differs."""
        record = self.record.model_copy(update=changed)
        if record != self.record:
            self.record = record
            self.store.write_json("job.json", record.model_dump(mode="json"))

    def note_tasks(self, sha256: str | None) -> None:
        """Note the content of the training tasks. Raises ConfigError if it was another when the job began to train."""
        before = self.record.tasks_sha256
        if before not in (None, sha256) and _has_made_something(self.store):
            raise ConfigError(
                f"{self.url}: the file of buffer.explorer_input.taskset has changed since the job began (sha256 "
                f"{before} -> {sha256}); the job would go on with other tasks. Put the old file back, or give the new "
                "experiment a name of its own: --set name=..."
            )
        self.update(tasks_sha256=sha256)

    def remove_consumed_shards(self) -> None:
        """Remove shards that no checkpoint can need. What cannot be removed now, the next commit removes.

        Raises LeaseLost; DataError if the buffer's removed.json is damaged.
        """
        buffers = self.config.buffer.trainer_input
        self.lease.check()
        kept = [manifest.position for manifest in self.checkpoints.commits()]
        parts: dict[str, list[Position]] = {buffers.experience_buffer.name: kept}
        if self.config.expert_batch_size:
            name = buffers.expert_buffer.name
            parts[name] = [Position(position.cursor.part(f"{name}/"), position.state) for position in kept]
        try:
            for name, positions in parts.items():
                remove_consumed(self.store, BufferFolder(name), positions)
        except StorageError as error:
            logger.warning("consumed shards of %s were not removed: %s; the next commit tries again", self.url, error)

    def close(self) -> None:
        """Wait for a commit in the background, then release the lease. Idempotent. Raises as the commit."""
        try:
            self.checkpoints.close()
        finally:
            self.lease.release()


def open_tracker(job: Job, pending: Sequence[Mapping[str, Any]] = (), parent_job_id: str | None = None) -> Tracker:
    """The job's one MLflow run, found again on a resume. `pending`: points the last commit held back for it."""
    record, config = job.record, job.config
    return Tracker.open(
        config.monitor,
        job_id=record.job_id,
        job_url=job.url,
        run_name=config.job_path,
        run_id=record.mlflow_run_id,
        parent_job_id=parent_job_id,
        tags={"trinity.attempt": str(record.attempt), "trinity.code_version": record.code_version},
        params=config.model_dump(mode="json"),
        pending=pending,
        root_dir=config.checkpoint_root_dir,
        project=config.project,
    )


def already_done(config: Config) -> bool:
    """Whether the config's job is finished and closed, so that running it would do nothing.

    Raises ConfigError if the config may not continue the job that is there.
    """
    store = job_store(config)
    try:
        record = read_record(store.with_retry_s(START_RETRY_S))
    except ConfigError:
        return False
    _allowed_changes(store, record.config, config)
    return record.closed_at_step is not None and not goes_further(config)


def goes_further(config: Config) -> bool:
    """Whether the config would train its job beyond the last commit."""
    last = CheckpointStore(job_store(config)).latest(verify=False)
    if last is None:
        return True
    total, target = config.trainer.total_steps, config.trainer.stop_when
    at_end = last.finished if total is None else last.step >= total
    return not (at_end or (target is not None and target.reached(last.metrics)))


def job_store(config: Config) -> Storage:
    """The folder of the config's job."""
    root = Storage(config.checkpoint_root_dir, single_writer=config.storage.single_writer)
    return root.child(*config.job_path.split("/"))


def job_url(config: Config) -> str:
    """Where the config's job lies, or would lie."""
    return job_store(config).url


def read_record(store: Storage) -> JobRecord:
    """job.json of an existing job. Raises ConfigError if there is none, CheckpointError if it cannot be read."""
    record = _stored_record(store)
    if record is None:
        raise ConfigError(f"{store.url}: no job here (job.json is missing); give the URL that the run printed")
    return record


def _stored_record(store: Storage) -> JobRecord | None:
    where = store.where("job.json")
    try:
        stored = store.read_json("job.json")
        version = stored.get("format_version") if isinstance(stored, dict) else None
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise CheckpointError(
                f"{where} has format {version}, this version reads up to {FORMAT_VERSION}; upgrade trinity-flows"
            )
        return JobRecord.model_validate(stored)
    except FileNotFoundError:
        return None
    except (DamagedObject, ValidationError) as error:
        raise CheckpointError(
            f"{where} does not say which job this is: {error}; restore it from a copy, or start under another name"
        ) from error


def _continue(store: Storage, config: Config) -> JobRecord:
    now: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "config_fingerprint": fingerprint(config),
        "code_version": importlib.metadata.version("trinity-flows"),
    }
    record = _stored_record(store)
    if record is None:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return JobRecord(job_id=secrets.token_hex(8), created_at=created, attempt=1, **now)
    changed = _allowed_changes(store, record.config, config)
    now["closed_at_step"] = None
    attempt = record.attempt + 1
    log = (*record.changes, *({"attempt": attempt, **change} for change in changed))
    return record.model_copy(update={**now, "attempt": attempt, "changes": log})


def _allowed_changes(store: Storage, before: Mapping[str, Any], config: Config) -> list[dict[str, Any]]:
    try:
        found = changes(before, config)
    except ValidationError as error:
        raise CheckpointError(
            f"{store.where('job.json')} holds a config that this version of trinity-flows does not take: {error}; go "
            "on with the version that wrote it, or start under another name"
        ) from error
    refused = [change for change in found if change.resume is not Resume.SAFE]
    if refused and _has_made_something(store):
        lines = [f"  {c.field}: {c.before!r} -> {c.after!r} ({c.resume.value})" for c in refused]
        raise ConfigError(
            f"{store.url}: the job was started with another config:\n" + "\n".join(lines) + "\n"
            "Go on with the config it was started with, or give the new experiment a name of its own: --set name=..."
        )
    return [{"field": c.field, "before": c.before, "after": c.after} for c in found]


def _has_made_something(store: Storage) -> bool:
    """Whether anything depends on the config: a job that failed before that, stages included, may be corrected."""
    names = (info.name for info in store.list(recursive=True))
    return any(PurePosixPath(name).name != "job.json" and PurePosixPath(name).parent.name != "lease" for name in names)


def fetch_model(model_path: str, into: Path, key: str = "model.model_path") -> Path:
    """A local HF folder for `model_path`, which the config gives under `key`: itself if local, else downloaded.

    One that lies in a job's checkpoint must be what its commit says, in size and hash. Raises ConfigError if there is
    none, CheckpointError if it is damaged or no commit vouches for it.
    """
    local = Path(model_path).expanduser()
    if (found := COMMITTED_MODEL.fullmatch(model_path)) is not None:
        checkpoints = CheckpointStore(Storage(found[1]).with_retry_s(START_RETRY_S))
        if (folder := checkpoints.model_folder(found[2], into)) is not None:
            return folder
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ConfigError(f"{key} {model_path}: it has no config.json, so it is not an HF model folder")
        return local
    if "://" not in model_path:
        raise ConfigError(
            f"{key} {model_path}: no such folder; give an HF folder or its URL (nothing is fetched from the "
            "Hugging Face Hub: download a model first)"
        )
    store = Storage(model_path)
    files = store.with_retry_s(START_RETRY_S).list(recursive=True)
    if not any(file.name == "config.json" for file in files):
        raise ConfigError(f"{key} {model_path}: no config.json there; give the URL of an HF folder")
    for file in files:
        target = into / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(file.name, target)
    return into
