"""The experience buffer: writers append shards, one reader takes each row exactly once, by cursor.

Owns: the order of shards, which rows make a batch, the end of data. Does not own: the bytes of a shard (`shards.py`),
which rows a step has taken (`ledger.py`), waiting (`source.py`).

A group (rows of one `eid.tid`) lies in one shard, its rows side by side; a batch is whole groups. To find the next
batch costs as many store calls as it touches shards, however many were consumed before.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from engines.errors import DataError
from engines.experience import Experience
from trinity_tasks.buffer.cursor import BatchRef, Cursor, RowRange
from trinity_tasks.buffer.layout import END, SHARD, end_name, folder_of, shard_name
from trinity_tasks.buffer.shards import Shard, decode
from trinity_tasks.storage import Storage

CACHE_BYTES: Final = 256 * 2**20
"""Decoded shards kept between claim and read; the newest stays even if it is larger."""
RELIST_S: Final = 60.0
"""How often the folder is listed for new writers while the known ones fill every batch."""
LISTING_SHARE: Final = 0.05
"""Most of the time that listings may take while a batch is short; the folder may hold very many shards."""
FREE_LISTING_S: Final = 0.001
"""A listing faster than this is never put off."""


@dataclass(frozen=True, slots=True)
class Availability:
    """What lies beyond a cursor, for whoever waits."""

    available: int
    """Rows; counted no further than `needed`, by whole shards."""
    needed: int
    """Rows."""
    ended: bool
    """Every writer has ended and fewer than `needed` rows are left: waiting is useless."""
    writers: tuple[str, ...]
    """One phrase for each known writer: its name and what it is expected to write next."""
    filtered: int = 0
    """Rows that were there but may not be trained."""


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    shard: Shard
    sha256: str


class _Walk:
    """Shards beyond a cursor, oldest index first, by writer name within one index."""

    def __init__(self, positions: dict[str, tuple[int, int]]) -> None:
        self.positions = positions
        self.dry: set[str] = set()
        """Writers whose next shard is not there."""
        self.missed: set[str] = set()
        """Writers that ended beyond their next shard; looked for once more."""

    def heads(self) -> list[tuple[int, str]]:
        return sorted((index, name) for name, (index, _) in self.positions.items() if name not in self.dry)


class ExperienceReader:
    """Takes batches of whole groups from a buffer. Holds no position: the cursor is the caller's. One thread at a time.

    Example:
        >>> reader = ExperienceReader(store, "main")                # doctest: +SKIP
        >>> ref, cursor = reader.claim(Cursor.start(), 512)         # doctest: +SKIP
        >>> experiences = reader.read(ref)                          # doctest: +SKIP
    """

    def __init__(
        self,
        store: Storage,
        buffer: str,
        *,
        writers: Sequence[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store` is the job's folder. writers: the only ones there are; None: whoever writes, found by listing."""
        self._store = store
        self._folder = folder_of(buffer)
        self._closed = writers is not None
        self._writers = set(writers or ())
        self._ends: dict[str, int] = {}
        self._cache: OrderedDict[str, _Loaded] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._clock = clock
        self._listed_at = float("-inf")
        self._listing_s = 0.0

    def claim(self, cursor: Cursor, num_rows: int, *, partial: bool = False) -> tuple[BatchRef, Cursor] | None:
        """The next rows and the cursor behind them, or None if there are not enough yet.

        The oldest shard index comes first, then the writer's name. partial: at the end of data, take what is left.
        Raises DataError if a shard cannot be read or was lost, or if num_rows would cut a group.
        """
        walk = self._walk(cursor)
        ranges: list[RowRange] = []
        needed = num_rows
        while needed and (found := self._next_shard(walk, ends=partial)):
            writer, loaded = found
            shard = loaded.shard
            index, start = walk.positions[writer]
            stop = _boundary(shard, start + needed)
            if stop > start:
                ranges.append(RowRange(shard.name, start, stop, loaded.sha256))
                needed -= stop - start
            if needed and stop < shard.num_rows:
                raise self._would_cut(shard, stop, num_rows, needed)
            walk.positions[writer] = (index, stop) if stop < shard.num_rows else (index + 1, 0)
        if needed and not (partial and ranges and self._has_ended(walk)):
            return None
        for writer, (index, row) in walk.positions.items():
            if (index, row) != cursor.at(writer):
                cursor = cursor.moved(writer, index, row)
        return BatchRef(tuple(ranges), num_rows - needed), cursor

    def availability(self, cursor: Cursor, needed: int) -> Availability:
        """How much lies beyond the cursor, and whether more may come. Raises DataError as `claim` does."""
        walk = self._walk(cursor)
        available = 0
        while available < needed and (found := self._next_shard(walk, ends=True)):
            writer, loaded = found
            index, start = walk.positions[writer]
            available += loaded.shard.num_rows - start
            walk.positions[writer] = (index + 1, 0)
        ended = available < needed and self._has_ended(walk)
        phrases = (
            f"{name} (ended after {self._ends[name]} shards)"
            if name in self._ends
            else f"{name} (shard {index} is next)"
            for name, (index, _) in sorted(walk.positions.items())
        )
        return Availability(available, needed, ended, tuple(phrases))

    def read(self, ref: BatchRef) -> list[Experience]:
        """The rows of a batch, in its order; the caller may change them.

        Raises DataError if a shard is missing, cannot be read, or is not the one that was claimed.
        """
        rows: list[Experience] = []
        for part in ref.ranges:
            loaded = self._load(part.shard)
            if loaded is None:
                raise DataError(
                    f"{self._store.where(part.shard)} is missing; rows {part.start} to {part.stop - 1} are lost"
                )
            if part.sha256 not in (None, loaded.sha256) or not 0 <= part.start < part.stop <= loaded.shard.num_rows:
                raise DataError(
                    f"{self._store.where(part.shard)} has {loaded.shard.num_rows} rows and sha256 {loaded.sha256}, but "
                    f"rows {part.start} to {part.stop - 1} of sha256 {part.sha256} were claimed: the object was "
                    "replaced. Restore it from a copy"
                )
            rows += loaded.shard.rows(part.start, part.stop)
            if part.stop == loaded.shard.num_rows:  # consumed: later batches do not need it
                self._cache.pop(part.shard, None)
        return rows

    def _walk(self, cursor: Cursor) -> _Walk:
        self._writers.update(writer for writer, _, _ in cursor.positions)
        if not self._closed and self._clock() - self._listed_at >= RELIST_S:
            self._list()
        return _Walk({writer: cursor.at(writer) for writer in self._writers})

    def _next_shard(self, walk: _Walk, *, ends: bool) -> tuple[str, _Loaded] | None:
        """The oldest shard that is there. Looks for new writers, and for ends if asked, only when there is none."""
        while True:
            for index, writer in walk.heads():
                if loaded := self._load(shard_name(self._folder, writer, index)):
                    return writer, loaded
                walk.dry.add(writer)
            missed = ends and self._find_missed(walk)
            if not (self._find_writers(walk, surely=ends) or missed):
                return None

    def _find_writers(self, walk: _Walk, *, surely: bool) -> bool:
        if self._closed:
            return False
        all_ended = surely and all(writer in self._ends for writer in walk.positions)
        wait_s = self._listing_s / LISTING_SHARE if self._listing_s > FREE_LISTING_S else 0.0
        if all_ended or self._clock() - self._listed_at >= wait_s:
            self._list()
        new = self._writers - walk.positions.keys()
        walk.positions.update((writer, (0, 0)) for writer in new)
        return bool(new)

    def _list(self) -> None:
        started = self._clock()
        for info in self._store.list(self._folder):
            name = info.name.rsplit("/", 1)[-1]
            if match := SHARD.fullmatch(name):
                self._writers.add(match["writer"])
            elif name.endswith(END):
                self._writers.add(name.removesuffix(END))
        self._listed_at = self._clock()
        self._listing_s = self._listed_at - started

    def _find_missed(self, walk: _Walk) -> bool:
        """Look for ends; a writer that ended beyond its next shard wrote that since we looked, or it is lost."""
        again: set[str] = set()
        for writer in walk.dry:
            index = walk.positions[writer][0]
            end = self._end_of(writer, index)
            if end is None or index >= end:
                continue
            if writer in walk.missed:
                raise DataError(
                    f"{self._store.where(shard_name(self._folder, writer, index))} is missing, its writer ended after "
                    f"{end} shards: rows are lost. Restore it from a copy"
                )
            again.add(writer)
        walk.missed |= again
        walk.dry -= again
        return bool(again)

    def _end_of(self, writer: str, index: int) -> int | None:
        if self._ends.get(writer, -1) < index:  # not known, or taken back since
            self._ends.pop(writer, None)
            name = end_name(self._folder, writer)
            try:
                marker = self._store.read_json(name)
            except FileNotFoundError:
                return None
            shards = marker.get("shards") if isinstance(marker, dict) else None
            if not isinstance(shards, int):
                raise DataError(f"{self._store.where(name)} holds {marker!r}, it must be {{'shards': number}}")
            self._ends[writer] = shards
        return self._ends[writer]

    def _has_ended(self, walk: _Walk) -> bool:
        return bool(walk.positions) and all(
            writer in self._ends and index >= self._ends[writer] for writer, (index, _) in walk.positions.items()
        )

    def _load(self, name: str) -> _Loaded | None:
        """A decoded shard, from the cache or the store; None if there is none."""
        if loaded := self._cache.get(name):
            self._cache.move_to_end(name)
            return loaded
        try:
            data = self._store.read_bytes(name)
        except FileNotFoundError:
            return None
        loaded = _Loaded(decode(data, name, self._store.where(name)), hashlib.sha256(data).hexdigest())
        self._cache[name] = loaded
        size = sum(kept.shard.num_bytes for kept in self._cache.values())
        while size > self._cache_bytes and len(self._cache) > 1:
            size -= self._cache.popitem(last=False)[1].shard.num_bytes
        return loaded

    def _would_cut(self, shard: Shard, start: int, num_rows: int, needed: int) -> DataError:
        size = _boundary(shard, start, following=True) - start
        group = shard.rows(start, start + 1)[0].eid.tid
        return DataError(
            f"a batch of {num_rows} rows would cut a group: {num_rows - needed} rows are taken, and the next group, "
            f"{group} in {self._store.where(shard.name)}, has {size} where {needed} fit. Advantages need whole groups: "
            "buffer.train_batch_size must be a multiple of the group size, and every group complete"
        )


def _boundary(shard: Shard, row: int, *, following: bool = False) -> int:
    """The last group boundary at or before a row; with `following`, the first one after it."""
    position = bisect_right(shard.group_starts, row)
    if row >= shard.num_rows or (following and position == len(shard.group_starts)):
        return shard.num_rows
    return shard.group_starts[position] if following else shard.group_starts[position - 1]
