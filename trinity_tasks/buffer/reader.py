"""`ExperienceReader` walks the shards of a buffer from a cursor on, and reads rows that were claimed.

Owns: the order of shards, the end of data, which writers there are, the cache. Does not own: the bytes of a shard
(`shards.py`), which rows make a batch (`strategies.py`), waiting (`source.py`).

The oldest shard index comes first, then the writer's name. A group (rows of one `eid.tid`) lies in one shard, its rows
side by side. To go on from a cursor costs as many store calls as it touches shards, however many were consumed before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from engines.errors import DataError
from engines.experience import Experience
from trinity_tasks.buffer.cursor import BatchRef, Cursor, RowRange
from trinity_tasks.buffer.layout import END, BufferFolder, ShardId
from trinity_tasks.buffer.producers import read_registration
from trinity_tasks.buffer.quarantine import Damage, Quarantine
from trinity_tasks.buffer.removal import first_kept
from trinity_tasks.buffer.row_checks import NO_LIMITS, RowLimits
from trinity_tasks.buffer.shards import Shard, decode
from trinity_tasks.storage import Storage

CACHE_BYTES: Final = 256 * 2**20
"""Decoded shards kept between claim and read; the newest stays even if it is larger."""
RELIST_S: Final = 60.0
"""How often registrations are listed for new writers while the known ones fill every batch."""
LISTING_SHARE: Final = 0.05
"""Most of the time that listings of the whole folder may take while a batch is short."""
FREE_LISTING_S: Final = 0.001
"""A listing faster than this is never put off."""
READS_OF_DAMAGED: Final = 2
"""A shard that cannot be decoded is fetched once more: its bytes may have changed on the way."""


class RemovedShard(DataError):
    """The rows have trained, and their shard was removed on purpose."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A shard as it was read."""

    shard: Shard
    sha256: str

    def rows(self, start: int, stop: int) -> RowRange:
        """The reference of these rows."""
        return RowRange(self.shard.name, start, stop, self.sha256)


@dataclass(frozen=True, slots=True)
class Head:
    """What comes next: the rows of one shard from `start` on, or a shard that cannot be read."""

    shard_id: ShardId
    start: int
    found: Loaded | Damage


class Walk:
    """A way through the shards beyond a cursor. Ask for the `head`, then say with `move` how far it was taken."""

    def __init__(self, reader: ExperienceReader, cursor: Cursor, writers: set[str]) -> None:
        self._reader = reader
        self._origin = cursor
        self.positions = {writer: cursor.at(writer) for writer in writers | {name for name, _, _ in cursor.positions}}
        self.dry: set[str] = set()
        """Writers whose next shard is not there."""
        self._missed: set[str] = set()
        """Writers that ended beyond their next shard; looked for once more."""
        self._empty: list[str] = []

    @property
    def cursor(self) -> Cursor:
        """Behind everything that was taken."""
        cursor = self._origin
        for writer, (index, row) in self.positions.items():
            if (index, row) != cursor.at(writer):
                cursor = cursor.moved(writer, index, row)
        return cursor

    def head(self, *, ends: bool) -> Head | None:
        """The oldest shard that is there. Looks for new writers, and for ends if asked, only when there is none."""
        while True:
            for index, writer in sorted((index, name) for name, (index, _) in self.positions.items()):
                if writer in self.dry:
                    continue
                shard_id = ShardId(index, writer)
                if (found := self._reader.load(shard_id)) is None:
                    self.dry.add(writer)
                    continue
                start = self.positions[writer][1]
                if isinstance(found, Loaded) and start >= found.shard.num_rows:
                    self._empty.append(found.shard.name)
                    self.positions[writer] = (index + 1, 0)
                    break
                return Head(shard_id, start, found)
            else:
                again = ends and self._look_for_missed()
                if not (self._look_for_writers(surely=ends) or again):
                    return None

    def passed_empty(self) -> list[str]:
        """Shards without rows that were passed since this was last asked: their writers may have noted why."""
        passed, self._empty = self._empty, []
        return passed

    def move(self, head: Head, row: int | None = None) -> None:
        """Go on at `row` of the head, or behind its shard."""
        shard = head.shard_id
        at_end = row is None or (isinstance(head.found, Loaded) and row >= head.found.shard.num_rows)
        self.positions[shard.writer] = (shard.index + 1, 0) if at_end or row is None else (shard.index, row)

    def has_ended(self) -> bool:
        """Whether every known writer is known to have ended, and nothing of them is left."""
        return bool(self.positions) and all(
            (end := self._reader.known_end(writer)) is not None and index >= end
            for writer, (index, _) in self.positions.items()
        )

    def _look_for_writers(self, *, surely: bool) -> bool:
        all_ended = surely and all(self._reader.known_end(writer) is not None for writer in self.positions)
        new = self._reader.look_for_writers(now=all_ended) - self.positions.keys()
        self.positions.update((writer, (0, 0)) for writer in new)
        return bool(new)

    def _look_for_missed(self) -> bool:
        """Look for ends; a writer that ended beyond its next shard wrote that since we looked, or it is lost."""
        again: set[str] = set()
        for writer in self.dry:
            index = self.positions[writer][0]
            end = self._reader.end_of(writer, index)
            if end is None or index >= end:
                continue
            if writer in self._missed:
                raise self._reader.lost(ShardId(index, writer), end)
            again.add(writer)
        self._missed |= again
        self.dry -= again
        return bool(again)


