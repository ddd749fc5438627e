"""Sampling outside of a trainer's process: `StandaloneExplorer` writes experiences, `evaluate_checkpoint` measures.

Owns: getting weights from storage into a sampler. Does not own: what is sampled (`explorer.py`) or measured
(`evaluator.py`). Neither takes the job's lease: shards and evaluations are create-only objects of their own names.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from engines.base import SamplingEngine, TrainEngineWrapper
from engines.errors import ConfigError
from trinity_tasks.config import Config
from trinity_tasks.evaluator import Evaluation, Evaluator
from trinity_tasks.explorer import Explorer
from trinity_tasks.inspection import describe
from trinity_tasks.job import fetch_model, job_store, job_url
from trinity_tasks.trainer import get_trainer_wrapper
from trinity_tasks.weights import WeightStore


async def _sampling_engine(config: Config, model_dir: Path | None) -> TrainEngineWrapper:
    engine = get_trainer_wrapper(config)
    engine.model_dir = model_dir
    await engine.prepare()
    if not isinstance(engine, SamplingEngine):  # asks the engine for its tokenizer, which it has from now on
        raise ConfigError(f"trainer.trainer_type {config.trainer.trainer_type} cannot sample in this process; use hf")
    return engine


class StandaloneExplorer:
    """Writes experiences for a trainer elsewhere (mode: train), with the newest published weights."""

    def __init__(self, config: Config) -> None:
        config.require_one_job("explore")
        if config.buffer.explorer_input.taskset is None:
            raise ConfigError("explore needs buffer.explorer_input.taskset: there are no tasks to sample")
        if config.trainer.total_steps is None:
            raise ConfigError("explore needs trainer.total_steps: it writes one shard per step")
        self._config = config
        self._store = job_store(config)
        self._weights = WeightStore(self._store)
        self._scratch = Path(tempfile.mkdtemp(prefix="trinity-flows-explore-"))
        self._engine: TrainEngineWrapper | None = None
        self._explorer: Explorer | None = None
        self._version = 0
        self.stop_requested = False

    def request_stop(self) -> None:
        """End after the step that runs. May be called from a signal handler."""
        self.stop_requested = True

    @property
    def num_steps(self) -> int:
        """Shards written, by this process or an earlier one."""
        return 0 if self._explorer is None else self._explorer.num_steps

    @property
    def finished(self) -> bool:
        """All shards are written."""
        total = self._config.trainer.total_steps
        return self._explorer is not None and total is not None and self.num_steps >= total

    async def prepare(self) -> None:
        """Load the newest published weights, or the initial model. Raises ConfigError, StorageError."""
        latest = self._weights.latest()
        path = self._config.model.model_path
        if latest is not None:
            await self._use(latest.version)
        else:
            await self._build(None if path is None else fetch_model(path, self._scratch / "initial_model"))

    async def _use(self, version: int) -> None:
        folder = self._scratch / f"version_{version}"
        self._weights.fetch(version, folder)
        self._version = version
        await self._build(folder)

    async def _build(self, model_dir: Path | None) -> None:
        await self._release()
        self._engine = await _sampling_engine(self._config, model_dir)
        assert isinstance(self._engine, SamplingEngine)
        sampler = self._engine.make_sampler()
        sampler.version = self._version
        self._explorer = Explorer(self._config, self._store, self._engine.tokenizer, sampler)

    async def explore_step(self) -> dict[str, float]:
        """Take newer weights if there are any, then write one shard. Raises DataError, StorageError."""
        latest = self._weights.latest()
        if latest is not None and latest.version > self._version:
            await self._use(latest.version)
        assert self._explorer is not None, "call prepare first"
        return await self._explorer.explore_step()

    def end(self) -> None:
        """Tell readers that no more will come."""
        assert self._explorer is not None, "call prepare first"
        self._explorer.end()

    async def _release(self) -> None:
        if self._explorer is not None:
            self._explorer.close()
        if self._engine is not None:
            await self._engine.shutdown()

    async def shutdown(self) -> None:
        """Free the engine. Idempotent."""
        await self._release()
        shutil.rmtree(self._scratch, ignore_errors=True)


async def evaluate_checkpoint(config: Config) -> list[Evaluation]:
    """Accuracy of the job's last checkpoint on its evaluation task sets; measured once, then read.

    Raises ConfigError (no checkpoint, no task sets), StorageError.
    """
    if not config.buffer.explorer_input.eval_tasksets:
        raise ConfigError("evaluate needs buffer.explorer_input.eval_tasksets: there is nothing to measure on")
    state = describe(job_url(config))
    if state.model_url is None:
        raise ConfigError(f"{state.url}: the job has no checkpoint yet; train it first")
    scratch = Path(tempfile.mkdtemp(prefix="trinity-flows-evaluate-"))
    try:
        engine = await _sampling_engine(config, fetch_model(state.model_url, scratch))
        assert isinstance(engine, SamplingEngine)
        evaluator = Evaluator(config, job_store(config), engine.tokenizer, engine.make_sampler())
        try:
            return await evaluator.evaluate(state.step)
        finally:
            evaluator.close()
            await engine.shutdown()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
