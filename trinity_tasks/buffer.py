"""The experience buffer: writers append shards, one reader takes each row exactly once, by cursor.

Owns: names of shards, their order, which rows make a batch, the end of data. Does not own: the bytes of a shard
(`trinity_tasks.shards`), which rows a step has taken (`trinity_tasks.ledger`), waiting (`trinity_tasks.sampling`).

    experiences/<buffer>/<writer>-<00000012>.parquet     create-only, never changed
    experiences/<buffer>/<writer>.end                    {"shards": n}: this writer has written its last

A group (rows of one `eid.tid`) lies in one shard, its rows side by side; a batch is whole groups. To find the next
batch costs as many store calls as it touches shards, however many were consumed before.
"""

from __future__ import annotations

import hashlib
import re
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from pydantic import JsonValue

from engines.errors import ConfigError, DataError
from engines.experience import Experience
from trinity_tasks.cursor import BatchRef, Cursor, RowRange
from trinity_tasks.row_checks import NO_LIMITS, RowLimits, refused, validate
from trinity_tasks.shards import Shard, decode, encode
from trinity_tasks.storage import Storage

CACHE_BYTES: Final = 256 * 2**20
"""Decoded shards kept between claim and read; the newest stays even if it is larger."""
RELIST_S: Final = 60.0
"""How often the folder is listed for new writers while the known ones fill every batch."""
LISTING_SHARE: Final = 0.05
"""Most of the time that listings may take while a batch is short; the folder may hold very many shards."""
FREE_LISTING_S: Final = 0.001
"""A listing faster than this is never put off."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_SHARD: Final = re.compile(r"(?P<writer>.+)-(?P<index>\d{8,})\.parquet")
_END: Final = ".end"


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard as it was written."""

    name: str
    """Path below the job's folder."""
    rows: int
    size: int
    """Bytes."""
    sha256: str
    """Hex digest of the object."""


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


def _folder(buffer: str, writer: str | None = None) -> str:
    for what, name in (("buffer", buffer), ("writer", writer)):
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(
                f"{what} name {name!r}: use letters, digits, '.', '_' and '-', and begin with one of the first two"
            )
    return f"experiences/{buffer}"


def _shard_name(folder: str, writer: str, index: int) -> str:
    return f"{folder}/{writer}-{index:08d}.parquet"


class ExperienceWriter:
    """Appends shards to a buffer under one writer's name, which no other process may use at the same time.

    Example:
        >>> writer = ExperienceWriter(Storage("memory://job"), "main", "agent-7")   # doctest: +SKIP
        >>> writer.write(experiences).name                                          # doctest: +SKIP
        'experiences/main/agent-7-00000000.parquet'
    """

    next_index: int
    """Index of the next shard: the number of shards that this writer has written, in all its lives."""
    ended: bool
    """Whether `end` was called, in this life or an earlier one."""

    def __init__(
        self, store: Storage, buffer: str, writer: str, limits: RowLimits | None = None, *, durable: bool = True
    ) -> None:
        """`store` is the job's folder; `durable` as in `Storage.create`.

        Raises ConfigError for a bad name, DataError if a shard of this writer was lost.
        """
        self._store = store
        self._folder = _folder(buffer, writer)
        self._writer = writer
        self._limits = limits or NO_LIMITS
        self._durable = durable
        names = [info.name.rsplit("/", 1)[-1] for info in store.list(self._folder)]
        matches = [match for name in names if (match := _SHARD.fullmatch(name)) and match["writer"] == writer]
        indices = sorted(int(match["index"]) for match in matches)
        for index, following in pairwise(indices):
            if following != index + 1:
                raise self._lost(index + 1)
        self.next_index = indices[-1] + 1 if indices else 0
        self.ended = f"{writer}{_END}" in names

    def _lost(self, index: int) -> DataError:
        return DataError(
            f"{self._store.where(_shard_name(self._folder, self._writer, index))} is missing, yet a later shard of the "
            "writer is to follow or exists; readers would wait for it for ever. Restore it from a copy, or use another "
            "writer name"
        )

    def write(self, experiences: Sequence[Experience], *, index: int | None = None) -> ShardRecord:
        """Store the rows as one new shard, all or nothing. No rows make an empty shard.

        index: write this shard, not the next one. Raises DataError for a bad row (nothing is stored), FileExistsError
        if the shard exists (nothing is changed), StorageError.
        """
        if self.ended:
            raise DataError(
                f"writer {self._writer} of {self._store.where(self._folder)} has ended, readers may be done with it; "
                "call reopen() first, or use another writer name"
            )
        index = self.next_index if index is None else index
        if index > self.next_index and not self.has_shard(index - 1):
            raise self._lost(index - 1)
        validate(experiences, self._limits)
        _check_groups(experiences)
        data = encode(experiences)
        name = _shard_name(self._folder, self._writer, index)
        self._store.create(name, data, durable=self._durable)
        self.next_index = max(self.next_index, index + 1)
        return ShardRecord(name, len(experiences), len(data), hashlib.sha256(data).hexdigest())

    def has_shard(self, index: int) -> bool:
        """Whether the shard has been written, by whatever process."""
        return self._store.exists(_shard_name(self._folder, self._writer, index))

    def end(self) -> None:
        """Tell readers that no more will come. Idempotent.

        Raises DataError if another process ended this writer at another number of shards.
        """
        name = f"{self._folder}/{self._writer}{_END}"
        marker: JsonValue = {"shards": self.next_index}
        try:
            self._store.create_json(name, marker)
        except FileExistsError:
            if (found := self._store.read_json(name)) != marker:
                raise DataError(
                    f"{self._store.where(name)} says {found}, this process has counted {self.next_index} shards: two "
                    "processes use one writer name. Give each its own"
                ) from None
        self.ended = True

    def reopen(self) -> None:
        """Take `end` back, so that more can be written. A reader that has seen the end may have stopped already."""
        self._store.remove(f"{self._folder}/{self._writer}{_END}")
        self.ended = False


def _check_groups(experiences: Sequence[Experience]) -> None:
    seen: set[str] = set()
    previous: str | None = None
    for index, row in enumerate(experiences):
        group = row.eid.tid
        if group != previous and group in seen:
            fault = f"its group {group} began earlier and other rows came between; sort the rows by eid.tid"
            raise refused(experiences, index, fault)
        seen.add(group)
        previous = group


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
        self._folder = _folder(buffer)
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
                if loaded := self._load(_shard_name(self._folder, writer, index)):
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
            if match := _SHARD.fullmatch(name):
                self._writers.add(match["writer"])
            elif name.endswith(_END):
                self._writers.add(name.removesuffix(_END))
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
                    f"{self._store.where(_shard_name(self._folder, writer, index))} is missing, its writer ended after "
                    f"{end} shards: rows are lost. Restore it from a copy"
                )
            again.add(writer)
        walk.missed |= again
        walk.dry -= again
        return bool(again)

    def _end_of(self, writer: str, index: int) -> int | None:
        if self._ends.get(writer, -1) < index:  # not known, or taken back since
            self._ends.pop(writer, None)
            name = f"{self._folder}/{writer}{_END}"
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
