"""Short runs of one algorithm each on the words of infra/configs/spell.yaml, and what they reached.

Owns: the settings of each algorithm. All start from the same weights (75 steps of SFT, a fifth of the words
right), train 80 steps of 32 tasks with 8 samples each on fresh words, and are measured on 256 held-out words, 4 samples
each: the standard error of an accuracy is below 0.016.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from engines.config import OptimizerConfig
from engines.experience import EID, Experience
from engines.hf.engine import HfEngine
from engines.text import Tokenizer, build_tokenizer, encode_example
from tests.integration.small_job import train
from tests.learning.spelling import CONFIG
from trinity_tasks.buffer import ExperienceWriter
from trinity_tasks.buffer_config import TasksetConfig
from trinity_tasks.config import Config, deep_merge
from trinity_tasks.config_source import load_config
from trinity_tasks.inspection import JobState, describe
from trinity_tasks.job import job_store
from trinity_tasks.tasksets import build_taskset

NUM_STEPS = 80
NUM_TASKS = 32
NUM_HELD_OUT = 256
PAIRS = 128

EXPERTS: dict[str, Any] = {"buffer": {"explorer_input": {"expert_taskset": {"dataset": "spell_backward"}}}}
LR: dict[str, float] = {"remax": 5e-4}
"""Peak learning rate, where it is not 1e-3."""


class Outcome(NamedTuple):
    """One run."""

    algorithm: str
    before: float
    """Held-out accuracy of the warm start."""
    after: float
    wall_s: float
    state: JobState
    history: list[dict[str, float]]
    """Metrics of every step."""

    @property
    def gain(self) -> float:
        """Of accuracy."""
        return self.after - self.before


def words(split: str, **fields: Any) -> dict[str, Any]:
    """A task set of three to seven letters."""
    return {
        "dataset": "spell_backward",
        "dataset_args": {"min_word_len": 3, "max_word_len": 7},
        "split": split,
    } | fields


def job(root: Path, name: str, algorithm: dict[str, Any], **sections: Any) -> Config:
    """A config of the example's model and words."""
    base = load_config(CONFIG).model_dump(exclude_unset=True, exclude={"stages"})
    held_out = words("held_out", name="held_out", num_tasks=NUM_HELD_OUT, repeat_times=4)
    changes: dict[str, Any] = {
        "name": name,
        "checkpoint_root_dir": str(root),
        "algorithm": algorithm,
        "buffer": {"batch_size": NUM_TASKS, "explorer_input": {"eval_tasksets": [held_out]}},
        "trainer": {"total_steps": NUM_STEPS, "save_hf_checkpoint": "last"},
    }
    return Config.model_validate(deep_merge(deep_merge(base, changes), sections))


def from_model(url: str) -> dict[str, Any]:
    """Section `model` that starts from another job's last checkpoint."""
    return {"model_path": url, "architecture": None, "tokenizer": None}


def supervised(root: Path, name: str, num_steps: int, algorithm: str = "sft", **sections: Any) -> Config:
    """The words' own answers, from the first weights on."""
    optimizer = {"lr": 0.003, "betas": [0.9, 0.98], "lr_warmup_steps": 10}
    explorer_input = {"default_workflow_type": "demonstrate"}
    own: dict[str, Any] = {
        "buffer": {"batch_size": 128, "explorer_input": explorer_input},
        "trainer": {"total_steps": num_steps},
    }
    return job(root, name, {"algorithm_type": algorithm, "optimizer": optimizer}, **deep_merge(own, sections))


def reinforced(root: Path, algorithm: str, start: str, teacher: str, **changes: Any) -> Config:
    """One algorithm from the warm start, with all that its preset says; group size 8."""
    optimizer = {
        "lr": LR.get(algorithm, 1e-3),
        "betas": [0.9, 0.98],
        "lr_scheduler_type": "linear",
        "min_lr_ratio": 0.05,
        "lr_warmup_steps": 5,
    }
    settings: dict[str, Any] = {"algorithm_type": algorithm, "repeat_times": 8, "optimizer": optimizer}
    settings["critic"] = {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.98]}}
    sections: dict[str, Any] = {"model": from_model(start)}
    if algorithm in ("mix", "mix_chord"):
        expert = words("train", name="experts", seed=43)
        sections["buffer"] = {
            "explorer_input": {"expert_taskset": expert},
            "trainer_input": {"expert_data_ratio": 0.2},
        }
    if algorithm in ("on_policy_distill", "jsd"):
        sections["model"]["teacher_model_path"] = teacher
    return job(root, algorithm, deep_merge(settings, changes), **sections)


