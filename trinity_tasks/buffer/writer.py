"""`ExperienceWriter` appends shards to a buffer: each is one atomic object, and a bad row stores nothing.

Owns: the door: what may be written, and under which name. Does not own: the bytes of a shard (`shards.py`), the checks
of a row (`row_checks.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import JsonValue

from engines.errors import DataError
from engines.experience import Experience
from trinity_tasks.buffer.layout import END, SHARD, end_name, folder_of, shard_name
from trinity_tasks.buffer.row_checks import NO_LIMITS, RowLimits, refused, validate
from trinity_tasks.buffer.shards import encode
from trinity_tasks.storage import Storage


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
        self._folder = folder_of(buffer, writer)
        self._writer = writer
        self._limits = limits or NO_LIMITS
        self._durable = durable
        names = [info.name.rsplit("/", 1)[-1] for info in store.list(self._folder)]
        matches = [match for name in names if (match := SHARD.fullmatch(name)) and match["writer"] == writer]
        indices = sorted(int(match["index"]) for match in matches)
        for index, following in pairwise(indices):
            if following != index + 1:
                raise self._lost(index + 1)
        self.next_index = indices[-1] + 1 if indices else 0
        self.ended = f"{writer}{END}" in names

    def _lost(self, index: int) -> DataError:
        return DataError(
            f"{self._store.where(shard_name(self._folder, self._writer, index))} is missing, yet a later shard of the "
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
        name = shard_name(self._folder, self._writer, index)
        self._store.create(name, data, durable=self._durable)
        self.next_index = max(self.next_index, index + 1)
        return ShardRecord(name, len(experiences), len(data), hashlib.sha256(data).hexdigest())

    def has_shard(self, index: int) -> bool:
        """Whether the shard has been written, by whatever process."""
        return self._store.exists(shard_name(self._folder, self._writer, index))

    def end(self) -> None:
        """Tell readers that no more will come. Idempotent.

        Raises DataError if another process ended this writer at another number of shards.
        """
        name = end_name(self._folder, self._writer)
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
        self._store.remove(end_name(self._folder, self._writer))
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
