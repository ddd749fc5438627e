"""`StagedRun`: the stages of one config as jobs, each starting from the last checkpoint of the one before.

Owns: which stages remain, where each takes its model from, the parent job with its MLflow run, whose children the
stages' runs are. Does not own: running a stage (`flows.train`). A config without stages is one stage: itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from engines.errors import ConfigError
from trinity_tasks.buffer.ledger import Ledger
from trinity_tasks.config import Config
from trinity_tasks.inspection import JobState, describe
from trinity_tasks.job import Job, already_done, goes_further, job_store, job_url, open_tracker
from trinity_tasks.tracking import RunStatus, Tracker

SUMMARY_FILE = "summary/summary.json"


class StagedRun:
    """The stages of a config. Use `open`, `remaining` with `finished`, `publish`, `close`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._job: Job | None = None
        self._tracker: Tracker | None = None
        self.results: list[JobState] = []
        """State of every stage that is done, in order."""

    @property
    def parent_job_id(self) -> str | None:
        """Job id of the parent, if there are stages."""
        return self._job.record.job_id if self._job else None

    def open(self) -> None:
        """Take the parent's lease and open its MLflow run. Raises what `Job.open` raises."""
        if self._config.stages:
            self._job = Job.open(self._config)
            self._tracker = open_tracker(self._job)

    def remaining(self) -> Iterator[Config]:
        """The config of each stage, in order; call `finished` before taking the next.

        Raises ConfigError if a stage would train further although the next one has begun from where it ended.
        """
        if not self._config.stages:
            yield self._config
            return
        names = [stage.stage_name for stage in self._config.stages]
        for name, following in zip(names, [*names[1:], None], strict=True):
            stage = self._config.stage(name, self.results[-1].model_url if self.results else None)
            if following is not None:
                self._refuse_to_outgrow(stage, name, following)
            yield stage

    def _refuse_to_outgrow(self, stage: Config, name: str, following: str) -> None:
        store, next_store = job_store(stage), job_store(self._config.stage(following))
        if not (store.exists("job.json") and Ledger(next_store).steps() and goes_further(stage)):
            return
        state = describe(store.url)
        raise ConfigError(
            f"{state.url}: stage {following} has begun from step {state.step} of stage {name}, which this config would "
            f"train to step {stage.trainer.total_steps}; {following} would not see it. Keep trainer.total_steps of "
            f"{name}, or give the new experiment a name of its own: --set name=..."
        )

    def finished(self, url: str) -> JobState:
        """Note that the stage whose job lies at `url` is done."""
        state = describe(url)
        self.results.append(state)
        return state

    def finished_summary(self) -> dict[str, Any] | None:
        """The summary that was published, if no stage has anything left to do; else None.

        Raises ConfigError if the config may not continue the jobs that are there.
        """
        store = job_store(self._config)
        try:
            summary = store.read_json(SUMMARY_FILE)
        except FileNotFoundError:
            return None
        stages = StagedRun(self._config)
        for stage in stages.remaining():
            if not already_done(stage):
                return None
            stages.finished(job_url(stage))
        return cast("dict[str, Any]", summary)

    def history(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of a metric of the last stage, over all its attempts."""
        return self._open_tracker().metric_history(key, run_id=self.results[-1].mlflow_run_id)

    @property
    def mlflow_ui(self) -> str:
        """What opens the MLflow UI."""
        return self._open_tracker().ui_command

    def url_of(self, name: str) -> str:
        """Where a published file lies."""
        return job_store(self._config).where(name)

    def publish(self, texts: Mapping[str, str], files: Mapping[str, bytes], metrics: Mapping[str, float]) -> None:
        """Keep the summary in the parent's folder and on its MLflow run; without stages, the job's own."""
        store, tracker = job_store(self._config), self._open_tracker()
        contents = {name: text.encode() for name, text in texts.items()} | dict(files)
        for name, data in sorted(contents.items(), key=lambda item: item[0] == SUMMARY_FILE):  # it comes last
            store.write(name, data)
            tracker.log_bytes(data, name)
        tracker.log(sum(state.step for state in self.results), metrics, stream="summary")

    def _open_tracker(self) -> Tracker:
        if self._tracker is None:
            self._job = Job.open(self._config)
            self._tracker = open_tracker(self._job)
        return self._tracker

    def close(self, status: RunStatus) -> None:
        """Close the parent's MLflow run and release its lease. Idempotent."""
        if self._tracker is not None and self._job is not None:
            closed = self._tracker.close(status) and status == "FINISHED"
            step = self.results[-1].step if closed else None
            self._job.update(mlflow_run_id=self._tracker.run_id, closed_at_step=step)
        if self._job is not None:
            self._job.close()
