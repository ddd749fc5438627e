"""`Evaluator`: accuracy on tasks never trained on, kept with the job.

An evaluation is a pure function of (weights, taskset, seed). Its result is one create-only object per task set and
step, so a resumed run finds it and does not measure twice.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engines.base import Sampler
from engines.config import Frozen
from engines.text import Tokenizer, decode_response, encode_prompt
from trinity_tasks.config import Config, TasksetConfig
from trinity_tasks.explorer import derive_seed, sample
from trinity_tasks.rewards import load_reward
from trinity_tasks.storage import Storage
from trinity_tasks.tasksets import build_taskset

NUM_SAMPLES_SHOWN = 8
BATCH_TASKS = 256


class Evaluation(Frozen):
    """The result of measuring one version of the weights on one task set."""

    taskset: str
    step: int
    """Train step of the weights."""
    accuracy: float
    """Mean reward over all samples, at the model's temperature."""
    num_tasks: int
    num_samples: int
    """num_tasks x repeat_times."""
    mean_response_tokens: float
    duration_s: float
    samples: tuple[dict[str, Any], ...]
    """A few rollouts: prompt, response, reward."""


class Evaluator:
    """Measures a sampler on the config's evaluation task sets."""

    def __init__(self, config: Config, store: Storage, tokenizer: Tokenizer, sampler: Sampler) -> None:
        self._config = config
        self._store = store
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._worker = ThreadPoolExecutor(1, "evaluator")

    async def evaluate(self, step: int) -> list[Evaluation]:
        """Measure the sampler's weights, or read what was measured at this step. Raises StorageError, DataError."""
        tasksets = self._config.buffer.explorer_input.eval_tasksets
        return await asyncio.wrap_future(self._worker.submit(lambda: [self._one(item, step) for item in tasksets]))

    def _one(self, taskset: TasksetConfig, step: int) -> Evaluation:
        if (known := read_evaluation(self._store, taskset.name, step)) is not None:
            return known
        result = self._measure(taskset, step)
        self._store.write_json(_path(taskset.name, step), result.model_dump(mode="json"))
        return result

    def _measure(self, config: TasksetConfig, step: int) -> Evaluation:
        started = time.perf_counter()
        taskset, reward = build_taskset(config), load_reward(config.reward_fn)
        num_tasks = config.num_tasks or BATCH_TASKS
        rewards: list[float] = []
        num_tokens = 0
        shown: list[dict[str, Any]] = []
        for first in range(0, num_tasks, BATCH_TASKS):
            tasks = [taskset[index] for index in range(first, min(first + BATCH_TASKS, num_tasks))]
            seed = derive_seed(config.seed, "evaluate", config.name, first)
            prompts = [encode_prompt(self._tokenizer, task.messages) for task in tasks]
            groups = sample(self._sampler, prompts, self._config, n=config.repeat_times, seed=seed)
            for task, group in zip(tasks, groups, strict=True):
                responses = [decode_response(self._tokenizer, completion.tokens) for completion in group]
                scores = [reward(task, response) or 0.0 for response in responses]
                rewards.extend(scores)
                num_tokens += sum(len(completion.tokens) for completion in group)
                if len(shown) < NUM_SAMPLES_SHOWN:
                    shown.append({"prompt": task.question, "response": responses[0], "reward": scores[0]})
        return Evaluation(
            taskset=config.name,
            step=step,
            accuracy=sum(rewards) / len(rewards),
            num_tasks=num_tasks,
            num_samples=len(rewards),
            mean_response_tokens=num_tokens / len(rewards),
            duration_s=time.perf_counter() - started,
            samples=tuple(shown),
        )

    def close(self) -> None:
        """Stop the worker thread. Idempotent."""
        self._worker.shutdown()


def _path(taskset: str, step: int) -> str:
    return f"evaluations/{taskset}/step_{step:08d}.json"


def read_evaluation(store: Storage, taskset: str, step: int) -> Evaluation | None:
    """What was measured at this step, or None."""
    try:
        return Evaluation.model_validate(store.read_json(_path(taskset, step)))
    except FileNotFoundError:
        return None


def read_evaluations(store: Storage) -> list[Evaluation]:
    """Every evaluation of a job, by task set and step."""
    names = sorted(item.name for item in store.list("evaluations", recursive=True))
    return [Evaluation.model_validate(store.read_json(name)) for name in names]
