"""A whole job in seconds: a tiny Llama spells backwards, with real engine, sampler, verifier, MLflow and storage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from trinity_tasks.config import Config
from trinity_tasks.config_source import apply_override, parse_config
from trinity_tasks.trainer import Observer, Trainer


def small_config(root: Path | str, *overrides: str) -> Config:
    """12 steps of GRPO on 16 rows each, a commit every 3, an evaluation every 4."""
    taskset = {"dataset": "spell_backward", "dataset_args": {"min_word_len": 3, "max_word_len": 4}}
    raw: dict[str, Any] = {
        "project": "tests",
        "name": "small",
        "checkpoint_root_dir": str(root),
        "model": {
            "architecture": {
                "model_type": "llama",
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
            },
            "tokenizer": {"kind": "char", "phrases": ["Spell this word backward (example: sun -> nus): "]},
            "max_model_len": 32,
            "max_response_tokens": 6,
        },
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 0.01}},
        "buffer": {
            "batch_size": 4,
            "explorer_input": {
                "taskset": taskset,
                "eval_tasksets": [{**taskset, "name": "held_out", "split": "held_out", "num_tasks": 8}],
            },
        },
        "trainer": {"total_steps": 12, "save_interval": 3, "num_threads": 1},
        "explorer": {"eval_interval": 4},
    }
    for override in overrides:
        apply_override(raw, override)
    return parse_config(raw)


def train(config: Config, *observers: Observer) -> str:
    """Run the job in this process, without Prefect. Returns its URL."""

    async def session() -> str:
        trainer = Trainer(config)
        trainer.observers.extend(observers)
        try:
            await trainer.prepare()
            await trainer.train()
        finally:
            await trainer.shutdown()
        return trainer.job.url

    return asyncio.run(session())