def preferred(root: Path, start: str) -> Config:
    """DPO on pairs that are in the buffer: the right answer, and one with two neighbouring letters exchanged."""
    optimizer = {"lr": 3e-4, "betas": [0.9, 0.98], "lr_warmup_steps": 5}
    config = job(
        root,
        "dpo",
        {"algorithm_type": "dpo", "optimizer": optimizer},
        mode="train",
        model=from_model(start),
        buffer={"train_batch_size": PAIRS, "explorer_input": {"eval_tasksets": []}},
    )
    writer = ExperienceWriter(job_store(config), "main", "pairs")
    for step in range(NUM_STEPS):
        writer.write(pairs("train", step))
    writer.end()
    return config


def example_tokenizer() -> Tokenizer:
    """That of the example."""
    config = load_config(CONFIG).model.tokenizer
    assert config is not None
    return build_tokenizer(config)


def pairs(split: str, step: int) -> list[Experience]:
    """One batch of pairs."""
    tokenizer = example_tokenizer()
    random = np.random.default_rng(step)
    rows: list[Experience] = []
    for task in build_taskset(TasksetConfig(**words(split, seed=44))).batch(step, PAIRS):
        tokens, length = encode_example(tokenizer, task.messages, task.answer)
        at = int(random.integers(0, len(task.answer) - 1))
        wrong = task.answer[:at] + task.answer[at + 1] + task.answer[at] + task.answer[at + 2 :]
        other, _ = encode_example(tokenizer, task.messages, wrong)
        prompt, chosen, rejected = (
            np.asarray(ids, np.int32) for ids in (tokens[:length], tokens[length:], other[length:])
        )
        rows.append(Experience(tokens=prompt, chosen=chosen, rejected=rejected, eid=EID(step, task.index)))
    return rows


def demonstrations(split: str) -> list[Experience]:
    """A batch of words with their answers."""
    tokenizer = example_tokenizer()
    rows: list[Experience] = []
    for task in build_taskset(TasksetConfig(**words(split))).batch(0, NUM_HELD_OUT):
        tokens, length = encode_example(tokenizer, task.messages, task.answer)
        rows.append(Experience(tokens=np.asarray(tokens, np.int32), prompt_length=length, eid=EID(0, task.index)))
    return rows


def objective(config: Config, rows: list[Experience], start: Path | None, snapshot: Path | None) -> dict[str, float]:
    """Metrics of the algorithm on these rows, by the weights in the snapshot or the first ones; nothing is trained."""
    still = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"optimizer": OptimizerConfig(lr=0.0)})}
    )

    async def measured() -> dict[str, float]:
        engine = HfEngine(still.engine)
        engine.model_dir, engine.restore_dir = start, snapshot
        await engine.prepare()
        try:
            return await engine.train_step(rows)
        finally:
            await engine.shutdown()

    return asyncio.run(measured())


def run(config: Config) -> Outcome:
    """The whole job, in this process."""
    started, history = time.monotonic(), list[dict[str, float]]()
    state = describe(train(config, lambda step, metrics: history.append(dict(metrics))))
    measured = sorted(state.evaluations, key=lambda item: item.step)
    before, after = (measured[0].accuracy, measured[-1].accuracy) if measured else (0.0, 0.0)
    name = config.algorithm.algorithm_type
    return Outcome(name, before, after, time.monotonic() - started, state, history)


def show(runs: Sequence[Outcome]) -> None:
    """Print a line for each: name, held-out accuracy before and after, gain, wall time."""
    for item in runs:
        figures = f"{item.before:.3f} -> {item.after:.3f} ({item.gain:+.3f}) in {item.wall_s:.0f} s"
        Console(width=110).print(f"\n{item.algorithm:20} {figures}", highlight=False, end="")
