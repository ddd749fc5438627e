"""`HfEngine`: one process, one device. Owns: life cycle, the worker thread, and what may be called when.

All torch work runs in one thread that belongs to the engine: a signal in the main thread never lands inside a step.
Does not own: the step (`engines.hf.step`), the snapshot's format (`engines.hf.state`).
"""

from __future__ import annotations

import asyncio
import functools
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from engines.algorithms.presets import resolve
from engines.base import Sampler, TrainEngineWrapper
from engines.config import EngineConfig
from engines.errors import DataError, EngineError, TrinityFlowsError
from engines.experience import Experience
from engines.hf import model as hf_model
from engines.hf import state
from engines.hf.model import LoadedModel
from engines.hf.models import CRITIC, DTYPES, Folders, Models, build
from engines.hf.sampler import HfSampler
from engines.hf.step import StepReport, TrainStep
from engines.intake import Limits, take_in
from engines.text import Tokenizer

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Parts:
    """What `prepare` builds; gone after a failure."""

    models: Models
    step: TrainStep
    limits: Limits
    consecutive_nonfinite: int

    @property
    def loaded(self) -> LoadedModel:
        """The model that is trained."""
        return self.models.loaded


class HfEngine(TrainEngineWrapper):
    """Trains any Hugging Face causal LM in this process.

    Example:
        >>> engine = HfEngine(config.engine)  # doctest: +SKIP
        >>> await engine.prepare()  # doctest: +SKIP
        >>> metrics = await engine.train_step(experiences)  # doctest: +SKIP
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError for an algorithm that does not exist; loads nothing yet."""
        self._config = config
        self._algorithm = resolve(config.algorithm)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._parts: _Parts | None = None
        self._why_unusable = "prepare() has not been called"
        self._train_step_num = 0
        self._worker: ThreadPoolExecutor | None = None

    @property
    def train_step_num(self) -> int:
        """Completed train steps."""
        return self._train_step_num

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._usable().loaded.tokenizer

    async def prepare(self) -> None:
        """Load or build the model, or restore `restore_dir`; then the engine is at the snapshot's step, else at 0."""
        await asyncio.wrap_future(self._submit(self._prepare))

    async def train_step(self, batch_exps: list[Experience]) -> dict[str, float]:
        """One step on whole groups; a cancelled call leaves the engine unusable, like one that raises EngineError."""
        future = self._submit(functools.partial(self._train_step, batch_exps))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._discard("train_step was cancelled while it ran")
            raise

    def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> None:
        """Stage a snapshot. The model is an HF folder and the call blocks, whatever the two arguments say."""
        del block_until_saved, save_as_hf
        self._submit(self._save_checkpoint).result()

    def save_state_dict(self) -> None:
        """Stage the model as an HF folder, without optimizer and counters."""
        self._submit(self._save_model).result()

    def upload_state_dict(self) -> None:
        """Hand copies of the weights to `weights_sink`."""
        sink = self.weights_sink
        if sink is None:
            raise EngineError("upload_state_dict was called without a weights_sink; the Trainer must set one before")
        sink(self._train_step_num, self._submit(self._copy_weights).result())

    def sync_weight(self) -> None:
        """Not offered: this engine has no process group to broadcast in."""
        raise EngineError("HfEngine has no nccl transfer; set synchronizer.sync_method to memory or checkpoint")

    def make_sampler(self) -> Sampler:
        """A sampler with a copy of the current weights, at version `train_step_num`."""
        return self._submit(self._make_sampler).result()

    async def shutdown(self) -> None:
        """Free the model and end the worker thread. Idempotent; `prepare` starts over."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await asyncio.to_thread(worker.shutdown, cancel_futures=True)
        self._discard("shutdown() was called")

    # In the worker thread from here on.

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "engine", initializer=self._set_threads)
        return self._worker.submit(work)

    def _set_threads(self) -> None:
        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)  # per thread under OpenMP, so it is set in the worker

    def _prepare(self) -> None:
        self._discard("prepare() failed")
        config, restore = self._config, self.restore_dir
        folders = Folders(self.model_dir, self.teacher_model_dir, self.critic_model_dir, restore)
        models = build(config, self._algorithm, folders, self._device)
        step = TrainStep(models, self._algorithm, config.max_token_len_per_gpu, config.critic_warmup)
        if restore is not None:
            kept = state.read(restore, models.optimizers)
        else:
            kept = state.EngineState()
            state.seed_everything(config.seed)
        step.set_kl_coefficients(kept.kl_coefficients)
        limits = Limits(
            models.loaded.vocab_size,
            config.model.max_model_len,
            config.model.max_response_tokens,
            has_teacher=models.teacher is not None,
        )
        self._parts = _Parts(models, step, limits, kept.consecutive_nonfinite)
        self._train_step_num = kept.train_step_num

    def _train_step(self, exps: list[Experience]) -> dict[str, float]:
        parts, start = self._usable(), time.perf_counter()
        intake = take_in(exps, self._algorithm, parts.limits)
        try:
            report = parts.step.run(
                intake.rows,
                self._config.updates_per_step,
                step=self._train_step_num,
                seed=self._config.seed + self._train_step_num,
                consecutive_nonfinite=parts.consecutive_nonfinite,
            )
            self._check_nonfinite(report)
        except DataError:  # the batch is refused, and nothing has changed
            raise
        except TrinityFlowsError as error:
            self._discard(f"train step {self._train_step_num + 1} failed: {error}")
            raise
        except Exception as error:  # the engine worker boundary: whatever torch raises, the weights are now unknown
            self._discard(f"train step {self._train_step_num + 1} failed: {error}")
            raise EngineError(
                f"train step {self._train_step_num + 1} of {len(intake.rows)} rows failed with {type(error).__name__}: "
                f"{error} ({_place(error)}); correct what failed there, or lower trainer.max_token_len_per_gpu if "
                "memory ran out, and run again: it goes on from the last checkpoint"
            ) from error
        parts.consecutive_nonfinite = report.consecutive_nonfinite
        self._train_step_num += 1
        seconds = time.perf_counter() - start
        return (
            intake.stats
            | report.metrics
            | {
                "data/num_trained_tokens": float(report.num_trained_tokens),
                "update/num_applied": float(report.num_applied),
                "update/num_skipped": float(report.num_empty + report.num_nonfinite),
                "update/num_nonfinite": float(report.num_nonfinite),
                "time/engine_s": seconds,
                "perf/tokens_per_s": report.num_read_tokens / seconds,
            }
        )

    def _check_nonfinite(self, report: StepReport) -> None:
        limit, total = self._config.max_nonfinite_steps, self._config.total_steps
        if total is not None:  # a job without a single update has not succeeded
            limit = min(limit, total * self._config.updates_per_step)
        if report.consecutive_nonfinite >= limit:
            raise EngineError(
                f"{report.consecutive_nonfinite} updates in a row were skipped because a loss, a gradient or a logprob "
                f"was not finite (trainer.max_nonfinite_steps = {limit}); lower the learning rate or look at the data"
            )

    def _save_checkpoint(self) -> None:
        parts, folder = self._usable(), self._save_model()
        if parts.models.critic is not None:
            parts.models.critic.save(folder / CRITIC)
        kept = state.EngineState(self._train_step_num, parts.consecutive_nonfinite, dict(parts.step.kl_coefficients))
        state.write(folder, parts.models.optimizers, kept)

    def _save_model(self) -> Path:
        parts, folder = self._usable(), self.staging_dir
        if folder is None:
            raise EngineError("there is no staging_dir to save to; the Trainer must set one before")
        for name, tensor in parts.loaded.model.state_dict().items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise EngineError(
                    f"{name} has values that are not finite at step {self._train_step_num}; nothing was saved"
                )
        hf_model.save(parts.loaded, folder / state.MODEL)
        return folder

    def _copy_weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self._usable().loaded.model.named_parameters()}

    def _make_sampler(self) -> Sampler:
        loaded = self._usable().loaded
        sampler = HfSampler(
            hf_model.twin(loaded),
            stop_token_ids=loaded.stop_token_ids,
            pad_token_id=loaded.pad_token_id,
            max_model_len=self._config.model.max_model_len,
            compute_dtype=DTYPES[self._config.model.dtype],
        )
        sampler.version = self._train_step_num
        return sampler

    def _usable(self) -> _Parts:
        if self._parts is None:
            raise EngineError(f"the engine cannot be used: {self._why_unusable}; call prepare()")
        return self._parts

    def _discard(self, why: str) -> None:
        self._parts, self._why_unusable = None, why


def _place(error: Exception) -> str:
    """File, line and function where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
