"""What the processes of a soak run: a writer, and a trainer that keeps a list of what it trained instead of weights.

Owns: `Plan`, `write`, `train`. Does not own: starting and killing (`__main__.py`). Both go on where an earlier process
of theirs was killed, with nothing but the job's folder to tell them.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from engines.config import Frozen
from tests.soak.rows import MAX_STALENESS, OPERATOR, digest, made
from trinity_tasks.buffer import ExperienceReader, ExperienceWriter, source
from trinity_tasks.buffer.cursor import Position
from trinity_tasks.buffer.ledger import Ledger
from trinity_tasks.buffer.notes import Notes
from trinity_tasks.buffer.pool import Decay, NewestFirst, Pooled
from trinity_tasks.buffer.source import Batch, BatchSource
from trinity_tasks.buffer.strategies import Fifo, Strategy
from trinity_tasks.checkpoint import CheckpointStore, CommitFields
from trinity_tasks.lease import Lease
from trinity_tasks.storage import Storage

LOG = "trained.tsv"
"""In each checkpoint: step, uid, digest of every row that has trained, in order."""
STEPS_PER_COMMIT = 3
TIMEOUT_S = 120.0
CAPACITY = 60
USE_COUNT_LIMIT = 2


class Plan(Frozen):
    """One soak."""

    url: str
    """The job's folder."""
    scratch: Path
    """A local folder of the soak's own."""
    seed: int
    num_kills: int
    writers: tuple[str, ...]
    """Names; none: the job has its rows already."""
    min_shards: int = 0
    """Of each writer. They write until all kills are done, too."""
    strategy: Literal["fifo", "newest", "priority"] = "fifo"
    pause_s: float
    """Between two shards of a writer, and two steps of the trainer."""
    max_life_s: float
    """A process is killed so long after it began its work, at most."""

    @property
    def stop(self) -> Path:
        """The file that tells writers to end."""
        return self.scratch / "stop"


def strategy_of(plan: Plan, store: Storage) -> Strategy:
    """Batches that no number of whole groups fits into evenly."""
    reader = ExperienceReader(store, "main")
    match plan.strategy:
        case "fifo":
            return Fifo(reader, 15, max_staleness=MAX_STALENESS)
        case "newest":
            return Pooled(reader, 7, NewestFirst(), capacity=CAPACITY)
        case "priority":
            priority = Decay(plan.seed, sigma=3.0, use_count_limit=USE_COUNT_LIMIT, cooldown_steps=2)
            return Pooled(reader, 7, priority, capacity=CAPACITY)


def write(plan: Plan, name: str, ready: Connection) -> None:
    """Append shards until there is the stop file."""
    writer = ExperienceWriter(plan.url, "main", name)
    ready.send("at work")
    while not writer.ended and (writer.next_index < plan.min_shards or not plan.stop.exists()):
        write_next(writer)
        time.sleep(plan.pause_s)
    writer.end()


def write_next(writer: ExperienceWriter) -> None:
    """The next shard; one that a killed process still got through counts as written."""
    shard = made(writer.name, writer.next_index)
    with contextlib.suppress(FileExistsError):
        writer.write(shard.kept, notes=Notes.of([OPERATOR], shard.dropped, {}))


def train(plan: Plan, name: str, ready: Connection) -> None:
    """Train from the last commit to the end of data."""
    source.POLL_S = 0.02
    folder = plan.scratch / name
    shutil.rmtree(folder, ignore_errors=True)
    store = Storage(plan.url)
    with Lease.acquire(store) as lease, contextlib.closing(CheckpointStore(store, lease, keep=2)) as checkpoints:
        manifest = checkpoints.restore_latest(folder / "restored")
        checkpoints.clean_orphans()
        step, position = (0, Position()) if manifest is None else (manifest.step, manifest.position)
        (folder / "restored").mkdir(parents=True, exist_ok=True)
        trainer = _Trainer(plan, folder / "restored" / LOG, checkpoints, lease.number)
        batches = BatchSource(
            strategy_of(plan, store),
            Ledger(store, durable=False),
            timeout_s=TIMEOUT_S,
            last_batch="train",
            read_ahead=True,
        )
        ready.send("at work")
        with contextlib.closing(batches):
            asyncio.run(trainer.run(batches, step, position))


class _Trainer:
    """Appends rows to the log, and commits it every few steps."""

    def __init__(self, plan: Plan, log: Path, checkpoints: CheckpointStore, attempt: int) -> None:
        self._plan = plan
        self._log = log
        self._checkpoints = checkpoints
        self._attempt = attempt

    async def run(self, batches: BatchSource, step: int, position: Position) -> None:
        while (batch := await batches.next_batch(step + 1, position, attempt=self._attempt)) is not None:
            step, position = step + 1, batch.entry.after
            self._append(step, batch)
            if step % STEPS_PER_COMMIT == 0:
                self._checkpoints.commit_in_background(self._staged(), step=step, **_fields(position))
            await asyncio.sleep(self._plan.pause_s)
        self._checkpoints.commit(self._staged(), step=step, **_fields(position, finished=True))

    def _append(self, step: int, batch: Batch) -> None:
        with open(self._log, "a") as file:
            file.writelines(f"{step}\t{row.eid.uid}\t{digest(row)}\n" for row in batch.experiences)

    def _staged(self) -> Path:
        staging = Path(tempfile.mkdtemp(dir=self._log.parent.parent))
        shutil.copyfile(self._log, staging / LOG)
        return staging


def _fields(position: Position, *, finished: bool = False) -> CommitFields:
    return {"cursor": position.cursor, "buffer_state": position.state, "finished": finished}
