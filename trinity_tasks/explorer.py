"""`Explorer`: tasks become experiences. One step writes one shard, and is a pure function of (weights, step, seed).

Owns: the order of tasks, the seed of every sample, scoring, identity of the rows. Does not own: generation (engines),
tasks and verifiers (`tasksets.py`), reward functions (`rewards.py`), the shard format (`buffer.py`).
Its whole state is the number of shards it has written: a step whose shard exists is not sampled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engines.algorithms.presets import resolve
from engines.base import Completion, Sampler
from engines.config import ModelConfig
from engines.errors import DataError
from engines.experience import EID, Experience
from engines.text import Tokenizer, decode_response, encode_example, encode_prompt
from trinity_tasks.buffer import ExperienceWriter
from trinity_tasks.config import Config
from trinity_tasks.rewards import RewardFn, load_reward
from trinity_tasks.row_checks import RowLimits
from trinity_tasks.storage import Storage
from trinity_tasks.tasksets import Task, Taskset, build_taskset


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from what it is for; equal parts give equal seeds on every machine."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Explorer:
    """Writes one shard of experiences per step, by sampling the model or by showing the task's own answer."""

    def __init__(self, config: Config, store: Storage, tokenizer: Tokenizer, sampler: Sampler | None) -> None:
        taskset = config.buffer.explorer_input.taskset
        assert taskset is not None, "Config guarantees a taskset in mode: both"
        self._config = config
        algorithm = resolve(config.algorithm)
        self._group_size = algorithm.group_size
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._taskset: Taskset = build_taskset(taskset)
        self._reward: RewardFn = load_reward(taskset.reward_fn, required="rewards" in algorithm.needs)
        limits = RowLimits(  # not the tokenizer's size: embeddings are often padded, and the model may sample what pads
            max_prompt_tokens=config.model.max_prompt_tokens,
            max_response_tokens=config.model.max_response_tokens,
            max_model_len=config.model.max_model_len,
        )
        buffer = config.buffer.trainer_input.experience_buffer.name
        self._writer = ExperienceWriter(store, buffer, config.explorer.name, limits, durable=False)
        self._worker = ThreadPoolExecutor(1, "explorer")

    @property
    def tasks_sha256(self) -> str | None:
        """Content of the file of the tasks; None if they are generated."""
        return self._taskset.content_sha256

    @property
    def num_steps(self) -> int:
        """Steps done: shards written, by this process or an earlier one."""
        return self._writer.next_index

    async def explore_step(self) -> dict[str, float]:
        """Write the next shard. Safe to repeat: a shard that exists is kept.

        Raises DataError (a task, answer or reward that cannot be used; it is named), StorageError.
        """
        return await asyncio.wrap_future(self._worker.submit(self._explore))

    def _explore(self) -> dict[str, float]:
        step = self._writer.next_index
        tasks = self._taskset.batch(step, self._config.buffer.batch_size)
        demonstrate = self._config.buffer.explorer_input.default_workflow_type == "demonstrate"
        rows, metrics = self._demonstrate(step, tasks) if demonstrate else self._sample(step, tasks)
        with contextlib.suppress(FileExistsError):  # written before, by this or another process: it is kept
            self._writer.write(rows, index=step)
        self._writer.next_index = step + 1
        return metrics

    def _demonstrate(self, step: int, tasks: Sequence[Task]) -> tuple[list[Experience], dict[str, float]]:
        rows: list[Experience] = []
        for position, task in enumerate(tasks):
            tokens, prompt_length = encode_example(self._tokenizer, task.messages, task.answer)
            rows.append(
                Experience(
                    tokens=np.asarray(tokens, np.int32),
                    prompt_length=prompt_length,
                    eid=EID(batch=step, task=position, suffix=self._suffix(step, position, 0)),
                    info={"task_index": task.index, "is_expert": True},
                    prompt_text=task.question,
                    response_text=task.answer,
                )
            )
        return rows, {"explore/num_rows": float(len(rows))}

    def _sample(self, step: int, tasks: Sequence[Task]) -> tuple[list[Experience], dict[str, float]]:
        assert self._sampler is not None, "workflow `sample` needs a sampler"
        started = time.perf_counter()
        seed = derive_seed(self._config.seed, self._config.explorer.name, step)
        prompts = [encode_task(self._tokenizer, task, self._config.model) for task in tasks]
        groups = sample(self._sampler, prompts, self._config, n=self._group_size, seed=seed)
        sampled = time.perf_counter()
        rows = [
            self._row(EID(step, position, run, suffix=self._suffix(step, position, run)), task, prompt, completion)
            for position, (task, prompt, group) in enumerate(zip(tasks, prompts, groups, strict=True))
            for run, completion in enumerate(group)
        ]
        rewards = [row.reward for row in rows if row.reward is not None]
        num_tokens = sum(row.response_length for row in rows)
        return rows, {
            "explore/reward_mean": float(np.mean(rewards)) if rewards else 0.0,
            "explore/num_rows": float(len(rows)),
            "explore/num_unscored": float(len(rows) - len(rewards)),
            "explore/num_tokens": float(num_tokens),
            "explore/truncated_share": float(np.mean([row.truncate_status is not None for row in rows])),
            "explore/model_version": float(self._sampler.version),
            "perf/sample_tokens_per_s": num_tokens / max(sampled - started, 1e-9),
            "time/sample_s": sampled - started,
            "time/reward_s": time.perf_counter() - sampled,
        }

    def _row(self, eid: EID, task: Task, prompt: Sequence[int], completion: Completion) -> Experience:
        assert self._sampler is not None
        response = decode_response(self._tokenizer, completion.tokens)
        return Experience(
            tokens=np.concatenate([np.asarray(prompt, np.int32), completion.tokens]),
            prompt_length=len(prompt),
            eid=eid,
            logprobs=completion.logprobs,
            reward=self._reward(task, response),
            truncate_status="response_truncated" if completion.finish_reason == "length" else None,
            info={"task_index": task.index, "model_version": self._sampler.version},
            prompt_text=task.question,
            response_text=response,
        )

    def _suffix(self, *parts: int) -> str:
        return f"{derive_seed(self._config.explorer.name, *parts) & 0xFFFFFF:06x}"

    def end(self) -> None:
        """Tell readers that this writer has written its last shard."""
        self._writer.end()

    def close(self) -> None:
        """Stop the worker thread. Idempotent."""
        self._worker.shutdown()


def encode_task(tokenizer: Tokenizer, task: Task, model: ModelConfig) -> list[int]:
    """The prompt of a task. Raises DataError, which names the task, if the model cannot take it."""
    prompt = encode_prompt(tokenizer, task.messages)
    longest = model.max_prompt_tokens or model.max_model_len - 1
    if len(prompt) > longest:
        raise DataError(
            f"task {task.index} ({task.question!r}): its prompt has {len(prompt)} tokens, and model.max_prompt_tokens "
            f"({model.max_prompt_tokens}) with model.max_model_len ({model.max_model_len}) allows {longest}; raise the "
            "limit, or leave such tasks out"
        )
    return prompt


def sample(
    sampler: Sampler, prompts: Sequence[Sequence[int]], config: Config, *, n: int, seed: int
) -> list[list[Completion]]:
    """n completions per prompt, within the model's limits."""
    model = config.model
    max_tokens = model.max_response_tokens or model.max_model_len  # the sampler stops each row at max_model_len
    return sampler.generate(prompts, n=n, max_tokens=max_tokens, temperature=model.temperature, seed=seed)
