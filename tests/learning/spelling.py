"""Runs of infra/configs/spell.yaml in this process, without Prefect: what was reached, in which time; two controls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from engines.experience import Experience
from engines.hf.engine import HfEngine
from tests.integration.small_job import train
from trinity_tasks.config import Config, deep_merge
from trinity_tasks.config_source import load_config
from trinity_tasks.inspection import JobState
from trinity_tasks.stages import StagedRun

CONFIG = Path(__file__).parents[2] / "infra" / "configs" / "spell.yaml"


class ShuffledRewards(HfEngine):
    """Control: each batch's rewards are permuted over its samples, so that they say nothing about the answers."""

    async def train_step(self, batch_exps: list[Experience]) -> dict[str, float]:
        order = np.random.default_rng(self.train_step_num).permutation(len(batch_exps))
        rewards = [batch_exps[index].reward for index in order]
        for row, reward in zip(batch_exps, rewards, strict=True):
            row.reward = reward
        return await super().train_step(batch_exps)


class Reached(NamedTuple):
    """What one run reached on the held-out words."""

    what: str
    seed: int
    accuracy_before: float
    """At the start of the last stage."""
    accuracy_after: float
    cpu_s: float
    """Processor time of all stages, everything included."""
    wall_s: tuple[float, ...]
    """Wall time of each stage."""
    steps: tuple[int, ...]
    """Train steps of each stage."""


def spell(root: Path, seed: int, *overrides: str) -> Config:
    """The example's config with another seed, for initial weights and sampling and for the order of the words."""
    seeds = (f"seed={seed}", f"buffer.explorer_input.taskset.seed={seed}")
    return load_config(CONFIG, (f"checkpoint_root_dir={root}", *seeds, *overrides))


def only_sft(config: Config, num_steps: int) -> Config:
    """The stage sft alone, for so many steps, measured on the same words as the stage grpo."""
    tasksets = config.stage("grpo").buffer.explorer_input.model_dump(include={"eval_tasksets"})
    changes = {"trainer": {"total_steps": num_steps, "stop_when": None}, "buffer": {"explorer_input": tasksets}}
    return Config.model_validate(deep_merge(config.stage("sft").model_dump(exclude_unset=True), changes))


def run(what: str, config: Config) -> Reached:
    """All stages, as the flow `finetune` runs them."""
    cpu, walls = time.process_time(), list[float]()
    stages = StagedRun(config)
    stages.open()
    try:
        for stage in stages.remaining():
            started = time.monotonic()
            stages.finished(train(stage))
            walls.append(time.monotonic() - started)
    finally:
        stages.close("FINISHED")
    before, after = _accuracies(stages.results[-1])
    steps = tuple(state.step for state in stages.results)
    return Reached(what, config.seed, before, after, time.process_time() - cpu, tuple(walls), steps)


def _accuracies(state: JobState) -> tuple[float, float]:
    measured = sorted(state.evaluations, key=lambda item: item.step)
    return measured[0].accuracy, measured[-1].accuracy


def show(title: str, runs: Sequence[Reached]) -> None:
    """Print a table."""
    table = Table("run", "seed", "before", "after", "gain", "steps", "cpu s", "wall s", title=title)
    for item in runs:
        gain = item.accuracy_after - item.accuracy_before
        numbers = (item.accuracy_before, item.accuracy_after, gain)
        steps = " + ".join(str(number) for number in item.steps)
        times = (f"{item.cpu_s:.0f}", f"{sum(item.wall_s):.0f}")
        table.add_row(item.what, str(item.seed), *(f"{number:.3f}" for number in numbers), steps, *times)
    Console(width=110).print(table)
