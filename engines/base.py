"""What an engine and a sampler must offer. The only surface that `trinity_tasks` sees of the compute layer.

Contract of `train_step`: a call that raises leaves the engine unusable until `prepare` is called again; one that
returns has applied or skipped every update of the batch and says so in its metrics. step = batches consumed; update =
`optimizer.step()` calls; learning-rate schedules count updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from engines.experience import Experience, Floats, Ints
from engines.text import Tokenizer

Weights = Any
"""Opaque to everyone but engines: name -> tensor."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled response. T tokens, the stop token included when there was one."""

    tokens: Ints
    """[T] sampled ids."""
    logprobs: Floats
    """[T] logprobs of those ids under the sampling distribution, at the sampling temperature."""
    finish_reason: FinishReason
    """stop: the model ended the turn. length: it was cut at max_tokens."""

    @property
    def action_mask(self) -> np.ndarray:
        """[T] True: every sampled token trains."""
        return np.ones(len(self.tokens), np.bool_)


class Sampler(Protocol):
    """Generates from one set of weights. `version` is the train step at which they were published."""

    version: int

    def load(self, version: int, weights: Weights) -> None:
        """Take these weights from now on."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        """n completions for each prompt, equal for equal (weights, arguments).

        Raises DataError for an empty prompt or one that leaves no room for a response.
        """
        ...


class TrainEngineWrapper(ABC):
    """Wraps a training engine. Names and signatures follow trinity.trainer.trainer of Trinity-RFT.

    The owner (`Trainer`) sets the attributes below; an engine never sees a URL.
    """

    model_dir: Path | None = None
    """Local HF folder to start from, when the model comes from storage. Read by `prepare`."""
    teacher_model_dir: Path | None = None
    """The same for model.teacher_model_path."""
    critic_model_dir: Path | None = None
    """The same for model.critic_model_path."""
    restore_dir: Path | None = None
    """Local folder of a complete snapshot to resume from. Read by `prepare`."""
    staging_dir: Path | None = None
    """Empty local folder that `save_checkpoint` and `save_state_dict` fill."""
    weights_sink: Callable[[int, Weights], None] | None = None
    """Receives (version, weights) from `upload_state_dict`."""

    @abstractmethod
    async def prepare(self) -> None:
        """Build or load model and optimizer, or restore the snapshot in `restore_dir`, its step included."""

    @property
    @abstractmethod
    def train_step_num(self) -> int:
        """Completed train steps; moves only when a step has succeeded."""

    @abstractmethod
    async def train_step(self, batch_exps: list[Experience]) -> dict[str, float]:
        """Train on one batch of whole groups and return its metrics, `group/name` -> number.

        Raises EngineError (unusable until prepared again) or DataError (the batch is refused, nothing changed).
        """

    @abstractmethod
    def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> None:
        """Stage a complete snapshot in `staging_dir`: model/ (HF folder), optimizer, scheduler, RNG, step.

        Raises EngineError if a weight is not finite: such a snapshot must never exist.
        """

    @abstractmethod
    def sync_weight(self) -> None:
        """Direct transfer to samplers (method `nccl`: torch.distributed broadcast)."""

    @abstractmethod
    def upload_state_dict(self) -> None:
        """Method `memory`: hand (train_step_num, weights) to `weights_sink`."""

    @abstractmethod
    def save_state_dict(self) -> None:
        """Method `checkpoint`: stage weights only, as an HF folder, in `staging_dir`."""

    async def shutdown(self) -> None:
        """Free threads, processes and memory. Idempotent."""
        return None


@runtime_checkable
class SamplingEngine(Protocol):
    """Optional capability: an engine that can make a sampler of its own model in the same process."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; call after `prepare`."""
        ...

    def make_sampler(self) -> Sampler:
        """A sampler with the engine's current weights; call after `prepare`."""
        ...
