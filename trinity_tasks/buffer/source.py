"""`BatchSource`: the next batch of experiences for the trainer, recorded in the ledger before it is trained.

Owns: which rows a step takes, waiting for them, the end of the data, starvation. Does not own: shards and their order
(`buffer.py`), producing rows (`explorer.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from engines.errors import StarvedError
from engines.experience import Experience
from trinity_tasks.buffer.cursor import BatchRef, Cursor
from trinity_tasks.buffer.ledger import Ledger, LedgerEntry, policy_versions
from trinity_tasks.buffer.reader import Availability

logger = logging.getLogger(__name__)

POLL_S = 0.5
REPORT_EVERY_S = 30.0


class Reader(Protocol):
    """What batches are taken from: `ExperienceReader`, `MixedReader`."""

    def claim(self, cursor: Cursor, num_rows: int) -> tuple[BatchRef, Cursor] | None:
        """The next rows and the cursor behind them, or None if there are not enough yet."""
        ...

    def availability(self, cursor: Cursor, needed: int) -> Availability:
        """How much lies beyond the cursor, and whether more may come."""
        ...

    def read(self, ref: BatchRef) -> list[Experience]:
        """The rows of a batch, in its order."""
        ...


class Batch(NamedTuple):
    """What one train step consumes."""

    experiences: list[Experience]
    cursor: Cursor
    """Where the next step begins."""


class BatchSource:
    """Batches of one job, in the order that the ledger fixes."""

    def __init__(self, reader: Reader, ledger: Ledger, *, batch_size: int, timeout_s: float) -> None:
        self._reader = reader
        self._ledger = ledger
        self._batch_size = batch_size
        self._timeout_s = timeout_s
        self.left_at_end: int | None = None
        """Rows that are left, fewer than a batch, once the producers have ended."""

    def has_batch(self, cursor: Cursor) -> bool:
        """Whether a whole batch lies in the buffer."""
        return self._reader.claim(cursor, self._batch_size) is not None

    async def next_batch(self, step: int, cursor: Cursor, *, attempt: int) -> Batch | None:
        """The batch of this step; None when the producers have ended and no whole batch is left.

        If an earlier attempt recorded this step in the ledger, its rows are taken again.
        Raises StarvedError when not enough rows came in time, DataError for a shard that cannot be read.
        """
        claimed = await self._wait_for_rows(step, cursor)
        if claimed is None:
            return None
        ref, after = claimed
        experiences = self._reader.read(ref)
        entry = self._ledger.record(LedgerEntry.of(step, ref, experiences, before=cursor, after=after, attempt=attempt))
        if entry.ref != ref:
            experiences = self._reader.read(entry.ref)
        return Batch(experiences, entry.cursor_after)

    async def _wait_for_rows(self, step: int, cursor: Cursor) -> tuple[BatchRef, Cursor] | None:
        started = reported = time.monotonic()
        while (claimed := self._reader.claim(cursor, self._batch_size)) is None:
            state = self._reader.availability(cursor, self._batch_size)
            if state.ended:
                self.left_at_end = state.available
                if state.available:
                    logger.warning(
                        "the producers have ended: %d experiences are left untrained, a batch needs %d",
                        state.available,
                        state.needed,
                    )
                return None
            waited = time.monotonic() - started
            if waited >= self._timeout_s:
                raise StarvedError(f"step {step} waited {waited:.0f} s for experiences: {_counts(state)}")
            if time.monotonic() - reported >= REPORT_EVERY_S:
                reported = time.monotonic()
                logger.warning("step %d waits for experiences since %.0f s: %s", step, waited, _counts(state))
            await asyncio.sleep(min(POLL_S, self._timeout_s - waited))
        return claimed


def batch_metrics(exps: Sequence[Experience], step: int) -> dict[str, float]:
    """Facts about a batch that need no model; lag: train steps between the sampling weights and this step's.

    experience/<name> is the mean of what the rows' own `metrics` say.
    """
    versions = np.asarray(policy_versions(exps))
    own: dict[str, list[float]] = {}
    for exp in exps:
        for name, value in exp.metrics.items():
            own.setdefault(f"experience/{name}", []).append(value)
    return {
        **{name: float(np.mean(values)) for name, values in own.items()},
        "sample/task_count": float(len({exp.eid.tid for exp in exps})),
        "sample/num_rows": float(len(exps)),
        "sample/num_unscored": float(sum(exp.reward is None for exp in exps)),
        "sample/truncated_share": sum(exp.truncate_status is not None for exp in exps) / len(exps),
        "sample/model_version_min": float(versions.min()),
        "sample/model_version_mean": float(versions.mean()),
        "sample/model_version_max": float(versions.max()),
        "sample/lag_max": float(step - 1 - versions.min()),
    }


def _counts(state: Availability) -> str:
    writers = ", ".join(state.writers) or "none"
    return (
        f"{state.available} available, {state.filtered} filtered, {state.needed} needed; writers: {writers}. "
        "Start a producer, or raise buffer.trainer_input.experience_buffer.max_read_timeout"
    )
