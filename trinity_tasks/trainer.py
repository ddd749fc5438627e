"""`Trainer`: consume experiences and train the model. A plain class, free of Prefect; the loop is in `loop.py`.

Owns: one job's state between two steps (cursor, metrics, last sync) and the order in which it becomes durable. Does not
own: gradients (engines), the commit protocol (`checkpoint.py`), sampling (`explorer.py`).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from engines.base import SamplingEngine, TrainEngineWrapper
from engines.errors import CheckpointError, ConfigError, StarvedError
from engines.experience import Experience
from engines.plugins import hint
from engines.registry import get_trainer_wrapper as build_engine
from trinity_tasks.buffer.cursor import Position
from trinity_tasks.buffer.source import Batch, BatchSource, batch_metrics
from trinity_tasks.checkpoint import Manifest
from trinity_tasks.config import Config
from trinity_tasks.evaluator import Evaluator
from trinity_tasks.explorer import Explorer
from trinity_tasks.job import Job, fetch_model, open_tracker
from trinity_tasks.loop import Steps, training_loop
from trinity_tasks.offline.importer import import_data
from trinity_tasks.progress_watch import ProgressWatch
from trinity_tasks.synchronizer import RunningStatus, Synchronizer
from trinity_tasks.tracking import Tracker
from trinity_tasks.usage import Usage

__all__ = ["TrainEngineWrapper", "Trainer", "get_trainer_wrapper"]

logger = logging.getLogger(__name__)

Observer = Callable[[int, Mapping[str, float]], None]
"""Told (step, metrics) after each step."""
BatchObserver = Callable[[int, Sequence[Experience]], None]
"""Told (step, rows) once the step has trained on them."""

SPOOL_FILE = "metrics_spool.json"
SYNC_POLL_S = 1.0


def get_trainer_wrapper(config: Config) -> TrainEngineWrapper:
    """The engine that the config names. Raises ConfigError for an unknown trainer.trainer_type."""
    return build_engine(config.engine)


class Trainer:
    """Consume the experience and train the model.

    Example:
        >>> trainer = Trainer(config)       # doctest: +SKIP
        >>> await trainer.prepare()         # doctest: +SKIP
        >>> await trainer.train()           # doctest: +SKIP
        'trainer'
        >>> await trainer.shutdown()        # doctest: +SKIP
    """

    job: Job
    source: BatchSource
    synchronizer: Synchronizer
    tracker: Tracker
    explorer: Explorer | None = None
    """In mode both: produces the experiences."""
    evaluator: Evaluator | None = None
    """Present when there are evaluation task sets and the engine can sample."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for an unknown trainer.trainer_type, and if the config has stages."""
        config.require_one_job("train")
        self.config = config
        self.engine = get_trainer_wrapper(config)
        self.observers: list[Observer] = []
        self.batch_observers: list[BatchObserver] = []
        self.stop_requested = False
        """Whether `request_stop` was called; the loop ends after the step that runs, and commits."""
        self.parent_job_id: str | None = None
        """Job whose MLflow run is the parent of this one's. Set it before `prepare`."""
        self.resumed_from: int | None = None
        """Step of the checkpoint that `prepare` restored."""
        self._position = Position()
        self._num_experiences = 0
        self._usage = Usage()
        self._metrics: dict[str, float] = {}
        self._last_metrics: dict[str, float] = {}
        self._data_ended = False
        self._sync_due = False
        self._last_sync_step = 0
        self._last_sync_time: float | None = None
        self._saved: tuple[int, bool] = (0, False)
        self._evaluated_step = -1
        self._scratch: Path | None = None
        self._num_staged = 0
        self._watch = ProgressWatch(config.name)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Take the job's lease, restore the last commit, build the engine, open the metrics, publish the weights.

        Raises ConfigError, LeaseLost, StorageError, CheckpointError (no valid checkpoint is left), EngineError.
        """
        self.job = Job.open(self.config)
        self._scratch = self.job.new_scratch()
        model = self.config.model
        self.engine.model_dir = self._fetched(model.model_path, "model_path")
        self.engine.teacher_model_dir = self._fetched(model.teacher_model_path, "teacher_model_path")
        self.engine.critic_model_dir = self._fetched(model.critic_model_path, "critic_model_path")
        manifest = self.job.checkpoints.restore_latest(self._scratch / "restored")
        if manifest is not None:
            self.engine.restore_dir = self._scratch / "restored"
        self.job.checkpoints.clean_orphans()
        await self.engine.prepare()
        import_data(self.config, self.job.store, self.engine)
        spool = self._scratch / "restored" / SPOOL_FILE
        pending: list[dict[str, Any]] = json.loads(spool.read_text()) if manifest is not None else []
        self.tracker = open_tracker(self.job, pending, self.parent_job_id)
        self.source = BatchSource(
            self.job.strategy,
            self.job.ledger,
            timeout_s=self.config.buffer.trainer_input.experience_buffer.max_read_timeout,
            last_batch=self.config.buffer.trainer_input.last_batch,
            read_ahead=self.config.mode == "train",
        )
        self.synchronizer = Synchronizer(self.job.weights)
        self.engine.weights_sink = self.synchronizer.publish_memory
        self._restore(manifest)
        self._build_samplers()
        await self.synchronizer.set_trainer_status(RunningStatus.RUNNING)
        if self.config.synchronizer.sync_method != "memory":
            await self.sync_weight()  # before anyone waits for weights; after a resume, those of the commit

    def _fetched(self, path: str | None, field: str) -> Path | None:
        assert self._scratch is not None
        return None if path is None else fetch_model(path, self._scratch / field, f"model.{field}")

    def _restore(self, manifest: Manifest | None) -> None:
        self._last_sync_step = self.train_step_num
        if manifest is None:
            return
        if self.train_step_num != manifest.step:
            raise CheckpointError(
                f"{self.job.url}: commit {manifest.number} is of step {manifest.step}, the engine restored step "
                f"{self.train_step_num}; the snapshot is not the engine's: check trainer.trainer_type"
            )
        self._position = manifest.position
        self._usage = manifest.usage
        self._num_experiences = manifest.num_experiences
        self._last_metrics = dict(manifest.metrics)
        self._saved = (manifest.step, manifest.finished)
        self.resumed_from = manifest.step

    def _build_samplers(self) -> None:
        if self.config.mode != "both":
            return
        workflow = self.config.buffer.explorer_input.default_workflow_type
        if not isinstance(self.engine, SamplingEngine):
            raise ConfigError(
                f"trainer.trainer_type {self.config.trainer.trainer_type} cannot sample in this process; "
                "use mode: train and write the experiences from elsewhere"
            )
        sampler = self.engine.make_sampler() if workflow == "sample" or self._eval_tasksets else None
        tokenizer = self.engine.tokenizer
        self.explorer = Explorer(self.config, self.job.store, tokenizer, sampler, register=False)
        self.job.note_tasks(self.explorer.tasks_sha256)
        if sampler is not None:
            self.synchronizer.subscribe(sampler)  # it has the current weights already
        if sampler is not None and self._eval_tasksets:
            self.evaluator = Evaluator(self.config, self.job.store, tokenizer, sampler)

    async def train(self) -> str:
        """Run the loop to its end and return the trainer's name. Errors propagate; nothing is committed after one."""
        steps = Steps(self.explore_step, self.train_on_next_batch, self.sync_weight, self.save_now, self.evaluate)
        await training_loop(self, steps)
        await self.synchronizer.set_trainer_status(RunningStatus.STOPPED)
        return self.config.trainer.name

    async def shutdown(self) -> None:
        """Close metrics with the right status, free the engine, release the lease. Idempotent."""
        async with AsyncExitStack() as last_first:  # each of these happens, even if another fails
            if self._scratch is not None:
                last_first.callback(shutil.rmtree, self._scratch, ignore_errors=True)
            if hasattr(self, "job"):
                last_first.callback(self.job.close)
            if hasattr(self, "source"):
                last_first.callback(self.source.close)
            if hasattr(self, "tracker"):
                last_first.callback(self._close_tracker)
            last_first.push_async_callback(self.engine.shutdown)
            for worker in (self.explorer, self.evaluator):
                if worker is not None:
                    last_first.callback(worker.close)

    def _close_tracker(self) -> None:
        status = "FINISHED" if self.complete else "KILLED" if self.stop_requested else "FAILED"
        delivered = self.tracker.close(status)
        closed = self.train_step_num if self.complete and delivered else None
        self.job.update(mlflow_run_id=self.tracker.run_id, closed_at_step=closed)

    def request_stop(self) -> None:
        """End the loop after the step that runs. May be called from a signal handler."""
        self.stop_requested = True

    async def is_alive(self) -> bool:
        """True: the reference's Synchronizer asks its modules this."""
        return True

    @classmethod
    def get_actor(cls, config: Config) -> Any:
        """The Trainer as a Ray actor. Raises ConfigError if the extra `ray` is not installed."""
        try:
            ray = importlib.import_module("ray")
        except ImportError as error:
            raise ConfigError("Trainer.get_actor needs Ray: pip install 'trinity-flows[ray]'") from error
        return ray.remote(cls).options(name=config.trainer.name).remote(config)

    # -- where the run stands -----------------------------------------------------------------------------------------

    @property
    def train_step_num(self) -> int:
        """Completed train steps."""
        return self.engine.train_step_num

    @property
    def finished(self) -> bool:
        """After at least one step: total_steps are done, the data has ended (if there is no total), or stop_when."""
        total, target = self.config.trainer.total_steps, self.config.trainer.stop_when
        at_end = self._data_ended if total is None else self.train_step_num >= total
        return self.train_step_num > 0 and (at_end or (target is not None and target.reached(self._measured)))

    @property
    def _measured(self) -> dict[str, float]:
        """What the last step measured, under what is known of the one that runs."""
        return self._last_metrics | self._metrics

    @property
    def complete(self) -> bool:
        """Finished, and the last step is committed."""
        return self.finished and self._saved == (self.train_step_num, True)

    @property
    def needs_experiences(self) -> bool:
        """In mode both: the buffer holds less than a batch."""
        return self.explorer is not None and not self.source.has_batch(self.train_step_num + 1, self._position)

    @property
    def needs_evaluation(self) -> bool:
        """The current weights are due for an evaluation that has not been made."""
        step, explorer = self.train_step_num, self.config.explorer
        if self.evaluator is None or self._evaluated_step == step:
            return False
        if step == 0:
            return explorer.eval_on_startup
        return self.finished or (explorer.eval_interval > 0 and step % explorer.eval_interval == 0)

    @property
    def needs_final_save(self) -> bool:
        """Something has been trained, or the end was reached, since the last commit."""
        return self.train_step_num > 0 and self._saved != (self.train_step_num, self.finished)

    @property
    def save_publishes_weights(self) -> bool:
        """A checkpoint stands in for the publication of weights (method checkpoint)."""
        return self.config.synchronizer.sync_method == "checkpoint"

    @property
    def _eval_tasksets(self) -> bool:
        return bool(self.config.buffer.explorer_input.eval_tasksets)

    # -- one step -----------------------------------------------------------------------------------------------------

    async def explore_step(self) -> dict[str, float]:
        """Produce one shard of experiences (mode both). Raises StarvedError if many in a row gave no batch."""
        assert self.explorer is not None, "only in mode: both"
        metrics = await self.explorer.explore_step()
        self._watch.explored(metrics)
        # What is a fact of the rows is logged when they train: a resume that finds the shard logs it all the same.
        self._metrics |= {name: value for name, value in metrics.items() if name.startswith(("time/", "perf/"))}
        return metrics

    async def train_on_next_batch(self) -> dict[str, float] | None:
        """Take the next batch, recorded in the ledger, and train on it. None when the data has ended.

        Raises CheckpointError if a save in the background failed, and what `next_batch` and `train_step` raise.
        """
        self.job.checkpoints.raise_pending()
        self.job.lease.check_local()
        batch = await self._sample_data()
        if batch is None:
            self._data_ended = not self.stop_requested
            return None
        usage = self._usage.after(batch.entry, batch.experiences)
        metrics = await self.train_step(batch.experiences)
        self._position, self._usage = batch.entry.after, usage
        self._num_experiences += len(batch.experiences)
        self._metrics |= usage.metrics()
        for observer in self.batch_observers:
            observer(self.train_step_num, batch.experiences)
        return metrics

    async def _sample_data(self) -> Batch | None:
        step = self.train_step_num + 1
        started = time.perf_counter()
        waiting = asyncio.ensure_future(self.source.next_batch(step, self._position, attempt=self.job.record.attempt))
        try:
            while not waiting.done():
                if self.stop_requested:
                    return None
                is_due = await self.need_sync()  # a starving explorer may need newer weights to produce at all
                meets = self.config.synchronizer.sync_method == "nccl"  # both sides stop for it: after the batch
                if is_due and not meets:
                    await self.sync_weight()
                await asyncio.wait({waiting}, timeout=SYNC_POLL_S)
                if is_due and meets:
                    await self.sync_weight()
        finally:
            waiting.cancel()
        batch = waiting.result()
        if batch is not None:
            self._metrics |= batch_metrics(batch.experiences, batch.entry)
            self._metrics["time/read_experience_s"] = time.perf_counter() - started
        return batch

    def raise_if_starved(self) -> None:
        """Raises StarvedError if the producers have ended and the job has not."""
        if self._data_ended and not self.finished:
            total = self.config.trainer.total_steps
            raise StarvedError(
                f"{self.job.url}: the producers have ended after {self.train_step_num} steps"
                f"{'' if total is None else f' of {total}'}: {self.source.left_at_end} experiences available, "
                f"{self.config.train_batch_size} needed for the next; produce more and run again, or lower "
                "trainer.total_steps or buffer.train_batch_size"
            )

    async def train_step(self, exps: list[Experience]) -> dict[str, float]:
        """Train on these experiences and return the engine's metrics. Raises EngineError, DataError."""
        started = time.perf_counter()
        metrics = await self.engine.train_step(exps)
        self._metrics |= metrics
        self._metrics["time/train_step_s"] = time.perf_counter() - started
        target = self.config.trainer.stop_when
        if target is not None and target.metric not in self._metrics and metrics.get("update/num_applied", 1):
            raise ConfigError(
                f"trainer.stop_when.metric = {target.metric!r} is not measured in a train step; "
                f"{hint(target.metric, self._metrics, 'measured')}"
            )
        return metrics

    def log_step(self) -> None:
        """Hand the step's metrics to MLflow and to the observers."""
        self.tracker.log(self.train_step_num, self._metrics)
        for observer in self.observers:
            observer(self.train_step_num, self._metrics)
        self._watch.trained(self.train_step_num, self._metrics)
        self._last_metrics, self._metrics = self._metrics, {}

    async def evaluate(self) -> dict[str, float]:
        """Accuracy of the current weights on the evaluation task sets, `eval/<name>/accuracy`."""
        assert self.evaluator is not None, "only with evaluation task sets"
        step = self.train_step_num
        if self.synchronizer.model_version != step:
            await self.sync_weight()
        results = await self.evaluator.evaluate(step)
        metrics = {f"eval/{result.taskset}/accuracy": result.accuracy for result in results}
        self.tracker.log(step, metrics, stream="eval")
        self._evaluated_step = step
        return metrics

    # -- weights and checkpoints --------------------------------------------------------------------------------------

    async def need_sync(self) -> bool:
        """Whether the samplers are due for the current weights."""
        step, config = self.train_step_num, self.config.synchronizer
        if config.sync_style != "explorer_driven":
            self._sync_due = self._last_sync_step != step and step % config.sync_interval == 0
        elif config.sync_method != "nccl" and self._last_sync_step == step:
            await self.synchronizer.notify_no_new_model_state_dict()
            self._sync_due = False
        else:
            self._sync_due = await self.synchronizer.explorer_requires_sync()
        return self._sync_due

    def need_save(self) -> bool:
        """Whether this step is one to commit."""
        interval = self.config.trainer.save_interval
        return interval > 0 and self.train_step_num % interval == 0

    async def sync_weight(self) -> dict[str, float]:
        """Hand the current weights to the samplers. The version advances only if that succeeded."""
        step, method = self.train_step_num, self.config.synchronizer.sync_method
        started = time.monotonic()
        if method == "nccl":
            if await self.synchronizer.ready_to_nccl_sync("trainer", step) is None:
                return {}
            self.engine.sync_weight()
        elif method == "memory":
            self.engine.upload_state_dict()
        elif step > 0:
            staged = self._stage()
            self.engine.save_state_dict()
            self._publish(staged, step)
            shutil.rmtree(staged)
        return self._synced(started)

    def _publish(self, staged: Path, step: int) -> None:
        self.synchronizer.publish_checkpoint(staged, step)
        if self.synchronizer.has_samplers:  # of this process: they do not look at storage
            self.engine.upload_state_dict()

    def _synced(self, started: float) -> dict[str, float]:
        now = time.monotonic()
        metrics = {"time/sync_weight_s": now - started}
        if self._last_sync_time is not None:
            metrics["time/trainer_sync_interval_s"] = now - self._last_sync_time
        self._last_sync_step, self._last_sync_time, self._sync_due = self.train_step_num, now, False
        self._metrics |= metrics
        return metrics

    def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> dict[str, float]:
        """Commit everything that a resume needs: model, optimizer, RNG, cursor, metrics that MLflow may not have yet.

        Uploads in the background unless `block_until_saved`; a failure is raised by the next step.
        Raises CheckpointError, EngineError (non-finite weights), LeaseLost.
        """
        started = time.perf_counter()
        step = self.train_step_num
        staged = self._stage()
        self.engine.save_checkpoint(block_until_saved, save_as_hf)
        pending = self.tracker.spool_state(step, self._metrics)
        (staged / SPOOL_FILE).write_text(json.dumps(pending))
        if self.save_publishes_weights and self._sync_due:
            self._publish(staged / "model", step)
            self._last_sync_step, self._last_sync_time, self._sync_due = step, time.monotonic(), False
        if self.tracker.run_id is not None:
            self.job.update(mlflow_run_id=self.tracker.run_id)
        commit = self.job.checkpoints.commit if block_until_saved else self.job.checkpoints.commit_in_background
        commit(
            staged,
            step=step,
            cursor=self._position.cursor,
            buffer_state=self._position.state,
            num_experiences=self._num_experiences,
            usage=self._usage,
            finished=self.finished,
            config_fingerprint=self.job.record.config_fingerprint,
            code_version=self.job.record.code_version,
            attempt=self.job.record.attempt,
            tracker_run_id=self.job.record.mlflow_run_id,
            tracker_high_water=self.tracker.high_water,
            metrics={name: value for name, value in self._measured.items() if math.isfinite(value)},
        )
        self._saved = (step, self.finished)
        metrics = {"time/save_checkpoint_s": time.perf_counter() - started}
        self._metrics |= metrics
        return metrics

    async def save_now(self) -> dict[str, float]:
        """Save as the loop does: it waits for the last commit, and exports as save_hf_checkpoint says."""
        last = self.finished or self.stop_requested
        mode = self.config.trainer.save_hf_checkpoint
        return self.save_checkpoint(last, mode == "always" or (mode == "last" and last))

    def _stage(self) -> Path:
        assert self._scratch is not None, "call prepare first"
        self._num_staged += 1
        staged = self._scratch / f"staged-{self._num_staged:06d}"
        staged.mkdir()
        self.engine.staging_dir = staged
        return staged
