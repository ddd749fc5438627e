"""`look_at`: what lies in a job's buffer, in numbers and a few rows. Each shard is read once, those of the rows twice.

Owns: what is counted. Does not own: which rows (`scan.py`), how they look (`flows.experiences_page`). In memory are one
shard and two numbers for each row: its reward and the length of its response.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from math import isnan
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engines.config import Frozen
from trinity_tasks.browse.columns import Place, response_lengths
from trinity_tasks.browse.numbers import Numbers, Versions, numbers_of, versions_of
from trinity_tasks.browse.scan import DamagedShard, Scan
from trinity_tasks.browse.where import Where
from trinity_tasks.buffer.ledger import Ledger
from trinity_tasks.checkpoint import CheckpointStore
from trinity_tasks.inspection import buffer_name, one_job
from trinity_tasks.storage import Storage

_COUNTED: Final = (
    *("eid_batch", "eid_task", "experience_type", "truncate_status", "model_version", "reward"),
    *("prompt_length", "tokens", "chosen", "rejected"),
)
_SHOWN: Final = ("uid", "reward", "model_version", "prompt_length", "response_length", "prompt", "response")


class Standing(Frozen):
    """How far the trainer has come with the rows."""

    trained: int
    """By a step that the last commit covers."""
    recorded: int
    """In the ledger for a step after the last commit: a resume trains them again."""
    passed: int
    """Left behind untrained: too old, or pushed out of a full pool."""
    waiting: int
    """Not taken yet."""


class SampleRow(Frozen):
    """One row, to be read."""

    uid: str
    reward: float | None
    model_version: int | None
    prompt_length: int
    """Tokens."""
    response_length: int
    """Tokens."""
    prompt: str | None
    response: str | None


class BufferReport(Frozen):
    """The rows of a buffer that meet a condition."""

    url: str
    """Of the job."""
    buffer: str
    buffers: tuple[str, ...]
    """All buffers of the job that have shards."""
    where: str | None
    num_shards: int
    """All that there are, also those without such rows."""
    num_rows: int
    num_groups: int
    """Groups with such a row."""
    num_unscored: int
    num_truncated: int
    num_unsampled: int
    """Rows without a policy version: nobody sampled them."""
    rows_by_writer: dict[str, int]
    rows_by_type: dict[str, int]
    standing: Standing
    policy_versions: Versions | None
    reward: Numbers | None
    response_length: Numbers | None
    """Tokens."""
    samples: tuple[SampleRow, ...]
    """By reward, from the lowest to the highest, evenly in between; unscored ones last."""
    damaged: tuple[DamagedShard, ...]
    """Shards whose rows are in none of the numbers."""


def open_scan(url: str, buffer: str | None = None, where: str | None = None) -> Scan:
    """The rows of a job's buffer, its main one if none is named.

    Raises ConfigError (no job, no such buffer, a job with stages, a wrong condition), StorageError.
    """
    condition = Where.parse(where) if where is not None else None
    store = Storage(url)
    return Scan(store, buffer or buffer_name(one_job(store)), condition)


def look_at(scan: Scan, num_samples: int) -> BufferReport:
    """Count the rows and pick some. Raises StorageError, DataError (ledger or commits cannot be read)."""
    counts = _Counts(_Trained(scan.store))
    for shard in scan:
        counts.add(shard.place, shard.rows, shard.table(_COUNTED))
    rewards = np.frombuffer(counts.rewards, np.float64)
    return BufferReport(
        url=scan.store.url,
        buffer=scan.buffer,
        buffers=scan.buffers,
        where=scan.where.text if scan.where else None,
        num_shards=len(scan.places),
        num_rows=len(rewards),
        num_groups=counts.num_groups,
        num_unscored=counts.num_unscored,
        num_truncated=counts.num_truncated,
        num_unsampled=len(rewards) - sum(counts.versions.values()),
        rows_by_writer=dict(sorted(counts.writers.items())),
        rows_by_type=dict(sorted(counts.types.items())),
        standing=Standing(**counts.standing),
        policy_versions=versions_of(counts.versions),
        reward=numbers_of(rewards),
        response_length=numbers_of(np.frombuffer(counts.lengths, np.int64)),
        samples=_samples(scan, counts, pick(rewards, num_samples)),
        damaged=tuple(sorted(scan.damaged.values(), key=lambda shard: shard.name)),
    )


class _Trained:
    """Which rows of a buffer the trainer has taken, as the ledger says."""

    def __init__(self, store: Storage) -> None:
        manifest = CheckpointStore(store).latest(verify=False)
        ledger, committed = Ledger(store), manifest.step if manifest else 0
        self._taken: dict[str, list[tuple[str, int, int]]] = {}
        for step in ledger.steps():
            entry = ledger.read(step)
            kind = "trained" if step <= committed else "recorded"
            for part in entry.ranges:
                self._taken.setdefault(part.shard, []).append((kind, part.start, part.stop))
            for part in entry.passed:
                self._taken.setdefault(part.shard, []).append(("passed", part.start, part.stop))

    def standing(self, place: Place, rows: npt.NDArray[np.int64]) -> dict[str, int]:
        """Number of rows by field of `Standing`."""
        left, counts = np.ones(rows.shape, np.bool_), dict[str, int]()
        for kind in ("trained", "recorded", "passed"):
            found = np.zeros(rows.shape, np.bool_)
            for each, start, stop in self._taken.get(place.name, ()):
                if each == kind:
                    found |= (rows >= start) & (rows < stop)
            counts[kind] = int((found & left).sum())
            left &= ~found
        return counts | {"waiting": int(left.sum())}


class _Counts:
    """Sums over shards."""

    def __init__(self, trained: _Trained) -> None:
        self.num_groups = self.num_unscored = self.num_truncated = 0
        self.writers, self.types, self.standing = Counter[str](), Counter[str](), Counter[str]()
        self.versions = Counter[int]()
        self.rewards, self.lengths = array("d"), array("q")
        """Of each row, in the order of the scan; an unscored one's reward is NaN."""
        self.places: list[Place] = []
        """Of each readable shard."""
        self.ends: list[int] = []
        """Number of rows up to and with each of them."""
        self._trained = trained
        self.standing.update(trained=0, recorded=0, passed=0, waiting=0)

    def add(self, place: Place, rows: npt.NDArray[np.int64], table: Any) -> None:
        """Count the wanted rows of one shard."""
        column = {name: table.column(name) for name in ("truncate_status", "reward", "model_version")}
        groups = table.group_by(["eid_batch", "eid_task"]).aggregate([])
        self.num_groups += int(groups.num_rows)
        self.num_unscored += int(column["reward"].null_count)
        self.num_truncated += len(rows) - int(column["truncate_status"].null_count)
        self.writers[place.writer] += len(rows)
        self.types.update(table.column("experience_type").to_pylist())
        self.versions.update(column["model_version"].drop_null().to_pylist())
        self.standing.update(self._trained.standing(place, rows))
        self.rewards.frombytes(column["reward"].fill_null(float("nan")).to_numpy().tobytes())
        self.lengths.frombytes(response_lengths(table).tobytes())
        self.places.append(place)
        self.ends.append(len(self.rewards))


