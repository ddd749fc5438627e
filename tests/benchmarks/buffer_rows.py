"""Experiences for the benchmarks of the buffer, and large jobs made of a few shards.

600 tokens, 200 of them prompt: tokens without any order, logprobs, a mask with a span that does not train, a reward,
info and metrics. Groups of 8. Nothing in them compresses well but the mask.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from engines.experience import EID, Experience
from trinity_tasks.buffer import ExperienceWriter
from trinity_tasks.buffer.layout import BufferFolder, ShardId
from trinity_tasks.storage import Storage

PROMPT_TOKENS, RESPONSE_TOKENS = 200, 400
VOCABULARY = 150_000
GROUP_SIZE = 8
SHARD_ROWS = 1024
BATCH_ROWS = 512
WRITER = "explorer"
DIFFERENT_SHARDS = 8
"""A large job has the same few again and again, as hard links."""


def make_rows(num_rows: int, batch: int) -> list[Experience]:
    """Whole groups of one explorer step; contents follow from `batch`."""
    rng = np.random.default_rng(batch)
    return [_row(rng, EID(batch, index // GROUP_SIZE, index % GROUP_SIZE)) for index in range(num_rows)]


def _row(rng: np.random.Generator, eid: EID) -> Experience:
    mask = np.ones(RESPONSE_TOKENS, np.bool_)
    start = int(rng.integers(RESPONSE_TOKENS - 50))
    mask[start : start + 50] = False
    return Experience(
        tokens=rng.integers(0, VOCABULARY, PROMPT_TOKENS + RESPONSE_TOKENS, np.int32),
        prompt_length=PROMPT_TOKENS,
        logprobs=-rng.exponential(1.0, RESPONSE_TOKENS).astype(np.float32),
        action_mask=mask,
        reward=float(rng.random()),
        eid=eid,
        info={"model_version": 3, "task_index": int(eid.task)},
        metrics={"accuracy": float(rng.integers(2)), "time/run_s": float(rng.random())},
    )


def write_job(folder: Path, num_rows: int) -> int:
    """A job with at least so many experiences of one writer, in shards of 1,024. Returns how many."""
    buffer, num_shards = BufferFolder("main"), -(-num_rows // SHARD_ROWS)
    with ExperienceWriter(Storage(str(folder)), writer=WRITER, durable=False) as writer:
        for index in range(min(num_shards, DIFFERENT_SHARDS)):
            writer.write(make_rows(SHARD_ROWS, index))
    for index in range(DIFFERENT_SHARDS, num_shards):
        shards = [folder / buffer.shard(ShardId(each, WRITER)) for each in (index % DIFFERENT_SHARDS, index)]
        os.link(*shards)
    return num_shards * SHARD_ROWS
