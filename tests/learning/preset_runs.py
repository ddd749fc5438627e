"""Short runs of one algorithm each on the words of infra/configs/spell.yaml, from one warm start, and what they reached.

Owns: the settings of each algorithm. All start from the same weights (150 steps of SFT, about a third of the words
right), train 100 steps of 64 tasks with 8 samples each on fresh words, and are measured on 256 held-out words, 4 samples
each: the standard error of an accuracy is below 0.016.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.small_job import train
from tests.learning.spelling import CONFIG
from trinity_tasks.config import Config, deep_merge
from trinity_tasks.config_source import load_config
from trinity_tasks.inspection import JobState, describe

NUM_STEPS = 100
NUM_HELD_OUT = 256

EXPERTS: dict[str, Any] = {"buffer": {"explorer_input": {"expert_taskset": {"dataset": "spell_backward"}}}}
LR: dict[str, float] = {"opmd": 2e-3, "asymre": 1e-3}
"""Peak learning rate, where it is not 1e-3."""


class Outcome(NamedTuple):
    """One run."""

    algorithm: str
    before: float
    """Held-out accuracy of the warm start."""
    after: float
    wall_s: float
    state: JobState

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
        "buffer": {"explorer_input": {"eval_tasksets": [held_out]}},
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


def run(config: Config) -> Outcome:
    """The whole job, in this process."""
    started = time.monotonic()
    state = describe(train(config))
    measured = sorted(state.evaluations, key=lambda item: item.step)
    name = config.algorithm.algorithm_type
    return Outcome(name, measured[0].accuracy, measured[-1].accuracy, time.monotonic() - started, state)
