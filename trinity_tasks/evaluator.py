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
from engines.config import Frozen, ModelConfig
from engines.errors import ConfigError, DataError
from engines.text import Tokenizer, decode_response
from trinity_tasks.buffer_config import TasksetConfig
from trinity_tasks.config import Config
from trinity_tasks.explorer import derive_seed, encode_task, sample
from trinity_tasks.rewards import RewardFn, load_reward
from trinity_tasks.storage import Storage
from trinity_tasks.tasksets import Taskset, build_taskset

NUM_SAMPLES_SHOWN = 8
BATCH_TASKS = 256
"""Tasks sampled at once; all that are measured of a task set without end."""


class Evaluation(Frozen):
    """The result of measuring one version of the weights on one task set."""

    taskset: str
    step: int
    """Train step of the weights."""
    accuracy: float
    """Mean reward over the samples that the reward function scored, at the model's temperature."""
    num_tasks: int
    num_samples: int
    """num_tasks x repeat_times."""
    num_unscored: int = 0
    """Samples that the reward function gave None."""
    mean_response_tokens: float
    duration_s: float
    definition: dict[str, Any]
    """What was measured, as the config gave it: task set without its name, content, temperature, limit."""
    samples: tuple[dict[str, Any], ...]
    """A few rollouts: prompt, response, reward (None: unscored)."""


class Evaluator:
    """Measures a sampler on the config's evaluation task sets."""

    def __init__(self, config: Config, store: Storage, tokenizer: Tokenizer, sampler: Sampler) -> None:
        """Raises what `build_taskset` and `load_reward` raise, and ConfigError if a name means another task set now."""
        self._config = config
        self._store = store
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._measures = [
            (item, build_taskset(item), load_reward(item.reward_fn))
            for item in config.buffer.explorer_input.eval_tasksets
        ]
        for item, taskset, _ in self._measures:
            _check_comparable(store, item.name, _definition(item, taskset, config.model))
        self._worker = ThreadPoolExecutor(1, "evaluator")

    async def evaluate(self, step: int) -> list[Evaluation]:
        """Measure the sampler's weights, or read what was measured at this step. Raises StorageError, DataError."""
        return await asyncio.wrap_future(
            self._worker.submit(lambda: [self._one(step, *item) for item in self._measures])
        )

    def _one(self, step: int, config: TasksetConfig, taskset: Taskset, reward: RewardFn) -> Evaluation:
        if (known := read_evaluation(self._store, config.name, step)) is not None:
            return known
        result = self._measure(step, config, taskset, reward)
        try:
            self._store.create_json(_path(config.name, step), result.model_dump(mode="json"))
        except FileExistsError:  # another process measured the same meanwhile
            return read_evaluation(self._store, config.name, step) or result
        return result

    def _measure(self, step: int, config: TasksetConfig, taskset: Taskset, reward: RewardFn) -> Evaluation:
        started = time.perf_counter()
        num_tasks = taskset.num_tasks or BATCH_TASKS
        rewards: list[float | None] = []
        num_tokens = 0
        shown: list[dict[str, Any]] = []
        for first in range(0, num_tasks, BATCH_TASKS):
            tasks = [taskset[index] for index in range(first, min(first + BATCH_TASKS, num_tasks))]
            seed = derive_seed(config.seed, "evaluate", config.name, first)
            prompts = [encode_task(self._tokenizer, task, self._config.model) for task in tasks]
            groups = sample(self._sampler, prompts, self._config, n=config.repeat_times, seed=seed)
            for task, group in zip(tasks, groups, strict=True):
                responses = [decode_response(self._tokenizer, completion.tokens) for completion in group]
                scores = [reward(task, response) for response in responses]
                rewards.extend(scores)
                num_tokens += sum(len(completion.tokens) for completion in group)
                if len(shown) < NUM_SAMPLES_SHOWN:
                    shown.append({"prompt": task.question, "response": responses[0], "reward": scores[0]})
        scored = [score for score in rewards if score is not None]
        if not scored:
            raise DataError(
                f"task set {config.name}: reward {config.reward_fn} scored none of {len(rewards)} samples; "
                "there is no accuracy without a score"
            )
        return Evaluation(
            taskset=config.name,
            step=step,
            accuracy=sum(scored) / len(scored),
            num_tasks=num_tasks,
            num_samples=len(rewards),
            num_unscored=len(rewards) - len(scored),
            mean_response_tokens=num_tokens / len(rewards),
            duration_s=time.perf_counter() - started,
            definition=_definition(config, taskset, self._config.model),
            samples=tuple(shown),
        )

    def close(self) -> None:
        """Stop the worker thread. Idempotent."""
        self._worker.shutdown()


def _path(taskset: str, step: int) -> str:
    return f"evaluations/{taskset}/step_{step:08d}.json"


def _definition(config: TasksetConfig, taskset: Taskset, model: ModelConfig) -> dict[str, Any]:
    limits = {"temperature": model.temperature, "max_response_tokens": model.max_response_tokens}
    content = {"content_sha256": taskset.content_sha256}
    return config.model_dump(mode="json", exclude={"name"}) | content | limits


def _check_comparable(store: Storage, name: str, now: dict[str, Any]) -> None:
    """Raises ConfigError if what was measured under this name was measured on other tasks, or in another way."""
    files = [item.name for item in store.list(f"evaluations/{name}")]
    if not files:
        return
    before = Evaluation.model_validate(store.read_json(max(files))).definition
    if differing := [f"  {key}: {before.get(key)!r} -> {now[key]!r}" for key in now if before.get(key) != now[key]]:
        raise ConfigError(
            f"{store.url}: task set {name} was measured in another way before:\n" + "\n".join(differing) + "\n"
            "Accuracies under one name must stay comparable: measure as before, or give the task set another name in "
            "buffer.explorer_input.eval_tasksets"
        )


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
