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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
from pydantic import JsonValue

from engines.algorithms.presets import resolve
from engines.algorithms.spec import GroupFilterParams, name_of
from engines.base import Completion, Sampler
from engines.config import ModelConfig
from engines.errors import DataError, StarvedError
from engines.experience import EID, Experience
from engines.intake import filtered
from engines.text import Tokenizer, decode_response, encode_example, encode_prompt
from trinity_tasks.buffer import ExperienceWriter
from trinity_tasks.buffer.choose import row_limits
from trinity_tasks.buffer.notes import Notes
from trinity_tasks.config import Config
from trinity_tasks.operators import Dropped, Pipeline
from trinity_tasks.rewards import RewardFn, load_reward
from trinity_tasks.storage import Storage
from trinity_tasks.tasksets import Task, Taskset, build_taskset


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from what it is for; equal parts give equal seeds on every machine."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


ROUND_STRIDE = 100_000_000
"""Distance between the task numbers of a step's rounds; the numbers of one round follow those of the step before."""


class _Round(NamedTuple):
    """One batch of tasks, sampled and scored."""

    groups: list[list[Experience]]
    sample_s: float
    reward_s: float


class Explorer:
    """Writes one shard of experiences per step, by sampling the model or by showing the task's own answer.

    Where the algorithm mixes in an expert's experiences, a step also writes one shard of those, to their own buffer.
    """

    def __init__(
        self, config: Config, store: Storage, tokenizer: Tokenizer, sampler: Sampler | None, *, register: bool = True
    ) -> None:
        """register: tell readers in other processes that this writer lives."""
        tasks = config.buffer.explorer_input
        assert tasks.taskset is not None, "Config guarantees a taskset in mode: both"
        self._config = config
        self._algorithm = resolve(config.algorithm)
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._taskset: Taskset = build_taskset(tasks.taskset)
        self._reward: RewardFn = load_reward(tasks.taskset.reward_fn, required="rewards" in self._algorithm.needs)
        self._pipeline = Pipeline(config.buffer.operators, "buffer.operators")
        buffers = config.buffer.trainer_input
        new_writer = partial(
            ExperienceWriter,
            store,
            writer=config.explorer.name,
            limits=row_limits(config),
            durable=False,
            register=register,
        )
        self._writer = new_writer(buffers.experience_buffer.name)
        self._experts: tuple[Taskset, ExperienceWriter] | None = None
        if config.expert_batch_size and tasks.expert_taskset is not None:
            self._experts = build_taskset(tasks.expert_taskset), new_writer(buffers.expert_buffer.name)
        self._worker = ThreadPoolExecutor(1, "explorer")

    @property
    def tasks_sha256(self) -> str | None:
        """Content of the files of the tasks; None if all are generated."""
        tasksets = [self._taskset] if self._experts is None else [self._taskset, self._experts[0]]
        digests = [taskset.content_sha256 for taskset in tasksets]
        return "+".join(digest or "" for digest in digests).strip("+") or None

    @property
    def num_steps(self) -> int:
        """Steps done: shards written, by this process or an earlier one."""
        return self._writer.next_index

    async def explore_step(self) -> dict[str, float]:
        """Write the next shard. Safe to repeat: a shard that exists is kept.

        Raises DataError (a task, answer or reward that cannot be used; it is named), StorageError, StarvedError (the
        filters of the algorithm leave too few groups).
        """
        return await asyncio.wrap_future(self._worker.submit(self._explore))

    def _explore(self) -> dict[str, float]:
        step = self._writer.next_index
        if self._experts is not None:
            taskset, writer = self._experts
            tasks = taskset.batch(step, self._config.expert_batch_size)
            _keep(writer, self._demonstrations(f"expert-{step}", step, tasks), step)
        if self._config.buffer.explorer_input.default_workflow_type == "demonstrate":
            tasks = self._taskset.batch(step, self._config.buffer.batch_size)
            rows, unused, metrics = self._demonstrations(step, step, tasks), list[Dropped](), dict[str, float]()
        else:
            rows, unused, metrics = self._sample(step)
        done = self._pipeline.process(rows)
        operators = [*dict.fromkeys(row.operator for row in unused), *self._pipeline.names]
        measured = {
            name.removeprefix("operator/"): value
            for name, value in done.metrics.items()
            if not name.endswith("/num_dropped")
        }
        notes = Notes.of(operators, [*unused, *done.dropped], measured)
        _keep(self._writer, done.rows, step, notes)
        return metrics | done.metrics | {"explore/num_rows": float(len(done.rows))}

    def _demonstrations(self, batch: int | str, step: int, tasks: Sequence[Task]) -> list[Experience]:
        rows: list[Experience] = []
        for position, task in enumerate(tasks):
            tokens, prompt_length = encode_example(self._tokenizer, task.messages, task.answer)
            rows.append(
                Experience(
                    tokens=np.asarray(tokens, np.int32),
                    prompt_length=prompt_length,
                    eid=EID(batch=batch, task=position, suffix=self._suffix(step, position, 0)),
                    info={"task_index": task.index, "is_expert": True},
                    prompt_text=task.question,
                    response_text=task.answer,
                )
            )
        return rows

    def _sample(self, step: int) -> tuple[list[Experience], list[Dropped], dict[str, float]]:
        """(rows, unused rows, metrics): the groups that the filters let through, as many as a batch has tasks."""
        wanted = self._config.buffer.batch_size
        filters = [each for each in self._algorithm.filters if isinstance(each, GroupFilterParams) and each.refill]
        rounds = [self._round(step, 0)]
        kept = _passing(rounds[0].groups, filters)
        while len(kept) < wanted:
            if len(rounds) >= min(each.max_rounds for each in filters):
                raise StarvedError(
                    f"explorer step {step}: {len(rounds)} rounds of {wanted} tasks gave {len(kept)} groups that "
                    f"{', '.join(name_of(each) for each in filters)} let through, {wanted} are needed: almost all "
                    "answers to a task get the same reward. Use easier or harder tasks, or raise max_rounds of the "
                    "filter in algorithm.filters"
                )
            rounds.append(self._round(step, len(rounds)))
            kept += _passing(rounds[-1].groups, filters)
        rows = [row for group in kept[:wanted] for row in group]
        if filters:
            share = 1 - wanted / sum(len(each.groups) for each in rounds)
            for row in rows:
                row.metrics |= {"num_rounds": float(len(rounds)), "unused_share": share}
        used = {row.eid.uid for row in rows}
        name = "+".join(name_of(each) for each in filters)
        unused = [
            Dropped(row.eid.uid, name, "its group was not let through, or not needed", row.response_length)
            for each in rounds
            for group in each.groups
            for row in group
            if row.eid.uid not in used
        ]
        return rows, unused, self._metrics(rounds, rows)

    def _metrics(self, rounds: Sequence[_Round], rows: Sequence[Experience]) -> dict[str, float]:
        assert self._sampler is not None
        sampled = [row for each in rounds for group in each.groups for row in group]
        rewards = [row.reward for row in sampled if row.reward is not None]
        num_tokens = sum(row.response_length for row in sampled)
        sample_s = sum(each.sample_s for each in rounds)
        return {
            "explore/reward_mean": float(np.mean(rewards)) if rewards else 0.0,
            "explore/num_unused": float(len(sampled) - len(rows)),
            "explore/num_unscored": float(len(sampled) - len(rewards)),
            "explore/num_tokens": float(num_tokens),
            "explore/truncated_share": float(np.mean([row.truncate_status is not None for row in sampled])),
            "explore/model_version": float(self._sampler.version),
            "perf/sample_tokens_per_s": num_tokens / max(sample_s, 1e-9),
            "time/sample_s": sample_s,
            "time/reward_s": sum(each.reward_s for each in rounds),
        }

    def _round(self, step: int, number: int) -> _Round:
        """One group for each of a batch of tasks."""
        assert self._sampler is not None, "workflow `sample` needs a sampler"
        started, size = time.perf_counter(), self._config.buffer.batch_size
        tasks = self._taskset.batch(step, size, first=number * ROUND_STRIDE)
        seed = derive_seed(self._config.seed, self._config.explorer.name, step, *((number,) if number else ()))
        prompts = [encode_task(self._tokenizer, task, self._config.model) for task in tasks]
        completions = sample(self._sampler, prompts, self._config, n=self._algorithm.group_size, seed=seed)
        baselines: list[dict[str, float | None]] = [{} for _ in tasks]
        if "greedy_baseline" in self._algorithm.needs:
            greedy = sample(self._sampler, prompts, self._config, n=1, seed=seed, temperature=0.0)
            baselines = [
                {"reward_baseline": self._reward(task, decode_response(self._tokenizer, answers[0].tokens))}
                for task, answers in zip(tasks, greedy, strict=True)
            ]
        sampled = time.perf_counter()
        groups = [
            [
                self._row(EID(step, position, run, suffix=self._suffix(step, position, run)), task, prompt, completion)
                for run, completion in enumerate(group)
            ]
            for position, (task, prompt, group) in enumerate(
                zip(tasks, prompts, completions, strict=True), number * size
            )
        ]
        for group, baseline in zip(groups, baselines, strict=True):
            for row in group:
                row.info |= baseline
        return _Round(groups, sampled - started, time.perf_counter() - sampled)

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
        if self._experts is not None:
            self._experts[1].end()

    def close(self) -> None:
        """Stop the worker thread and the signs of life. Idempotent."""
        self._worker.shutdown()
        for writer in (self._writer, *(self._experts or ())[1:]):
            writer.close()


