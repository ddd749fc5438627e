"""What a job's folder says, without writing to it: `describe`, `verify`, `trace_step`."""

from __future__ import annotations

from typing import Any

from engines.config import Frozen
from engines.errors import ConfigError, DataError
from trinity_tasks.buffer import ExperienceReader
from trinity_tasks.buffer.ledger import Ledger
from trinity_tasks.buffer.reader import RemovedShard
from trinity_tasks.checkpoint import CheckpointStore, Manifest
from trinity_tasks.evaluator import Evaluation, read_evaluations
from trinity_tasks.job import JobRecord, read_record
from trinity_tasks.storage import Storage


class CommitState(Frozen):
    """One commit, in short."""

    number: int
    step: int
    url: str
    """The checkpoint's folder; `model` below it is an HF folder."""
    num_bytes: int
    created_at: str
    finished: bool


class JobState(Frozen):
    """Where a job stands."""

    url: str
    name: str
    job_id: str
    attempt: int
    """How many processes have worked on it."""
    step: int
    """Step of the last commit."""
    total_steps: int | None
    finished: bool
    num_experiences_trained: int
    """Rows that the last commit covers."""
    num_steps_recorded: int
    """Ledger entries: steps that have started, also those after the last commit."""
    mlflow_run_id: str | None
    commits: tuple[CommitState, ...]
    metrics: dict[str, float]
    """What was measured in the step of the last commit."""
    evaluations: tuple[Evaluation, ...]
    changes: tuple[dict[str, Any], ...]
    """Config changes made by resumes."""
    stages: tuple[JobState, ...] = ()
    """Of a job with stages: those that have begun. Steps and experiences are their sums."""

    @property
    def checkpoint_url(self) -> str | None:
        """The last commit's folder."""
        return self.commits[-1].url if self.commits else None

    @property
    def model_url(self) -> str | None:
        """The last commit's HF folder."""
        return f"{self.checkpoint_url}/model" if self.commits else None


def describe(url: str) -> JobState:
    """The state of the job at `url`. Raises ConfigError if there is no job, StorageError."""
    store = Storage(url)
    record = read_record(store)
    if record.config.get("stages"):
        return _describe_stages(store, record)
    manifests = CheckpointStore(store).commits()
    commits = tuple(_commit(store, manifest) for manifest in manifests)
    return JobState(
        url=store.url,
        name=str(record.config.get("name")),
        job_id=record.job_id,
        attempt=record.attempt,
        step=commits[-1].step if commits else 0,
        total_steps=record.config.get("trainer", {}).get("total_steps"),
        finished=bool(commits and commits[-1].finished),
        num_experiences_trained=manifests[-1].num_experiences if manifests else 0,
        num_steps_recorded=len(Ledger(store).steps()),
        mlflow_run_id=record.mlflow_run_id,
        commits=commits,
        metrics=manifests[-1].metrics if manifests else {},
        evaluations=tuple(read_evaluations(store)),
        changes=record.changes,
    )


def _describe_stages(store: Storage, record: JobRecord) -> JobState:
    stages = [describe(stage.url) for stage in _begun_stages(store, record)]
    totals = [stage.total_steps for stage in stages if stage.total_steps is not None]
    return JobState(
        url=store.url,
        name=str(record.config.get("name")),
        job_id=record.job_id,
        attempt=record.attempt,
        step=sum(stage.step for stage in stages),
        total_steps=sum(totals) if len(totals) == len(record.config["stages"]) else None,
        finished=record.closed_at_step is not None,
        num_experiences_trained=sum(stage.num_experiences_trained for stage in stages),
        num_steps_recorded=sum(stage.num_steps_recorded for stage in stages),
        mlflow_run_id=record.mlflow_run_id,
        commits=(),
        metrics={},
        evaluations=(),
        changes=record.changes,
        stages=tuple(stages),
    )


def _begun_stages(store: Storage, record: JobRecord) -> list[Storage]:
    """Folders of the stages that have begun, in order; none of a job without stages."""
    folders = [store.child(*str(stage["stage_name"]).split("/")) for stage in record.config.get("stages", ())]
    return [folder for folder in folders if folder.exists("job.json")]


def _commit(store: Storage, manifest: Manifest) -> CommitState:
    return CommitState(
        number=manifest.number,
        step=manifest.step,
        url=f"{store.url}/{manifest.prefix}",
        num_bytes=sum(file.size for file in manifest.files),
        created_at=manifest.created_at,
        finished=manifest.finished,
    )


def verify(url: str) -> list[str]:
    """Every problem of every commit and ledger entry: missing, wrong size or hash, unreadable. Empty: all is well."""
    store = Storage(url)
    record = read_record(store)
    if stages := _begun_stages(store, record):
        return [f"{stage.url}: {problem}" for stage in stages for problem in verify(stage.url)]
    checkpoints = CheckpointStore(store)
    commits = checkpoints.commits()
    problems = [*checkpoints.skipped, *(problem for commit in commits for problem in checkpoints.verify(commit))]
    ledger, reader = Ledger(store), ExperienceReader(store, buffer_name(record))
    for step in ledger.steps():
        try:
            reader.read(ledger.read(step).ref)
        except RemovedShard:
            continue
        except (DataError, FileNotFoundError) as error:
            problems.append(f"ledger step {step}: {error}")
    return problems


def trace_step(url: str, step: int) -> dict[str, Any]:
    """Which experiences trained this step: ledger entry, and each row's identity, reward and version.

    Raises DataError if no step of that number has been recorded, ConfigError if the job has stages, each with steps of
    its own.
    """
    store = Storage(url)
    record = one_job(store)
    ledger = Ledger(store)
    try:
        entry = ledger.read(step)
    except FileNotFoundError as error:
        known = ledger.steps()
        shown = f"{known[0]} to {known[-1]}" if known else "none"
        raise DataError(f"{url}: no ledger entry for step {step}; recorded steps: {shown}") from error
    rows = ExperienceReader(store, buffer_name(record)).read(entry.ref)
    return {
        **entry.model_dump(mode="json"),
        "experiences": [
            {
                "eid": row.eid.uid,
                "reward": row.reward,
                "model_version": row.model_version,
                "num_tokens": len(row.tokens),
                "prompt": row.prompt_text,
                "response": row.response_text,
            }
            for row in rows
        ],
    }


def one_job(store: Storage) -> JobRecord:
    """job.json of a job without stages. Raises ConfigError if there is none, or if it has stages: they are named."""
    record = read_record(store)
    if stages := _begun_stages(store, record):
        raise ConfigError(f"{store.url} has stages, name one of them: {', '.join(stage.url for stage in stages)}")
    return record


def buffer_name(record: JobRecord) -> str:
    """The buffer that the job's trainer takes its rows from."""
    return str(record.config["buffer"]["trainer_input"]["experience_buffer"]["name"])
