"""`StagedRun`: the stages of one config as jobs, each starting from the last checkpoint of the one before.

Owns: which stages remain, where each takes its model from, the parent job with its MLflow run, whose children the
stages' runs are. Does not own: running a stage (`flows.train`). A config without stages is one stage: itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trinity_tasks.config import Config
from trinity_tasks.inspection import JobState, describe
from trinity_tasks.job import Job, open_tracker
from trinity_tasks.tracking import RunStatus, Tracker


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
        """The config of each stage, in order; call `finished` before taking the next."""
        if not self._config.stages:
            yield self._config
            return
        for stage in self._config.stages:
            model = self.results[-1].model_url if self.results else None
            yield self._config.stage(stage.stage_name, model)

    def finished(self, url: str) -> JobState:
        """Note that the stage whose job lies at `url` is done."""
        state = describe(url)
        self.results.append(state)
        return state

    def publish(self, texts: Mapping[str, str], files: Mapping[str, bytes], metrics: Mapping[str, float]) -> None:
        """Put the summary on the parent's MLflow run (a config without stages: on the job's own run)."""
        if self._tracker is None:
            self._job = Job.open(self._config)
            self._tracker = open_tracker(self._job)
        for name, text in texts.items():
            self._tracker.log_text(text, name)
        for name, data in files.items():
            self._tracker.log_bytes(data, name)
        self._tracker.log(sum(state.step for state in self.results), metrics, stream="summary")

    def close(self, status: RunStatus = "FINISHED") -> None:
        """Close the parent's MLflow run and release its lease. Idempotent."""
        if self._tracker is not None:
            self._tracker.close(status)
            if self._job is not None:
                self._job.update(mlflow_run_id=self._tracker.run_id)
        if self._job is not None:
            self._job.close()