def _keep(
    writer: ExperienceWriter, rows: Sequence[Experience], step: int, notes: Mapping[str, JsonValue] | None = None
) -> None:
    """Write the shard of a step; one that was written before, by this or another process, is kept."""
    with contextlib.suppress(FileExistsError):
        writer.write(rows, index=step, notes=notes)
    writer.next_index = step + 1


def _passing(groups: Sequence[list[Experience]], filters: Sequence[GroupFilterParams]) -> list[list[Experience]]:
    """The groups that all filters let through."""
    if not filters:
        return list(groups)
    rows = [row for group in groups for row in group]
    rewards = np.array([row.reward for row in rows], np.float64)
    kept = filtered(rows, rewards, filters)[0]
    starts = np.cumsum([0, *(len(group) for group in groups)])
    return [group for group, start in zip(groups, starts, strict=False) if kept[start]]


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
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    config: Config,
    *,
    n: int,
    seed: int,
    temperature: float | None = None,
) -> list[list[Completion]]:
    """n completions per prompt, within the model's limits, at the model's temperature unless another is given."""
    model = config.model
    max_tokens = model.max_response_tokens or model.max_model_len  # the sampler stops each row at max_model_len
    heat = model.temperature if temperature is None else temperature
    return sampler.generate(prompts, n=n, max_tokens=max_tokens, temperature=heat, seed=seed)
