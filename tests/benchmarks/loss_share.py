"""What an algorithm costs beside the models: the train step of every preset, and the same with models that are free.

Free models return numbers that are there already, so all that is left is advantages, filters, the loss with its
gradient by the logprobs, and the metrics. Old logprobs are the sampler's. Both run in turns, in one process, on one
thread.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engines.algorithms.presets import PRESETS, resolve
from engines.algorithms.spec import Algorithm
from engines.config import AlgorithmConfig, EngineConfig, ModelConfig
from engines.experience import EID, Experience
from engines.hf.batch import MicroBatch
from engines.hf.models import Folders, Models, build
from engines.hf.optim import Update
from engines.hf.step import TrainStep
from engines.intake import Limits, take_in
from engines.rows import StepRows
from tests.benchmarks import workload

ROUNDS = 3
BUDGET = 2048
"""Tokens of a micro-batch."""
DEVICE = torch.device("cpu")


class FreePolicy:
    """Logprobs, entropies and values out of nothing."""

    layout = "packed"

    def __init__(self) -> None:
        self.model = self
        self.device = DEVICE

    def logprobs(self, batch: MicroBatch, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """[A] that carry a gradient."""
        made = [torch.full((len(batch.row_of_token),), -4.0, requires_grad=True) for _ in range(1 + entropy)]
        return made[0], made[1] if entropy else None


class FreeCritic:
    """Values that are there, updates that do nothing."""

    last_applied = True

    def with_values(self, rows: StepRows, budget: int) -> StepRows:
        """Values of 0.1."""
        return rows.with_columns({"values": [np.full(len(row.actions), 0.1) for row in rows.rows]})

    def update(self, rows: StepRows, budget: int, mode: str) -> dict[str, Any]:
        """Nothing."""
        return {}


class FreeOptimizer:
    """Updates that do nothing."""

    next_lr = 0.0

    def update(self, loss: float) -> Update:
        """Applied."""
        return Update(applied=True, grad_norm=1.0, lr=0.0)


def loss_share() -> dict[str, float]:
    """Largest share over the presets; 0.87M parameters, 64 sequences of 50 to 500 tokens."""
    torch.set_num_threads(1)
    shares: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workload.write_workload(folder, workload.TINY, workload.LENGTHS_TINY)
        for preset in PRESETS:
            shares[preset] = _share(preset, folder)
    return {"loss_share_of_step": max(shares.values())} | {
        f"loss_share_of_step_{preset}": share for preset, share in shares.items()
    }


def _share(preset: str, folder: Path) -> float:
    config = EngineConfig(
        trainer_type="hf",
        model=ModelConfig(model_path=str(folder), max_model_len=1024),
        algorithm=AlgorithmConfig(algorithm_type=preset, repeat_times=workload.GROUP_SIZE),
        total_steps=None,
    )
    algorithm = resolve(config.algorithm)
    models = build(config, algorithm, Folders(model=folder), DEVICE)
    policy, critic = FreePolicy(), FreeCritic() if models.critic else None
    reference = policy if models.reference else None
    free = Models(models.loaded, *cast("Any", (policy, FreeOptimizer(), reference, None, critic)))
    exps, limits = _experiences(algorithm, folder), Limits(models.loaded.vocab_size, 1024)

    def step(made: TrainStep) -> Callable[[], object]:
        return lambda: made.run(take_in(exps, algorithm, limits).rows, 1, step=0, seed=0)

    sides = [step(TrainStep(each, algorithm, BUDGET)) for each in (models, free)]
    rounds = [[_seconds(side) for side in sides] for _ in range(1 + ROUNDS)][1:]
    return statistics.median(cost / whole for whole, cost in rounds)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _experiences(algorithm: Algorithm, folder: Path) -> list[Experience]:
    """The stored rows, with what the algorithm needs beside them."""
    rows = workload.read_rows(folder)
    if "pairs" in algorithm.needs:
        return [
            Experience(
                tokens=np.asarray(one.prompt, np.int32),
                chosen=np.asarray(one.response, np.int32),
                rejected=np.asarray(other.response, np.int32),
                eid=EID(0, index),
            )
            for index, (one, other) in enumerate(zip(rows[0::2], rows[1::2], strict=True))
        ]
    return [
        Experience(
            tokens=np.asarray(row.prompt + row.response, np.int32),
            prompt_length=len(row.prompt),
            logprobs=np.asarray(row.logprobs, np.float32),
            teacher_logprobs=np.asarray(row.logprobs, np.float32) + np.float32(0.1),
            reward=row.reward - 0.5,  # some of each group are right, some wrong: no filter drops all
            eid=EID(batch=0, task=index // workload.GROUP_SIZE, run=index % workload.GROUP_SIZE),
            info={"reward_baseline": 0.5, "is_expert": index % workload.GROUP_SIZE > 5},
        )
        for index, row in enumerate(rows)
    ]
