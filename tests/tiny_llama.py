"""A model of 30k parameters, its engine config and batches that fit it: what engine tests train on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np

from engines.config import AlgorithmConfig, EngineConfig, ModelConfig, OptimizerConfig, TokenizerConfig
from engines.experience import EID, Experience
from engines.hf.engine import HfEngine

Result = TypeVar("Result")

ARCHITECTURE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
}
VOCABULARY = 101
"""Ids of the char tokenizer: 5 special ones, 96 characters."""


def model_config(**changes: Any) -> ModelConfig:
    """A llama built from config, char tokenizer, at most 64 tokens."""
    architecture = ARCHITECTURE | changes.pop("architecture", {})
    fields: dict[str, Any] = {
        "architecture": architecture,
        "tokenizer": TokenizerConfig(kind="char"),
        "max_model_len": 64,
    }
    return ModelConfig(**fields | changes)


def engine_config(
    algorithm: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    model: ModelConfig | None = None,
    **changes: Any,
) -> EngineConfig:
    """grpo at learning rate 1e-2, unless changed."""
    rates: dict[str, Any] = {"lr": 1e-2} | (optimizer or {})
    choices: dict[str, Any] = {"algorithm_type": "grpo"} | (algorithm or {})
    settings = AlgorithmConfig(optimizer=OptimizerConfig(**rates), **choices)
    fields: dict[str, Any] = {"trainer_type": "hf", "total_steps": 20, "num_threads": 1, "max_token_len_per_gpu": 64}
    return EngineConfig(model=model or model_config(), algorithm=settings, **fields | changes)


def experience(**fields: Any) -> Experience:
    """A row from lists or arrays."""
    return Experience(**fields)


def groups(seed: int = 0, num_groups: int = 4, group_size: int = 4, **changes: Any) -> list[Experience]:
    """Whole groups with unequal lengths, plausible sampler logprobs and rewards that differ within each group."""
    random = np.random.default_rng(seed)
    rows: list[Experience] = []
    for task in range(num_groups):
        prompt = random.integers(5, VOCABULARY, random.integers(1, 7))
        for run in range(group_size):
            length = int(random.integers(1, 10))
            fields: dict[str, Any] = {
                "tokens": np.concatenate([prompt, random.integers(5, VOCABULARY, length)]),
                "prompt_length": len(prompt),
                "eid": EID(batch=seed, task=task, run=run, suffix=f"{run:06x}"),
                "logprobs": random.normal(-np.log(VOCABULARY), 0.1, length),
                "reward": float(run % 2) + 0.1 * float(random.random()),
            }
            rows.append(Experience(**fields | changes))
    return rows


def with_engine(config: EngineConfig, scenario: Callable[[HfEngine], Awaitable[Result]], **attributes: Any) -> Result:
    """`scenario` with a prepared engine."""

    async def life() -> Result:
        engine = HfEngine(config)
        for name, value in attributes.items():
            setattr(engine, name, value)
        await engine.prepare()
        try:
            return await scenario(engine)
        finally:
            await engine.shutdown()

    return asyncio.run(life())
