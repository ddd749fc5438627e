"""Our side of the train step: `HfEngine` with the grpo preset, without KL as in TRL, on the stored sequences."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from engines.config import AlgorithmConfig, EngineConfig, ModelConfig, OptimizerConfig
from engines.experience import EID, Experience
from engines.registry import get_trainer_wrapper
from tests.benchmarks.pairs import Commands
from tests.benchmarks.workload import GROUP_SIZE, LEARNING_RATE, read_rows

TRL_DEFAULTS = {"betas": (0.9, 0.999), "weight_decay": 0.0, "clip_grad": 1.0}
"""Of its optimizer: the same here, so that both apply the same update."""


def main() -> None:
    """Serve steps of the workload in argv[1], JSON: folder, dtype, num_threads."""
    spec = json.loads(sys.argv[1])
    asyncio.run(_serve(spec, Commands()))


async def _serve(spec: dict[str, Any], commands: Commands) -> None:
    engine = get_trainer_wrapper(_config(spec))
    engine.model_dir = Path(spec["folder"])
    await engine.prepare()
    rows = _experiences(engine.model_dir)
    commands.ready()
    while commands.wait():
        commands.begin()
        metrics = await engine.train_step(rows)
        commands.end()
        commands.report(
            loss=metrics["loss/policy"],
            grad_norm=metrics["grad/norm"],
            num_trained_tokens=metrics["data/num_trained_tokens"],
        )
    await engine.shutdown()


def _config(spec: dict[str, Any]) -> EngineConfig:
    return EngineConfig(
        trainer_type="hf",
        model=ModelConfig(model_path=spec["folder"], dtype=spec["dtype"], max_model_len=1024),
        algorithm=AlgorithmConfig(
            algorithm_type="grpo",
            repeat_times=GROUP_SIZE,
            kl_loss_fn="none",
            optimizer=OptimizerConfig(lr=LEARNING_RATE, **TRL_DEFAULTS),
        ),
        total_steps=None,
        num_threads=spec["num_threads"],
    )


def _experiences(folder: Path) -> list[Experience]:
    return [
        Experience(
            tokens=np.asarray(row.prompt + row.response, np.int32),
            prompt_length=len(row.prompt),
            logprobs=np.asarray(row.logprobs, np.float32),
            reward=row.reward,
            eid=EID(batch=0, task=index // GROUP_SIZE, run=index % GROUP_SIZE),
        )
        for index, row in enumerate(read_rows(folder))
    ]


if __name__ == "__main__":
    main()
