"""A whole job in a fraction of a second: the fake engine learns real tasks, with real storage, ledger and MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trinity_tasks.config import Config
from trinity_tasks.config_source import apply_override, parse_config

STAGES = (
    "stages=[{stage_name: sft, algorithm: {algorithm_type: sft}, trainer: {total_steps: 2}, "
    "buffer: {explorer_input: {default_workflow_type: demonstrate}}}, {stage_name: grpo}]"
)
"""Override: two stages, of 2 and 6 steps."""


def score(task: Any, response: str) -> float:
    """A reward that depends on the task and on every letter of the response."""
    return sum(map(ord, task.question + response)) % 97 / 96


def fake_config(root: Path | str, *overrides: str) -> Config:
    """6 steps on 2 tasks with 2 samples each, a commit every 2 steps; weights go through storage."""
    taskset = {"dataset": "chain_sum", "reward_fn": "tests.fake_job:score"}
    raw: dict[str, Any] = {
        "project": "tests",
        "name": "fake",
        "checkpoint_root_dir": str(root),
        "model": {"architecture": {"model_type": "fake"}, "tokenizer": {"kind": "char"}},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": taskset}},
        "trainer": {"trainer_type": "tests.fake_engine:FakeEngine", "total_steps": 6, "save_interval": 2},
        "synchronizer": {"sync_method": "checkpoint"},
    }
    for override in overrides:
        apply_override(raw, override)
    return parse_config(raw)


def with_evaluation(name: str = "held_out") -> str:
    """Override: measure 4 tasks that are never trained on."""
    return (
        "buffer.explorer_input.eval_tasksets="
        f"[{{name: {name}, split: held_out, num_tasks: 4, repeat_times: 2, "
        "dataset: chain_sum, reward_fn: 'tests.fake_job:score'}]"
    )
