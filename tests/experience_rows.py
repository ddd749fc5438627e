"""Experiences for tests of the buffer: small, different from each other, deterministic; and the plainest reader."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.experience import EID, Experience
from trinity_tasks.buffer import ExperienceReader
from trinity_tasks.buffer.cursor import BatchRef, Cursor, Position
from trinity_tasks.buffer.strategies import Availability, Fifo
from trinity_tasks.storage import Storage


def make_group(batch: int | str, task: int | str, size: int, version: int = 0) -> list[Experience]:
    """`size` rows of one task; contents follow from (batch, task, run)."""
    rng = np.random.default_rng(zlib.crc32(f"{batch}/{task}".encode()))
    rows: list[Experience] = []
    for run in range(size):
        prompt, response = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        rows.append(
            Experience(
                tokens=rng.integers(0, 100, prompt + response).astype(np.int32),
                prompt_length=prompt,
                logprobs=-rng.random(response).astype(np.float32),
                reward=float(rng.integers(0, 2)),
                eid=EID(batch, task, run, suffix=f"{run:06x}"),
                info={"model_version": version, "task_index": 7},
            )
        )
    return rows


def make_rows(num_groups: int, group_size: int, batch: int | str = 0, version: int = 0) -> list[Experience]:
    """Whole groups, side by side."""
    return [row for task in range(num_groups) for row in make_group(batch, task, group_size, version)]


def uids(rows: Sequence[Experience]) -> list[str]:
    """The identities of rows, in order."""
    return [row.eid.uid for row in rows]


class FifoReader:
    """Takes rows oldest first, with nothing but a cursor between two batches."""

    def __init__(self, store: Storage, buffer: str = "main", **options: Any) -> None:
        self.reader = ExperienceReader(store, buffer, **options)

    def claim(self, cursor: Cursor, num_rows: int, *, partial: bool = False) -> tuple[BatchRef, Cursor] | None:
        claim = Fifo(self.reader, num_rows).claim(Position(cursor), 1, partial=partial)
        return None if claim is None else (claim.ref, claim.after.cursor)

    def availability(self, cursor: Cursor, needed: int) -> Availability:
        return Fifo(self.reader, needed).availability(Position(cursor), 1)

    def read(self, ref: BatchRef) -> list[Experience]:
        rows = self.reader.read(ref)
        self.reader.forget(ref)
        return rows
