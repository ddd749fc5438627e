"""`BatchSource`: the next batch of experiences for the trainer, recorded in the ledger before it is trained.

Owns: which rows a step takes, reading ahead, waiting, the end of the data, starvation. Does not own: the choice of rows
(`strategies.py`), producing them (`trinity_tasks.explorer`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np

from engines.errors import DataError, StarvedError
from engines.experience import Experience
from trinity_tasks.buffer.cursor import Position
from trinity_tasks.buffer.ledger import Ledger, LedgerEntry, policy_versions
from trinity_tasks.buffer.notes import Notes, parse_notes
from trinity_tasks.buffer.strategies import Availability, Claim, Strategy, by_reason

logger = logging.getLogger(__name__)

POLL_S = 0.5
REPORT_EVERY_S = 30.0

LastBatch = Literal["train", "drop"]


class Batch(NamedTuple):
    """What one train step consumes."""

    experiences: list[Experience]
    entry: LedgerEntry
    """What the ledger says of the step; `entry.after` is where the next one begins."""


class _Content(NamedTuple):
    """What a claim refers to."""

    rows: list[Experience]
    notes: list[Notes]
    """Of the shards that the claim entered."""


class _Ready(NamedTuple):
    """A claim, with its content if that has been read."""

    claim: Claim
    content: _Content | None


class BatchSource:
    """Batches of one job, in the order that the ledger fixes."""

    def __init__(
        self,
        strategy: Strategy,
        ledger: Ledger,
        *,
        timeout_s: float,
        last_batch: LastBatch = "drop",
        read_ahead: bool = False,
    ) -> None:
        """timeout_s: longest wait for a batch. last_batch: what becomes of fewer rows than a batch at the end of data.

        read_ahead: fetch the next batch while the current one trains; it takes what there is at that time.
        """
        self._strategy = strategy
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._last_batch: LastBatch = last_batch
        self._read_ahead = read_ahead
        self._replaying = True
        """Until a step is met that no earlier attempt recorded."""
        self._found: tuple[int, Position, Future[_Ready | None]] | None = None
        self._worker = ThreadPoolExecutor(1, "buffer")
        self.left_at_end: int | None = None
        """Rows that are left, fewer than a batch, once the producers have ended."""

    def has_batch(self, step: int, position: Position) -> bool:
        """Whether a whole batch lies in the buffer, or the step was recorded by an earlier attempt."""
        if self._replaying and self._ledger.recorded(step, position) is not None:
            return True
        return self._look(step, position, read=False).result() is not None

    async def next_batch(self, step: int, position: Position, *, attempt: int) -> Batch | None:
        """The batch of this step; None when the producers have ended and no batch is left.

        If an earlier attempt recorded this step in the ledger, its rows are taken again. Raises StarvedError when not
        enough rows came in time, DataError for a shard that cannot be read.
        """
        if self._replaying:
            entry = self._ledger.recorded(step, position)
            if entry is not None:
                return Batch(await self._on_worker(self._read, entry.ref), entry)
            self._replaying = False
        ready = await self._wait_for_rows(step, position)
        if ready is None:
            return None
        rows, notes = ready.content or await self._on_worker(self._content, ready.claim)
        entry = LedgerEntry.of(step, ready.claim, rows, before=position, attempt=attempt, notes=notes)
        try:
            self._ledger.record(entry)
        except FileExistsError:
            entry = self._recorded_late(step, position, attempt)
            rows = await self._on_worker(self._read, entry.ref)
        if self._read_ahead:
            self._look(step + 1, entry.after, read=True)
        return Batch(rows, entry)

    def _recorded_late(self, step: int, position: Position, attempt: int) -> LedgerEntry:
        """The entry of a killed attempt, whose last request the store carried out after this one had looked for it."""
        entry = self._ledger.recorded(step, position)
        if entry is None or entry.attempt >= attempt:
            raise DataError(
                f"step {step} was recorded in the ledger by another process meanwhile; two trainers write one job: "
                "stop one of them"
            )
        return entry

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        self._worker.shutdown(cancel_futures=True)

    def _look(self, step: int, position: Position, *, read: bool) -> Future[_Ready | None]:
        """The claim of a step, made by the worker; one that found something is kept for the step."""
        if self._found is not None and self._found[:2] == (step, position):
            future = self._found[2]
            if not future.done() or future.exception() is not None or future.result() is not None:
                return future
        future = self._worker.submit(self._claim, step, position, read=read)
        self._found = (step, position, future)
        return future

    def _claim(self, step: int, position: Position, *, read: bool, partial: bool = False) -> _Ready | None:
        claim = self._strategy.claim(position, step, partial=partial)
        if claim is None:
            return None
        return _Ready(claim, self._content(claim) if read else None)

    def _content(self, claim: Claim) -> _Content:
        """Notes first: reading forgets the shards, and each would be fetched again."""
        notes = [parse_notes(self._strategy.notes(shard), shard) for shard in claim.entered]
        return _Content(self._read(claim.ref), notes)

    def _read(self, ref: Any) -> list[Experience]:
        rows = self._strategy.read(ref)
        self._strategy.forget(ref)
        return rows

    async def _on_worker(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.wrap_future(self._worker.submit(function, *args, **kwargs))

    async def _wait_for_rows(self, step: int, position: Position) -> _Ready | None:
        started = reported = time.monotonic()
        while (ready := await asyncio.wrap_future(self._look(step, position, read=False))) is None:
            state: Availability = await self._on_worker(self._strategy.availability, position, step)
            if state.ended:
                return await self._last(step, position, state)
            waited = time.monotonic() - started
            if waited >= self._timeout_s:
                raise StarvedError(f"step {step} waited {waited:.0f} s for experiences: {_counts(state)}")
            if time.monotonic() - reported >= REPORT_EVERY_S:
                reported = time.monotonic()
                logger.warning("step %d waits for experiences since %.0f s: %s", step, waited, _counts(state))
            await asyncio.sleep(min(POLL_S, self._timeout_s - waited))
        return ready

    async def _last(self, step: int, position: Position, state: Availability) -> _Ready | None:
        """The last batch, smaller than the others, if it is to train."""
        if state.available and self._last_batch == "train":
            ready: _Ready | None = await self._on_worker(self._claim, step, position, read=True, partial=True)
            if ready is not None:
                return ready
        self.left_at_end = state.available
        if state.available:
            logger.warning(
                "the producers have ended: %d experiences are left untrained, a batch needs %d",
                *(state.available, state.needed),
            )
        return None


def batch_metrics(exps: Sequence[Experience], entry: LedgerEntry) -> dict[str, float]:
    """Facts about a step's batch that need no model; lag: train steps between the sampling weights and this step's.

    experience/<name> is the mean of what the rows' own `metrics` say. operator/<name>/... is what operators did to the
    shards that the step came to.
    """
    versions = np.asarray(policy_versions(exps))
    own: dict[str, list[float]] = {}
    for exp in exps:
        for name, value in exp.metrics.items():
            own.setdefault(f"experience/{name}", []).append(value)
    return {
        **{name: float(np.mean(values)) for name, values in own.items()},
        **{f"sample/num_{reason}": float(count) for reason, count in by_reason(entry.passed).items()},
        **{f"operator/{name}/num_dropped": float(num_rows) for name, (num_rows, _) in entry.dropped.items()},
        **{f"operator/{name}": value for name, value in entry.measured.items()},
        "sample/task_count": float(len({exp.eid.tid for exp in exps})),
        "sample/num_rows": float(len(exps)),
        "sample/num_unscored": float(sum(exp.reward is None for exp in exps)),
        "sample/truncated_share": sum(exp.truncate_status is not None for exp in exps) / len(exps),
        "sample/model_version_min": float(versions.min()),
        "sample/model_version_mean": float(versions.mean()),
        "sample/model_version_max": float(versions.max()),
        "sample/lag_max": float(entry.step - 1 - versions.min()),
    }


def _counts(state: Availability) -> str:
    writers = ", ".join(state.writers) or "none"
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in state.filtered.items())
    return (
        f"{state.available} available, {sum(state.filtered.values())} filtered{f' ({reasons})' if reasons else ''}, "
        f"{state.needed} needed; writers: {writers}. Start a producer, or raise "
        "buffer.trainer_input.experience_buffer.max_read_timeout"
    )