def pick(rewards: npt.NDArray[np.float64], count: int) -> list[int]:
    """Which of the rows to show: lowest and highest reward, evenly in between; unscored ones if those are too few.

    Example:
        >>> pick(np.array([0.5, 0.1, np.nan, 0.9, 0.7]), 3)
        [1, 0, 3]
    """
    order = np.argsort(rewards, kind="stable")  # NaN comes last
    num_scored = int(np.count_nonzero(~np.isnan(rewards)))
    scored, unscored = order[:num_scored], order[num_scored:]
    chosen = [*_spread(scored, count), *_spread(unscored, count - num_scored)]
    return [int(position) for position in chosen]


def _spread(positions: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """So many of them, first and last among them."""
    if count >= len(positions):
        return positions
    return positions[np.linspace(0, len(positions) - 1, max(count, 0)).round().astype(np.int64)]


def _samples(scan: Scan, counts: _Counts, positions: list[int]) -> tuple[SampleRow, ...]:
    """Rows by their position in the scan, in the given order; a shard is read once."""
    found: dict[int, SampleRow] = {}
    for number in sorted({bisect_right(counts.ends, position) for position in positions}):
        first = counts.ends[number - 1] if number else 0
        frame = scan.read(counts.places[number]).frame(_SHOWN)
        here = [position for position in positions if first <= position < counts.ends[number]]
        for position, row in zip(here, frame.iloc[[each - first for each in here]].to_dict("records"), strict=True):
            found[position] = _sample(row)
    return tuple(found[position] for position in positions)


def _sample(row: dict[str, Any]) -> SampleRow:
    known = {name: None if isinstance(value, float) and isnan(value) else value for name, value in row.items()}
    return SampleRow.model_validate(known)