class ExperienceReader:
    """Reads one buffer. Holds no position: the cursor is the caller's. One thread at a time.

    Example:
        >>> reader = ExperienceReader(store, "main")                # doctest: +SKIP
        >>> walk = reader.walk(Cursor.start())                      # doctest: +SKIP
        >>> head = walk.head(ends=False)                            # doctest: +SKIP
    """

    def __init__(
        self,
        store: Storage,
        buffer: str,
        *,
        writers: Sequence[str] | None = None,
        limits: RowLimits = NO_LIMITS,
        max_damaged_shards: int = 0,
        cache_bytes: int = CACHE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store` is the job's folder. writers: the only ones there are; None: whoever writes.

        limits: what a row of another program must keep to. max_damaged_shards: as in `Quarantine`.
        """
        self._store = store
        self._folder = BufferFolder(buffer)
        self._closed = writers is not None
        self._writers = set(writers or ())
        self._limits = limits
        self._quarantine = Quarantine(store, self._folder, max_damaged_shards)
        self._damaged: dict[str, Damage] = {}
        self._ends: dict[str, int] = {}
        self._cache: OrderedDict[str, Loaded] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._clock = clock
        self._registered_at = float("-inf")
        self._listed_at = float("-inf")
        self._listing_s = 0.0

    @property
    def prefix(self) -> str:
        """What the paths of this buffer's shards begin with."""
        return f"{self._folder.path}/"

    def walk(self, cursor: Cursor) -> Walk:
        """Begin at a cursor."""
        if not self._closed and self._clock() - self._registered_at >= RELIST_S:
            self._list_registrations()
        return Walk(self, cursor, self._writers)

    def read(self, ref: BatchRef) -> list[Experience]:
        """The rows of a batch, in its order; the caller may change them.

        Two groups of one name that two writers gave are told apart: the batch in the later one's identity gets the name
        of its shard. Raises DataError if a shard is missing, cannot be read, or is not the one that was claimed.
        """
        rows: list[Experience] = []
        owners: dict[str, str] = {}
        for part in ref.ranges:
            shard = self.claimed(part).shard
            found = shard.rows(part.start, part.stop)
            for start, stop in shard.groups(part.start, part.stop):
                if owners.setdefault(shard.group_id(start), part.shard) != part.shard:
                    stem = part.shard.rsplit("/", 1)[-1].removesuffix(".parquet")
                    for row in found[start - part.start : stop - part.start]:
                        row.eid = dataclasses.replace(row.eid, batch=f"{stem}:{row.eid.batch}")
            rows += found
        return rows

    def notes(self, shard: str) -> Mapping[str, JsonValue]:
        """What the writer of a shard noted of its rows together; nothing of one that cannot be read."""
        loaded = self._fetch(shard)
        return loaded.shard.notes if isinstance(loaded, Loaded) else {}

    def forget(self, ref: BatchRef) -> None:
        """The rows have been read: later batches need no shard that ends with them, nor one before it of its writer."""
        first: dict[str, int] = {}
        for part in ref.ranges:
            if (shard := ShardId.parse(part.shard)) is not None:
                loaded = self._cache.get(part.shard)
                has_ended = loaded is not None and part.stop == loaded.shard.num_rows
                first[shard.writer] = max(first.get(shard.writer, 0), shard.index + has_ended)
        for name in list(self._cache):
            if (shard := ShardId.parse(name)) is not None and shard.index < first.get(shard.writer, 0):
                del self._cache[name]

    def claimed(self, part: RowRange) -> Loaded:
        """The shard of these rows. Raises DataError if it is not there, or is not the one that was claimed."""
        loaded = self._fetch(part.shard)
        if isinstance(loaded, Damage):
            raise DataError(f"{loaded.reason}; rows {part.start} to {part.stop - 1} of it were claimed")
        if loaded is None:
            shard = ShardId.parse(part.shard)
            if shard is not None and shard.index < first_kept(self._store, self._folder).get(shard.writer, 0):
                raise RemovedShard(
                    f"{self._store.where(part.shard)} was removed, as remove_consumed_shards allows: every checkpoint "
                    "that is kept lies behind it"
                )
            raise DataError(
                f"{self._store.where(part.shard)} is missing; rows {part.start} to {part.stop - 1} are lost"
            )
        if part.sha256 not in (None, loaded.sha256) or not 0 <= part.start < part.stop <= loaded.shard.num_rows:
            raise DataError(
                f"{self._store.where(part.shard)} has {loaded.shard.num_rows} rows and sha256 {loaded.sha256}, but "
                f"rows {part.start} to {part.stop - 1} of sha256 {part.sha256} were claimed: the object was "
                "replaced. Restore it from a copy"
            )
        return loaded

    def load(self, shard: ShardId) -> Loaded | Damage | None:
        """A shard, from the cache or the store; None if there is none.

        Raises DataError if it cannot be read and the quarantine takes no more.
        """
        return self._fetch(self._folder.shard(shard))

    def _fetch(self, name: str) -> Loaded | Damage | None:
        if loaded := self._cache.get(name):
            self._cache.move_to_end(name)
            return loaded
        if damage := self._damaged.get(name):
            return damage
        for attempt in range(1, READS_OF_DAMAGED + 1):
            try:
                data = self._store.read_bytes(name)
            except FileNotFoundError:
                return None
            digest = hashlib.sha256(data).hexdigest()
            try:
                return self._keep(Loaded(decode(data, name, self._store.where(name), self._limits), digest))
            except DataError as error:
                if attempt == READS_OF_DAMAGED:
                    self._damaged[name] = self._quarantine.add(name, len(data), digest, error)
        return self._damaged[name]

    def _keep(self, loaded: Loaded) -> Loaded:
        self._cache[loaded.shard.name] = loaded
        size = sum(kept.shard.num_bytes for kept in self._cache.values())
        while size > self._cache_bytes and len(self._cache) > 1:
            size -= self._cache.popitem(last=False)[1].shard.num_bytes
        return loaded

    def look_for_writers(self, *, now: bool) -> set[str]:
        """All writers that are known, after a look for more if that is due, or now."""
        if self._closed:
            return set()
        wait_s = self._listing_s / LISTING_SHARE if self._listing_s > FREE_LISTING_S else 0.0
        if now or self._clock() - self._listed_at >= wait_s:
            self._list_all()
        self._list_registrations()
        return self._writers

    def _list_registrations(self) -> None:
        names = (info.name.rsplit("/", 1)[-1] for info in self._store.list(self._folder.writers))
        self._writers.update(name.removesuffix(".json") for name in names if name.endswith(".json"))
        self._registered_at = self._clock()

    def _list_all(self) -> None:
        started = self._clock()
        for info in self._store.list(self._folder.path):
            if shard := ShardId.parse(info.name):
                self._writers.add(shard.writer)
            elif info.name.endswith(END):
                self._writers.add(info.name.rsplit("/", 1)[-1].removesuffix(END))
        self._listed_at = self._clock()
        self._listing_s = self._listed_at - started

    def end_of(self, writer: str, index: int) -> int | None:
        """How many shards a writer ended with; None if it has not. Asks the store unless that is known, and enough."""
        if self._ends.get(writer, -1) < index:  # not known, or taken back since
            self._ends.pop(writer, None)
            name = self._folder.end(writer)
            try:
                marker = self._store.read_json(name)
            except FileNotFoundError:
                return None
            shards = marker.get("shards") if isinstance(marker, dict) else None
            if not isinstance(shards, int):
                raise DataError(f"{self._store.where(name)} holds {marker!r}, it must be {{'shards': number}}")
            self._ends[writer] = shards
        return self._ends[writer]

    def known_end(self, writer: str) -> int | None:
        """As `end_of`, of what was seen before."""
        return self._ends.get(writer)

    def lost(self, shard: ShardId, end: int) -> DataError:
        """The error for a shard whose writer has ended behind it."""
        return DataError(
            f"{self._store.where(self._folder.shard(shard))} is missing, its writer ended after {end} shards: rows are "
            "lost. Restore it from a copy"
        )

    def signs_of_life(self, cursor: Cursor) -> tuple[str, ...]:
        """One phrase for each known writer: what it is expected to write next, and whether it seems to be alive."""
        phrases: list[str] = []
        for writer in sorted(self._writers | {name for name, _, _ in cursor.positions}):
            if (end := self.known_end(writer)) is not None:
                phrases.append(f"{writer} (ended after {end} shards)")
                continue
            registration = read_registration(self._store, self._folder, writer)
            trouble = registration and registration.trouble(time.time())
            next_shard = f"shard {cursor.at(writer)[0]} is next"
            phrases.append(f"{writer} ({next_shard}; {trouble})" if trouble else f"{writer} ({next_shard})")
        return tuple(phrases)
