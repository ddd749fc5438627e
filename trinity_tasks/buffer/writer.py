"""`ExperienceWriter` appends shards to a buffer: each is one atomic object, and a bad row stores nothing.

Owns: the door: what may be written, and under which name. Does not own: the bytes of a shard (`encoding.py`), the
checks of a row (`row_checks.py`), signs of life (`producers.py`).
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

from pydantic import JsonValue

from engines.errors import DataError
from engines.experience import Experience
from trinity_tasks.buffer.encoding import encode
from trinity_tasks.buffer.layout import BufferFolder, ShardId, check_name
from trinity_tasks.buffer.producers import Heartbeat
from trinity_tasks.buffer.row_checks import NO_LIMITS, RowLimits, check_groups, validate
from trinity_tasks.buffer.schema import MAX_SHARD_ROWS
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
        >>> with ExperienceWriter("memory://runs/project/rft", writer="agent-7") as writer:
        ...     writer.write([Experience(tokens=[5, 6, 7], prompt_length=1, reward=1.0, eid=EID(batch=0, task=0))]).rows
        1
    """

    next_index: int
    """Index of the next shard: the number of shards that this writer has written, in all its lives."""
    ended: bool
    """Whether `end` was called, in this life or an earlier one."""

    def __init__(
        self,
        job: Storage | str,
        buffer: str = "main",
        writer: str | None = None,
        limits: RowLimits | None = None,
        *,
        storage_options: dict[str, Any] | None = None,
        durable: bool = True,
        register: bool = True,
    ) -> None:
        """`job` is the job's folder, or its URL. A producer may begin before the trainer does.

        writer: to go on where an earlier process of this name ended; None: a new name of this process. register: tell
        readers who this is and that it lives. durable: as in `Storage.create`. storage_options: as fsspec takes them.
        Raises ConfigError for a bad name, DataError if a shard of this writer was lost, StorageError.
        """
        # The name is this process's alone, so looking first is enough on a store without create-only writes.
        self._store = job if isinstance(job, Storage) else Storage(job, storage_options, single_writer=True)
        self._folder = BufferFolder(buffer)
        self.name = _new_name() if writer is None else writer
        check_name("writer", self.name)
        self._limits = limits or NO_LIMITS
        self._durable = durable
        names = [info.name for info in self._store.list(self._folder.path)]
        found = [shard for name in names if (shard := ShardId.parse(name)) and shard.writer == self.name]
        indices = sorted(shard.index for shard in found)
        for index, following in pairwise(indices):
            if following != index + 1:
                raise self._lost(index + 1)
        self.next_index = indices[-1] + 1 if indices else 0
        self.ended = self._folder.end(self.name) in names
        self._heartbeat = Heartbeat(self._store, self._folder, self.name) if register else None

    def _shard(self, index: int) -> str:
        return self._folder.shard(ShardId(index, self.name))

    def _lost(self, index: int) -> DataError:
        return DataError(
            f"{self._store.where(self._shard(index))} is missing, yet a later shard of the writer is to follow or "
            "exists; readers would wait for it for ever. Restore it from a copy, or use another writer name"
        )

    def write(
        self,
        experiences: Sequence[Experience],
        *,
        index: int | None = None,
        notes: Mapping[str, JsonValue] | None = None,
    ) -> ShardRecord:
        """Store the rows as one new shard, all or nothing. No rows make an empty shard.

        index: write this shard, not the next one. notes: facts about the rows together, which the shard keeps.
        Raises DataError for a bad row (nothing is stored), FileExistsError if the shard exists: written in an earlier
        life, it is kept and counted. StorageError.
        """
        if self.ended:
            raise DataError(
                f"writer {self.name} of {self._store.where(self._folder.path)} has ended, readers may be done with it; "
                "call reopen() first, or use another writer name"
            )
        if len(experiences) > MAX_SHARD_ROWS:
            raise DataError(
                f"{len(experiences)} rows in one write; a shard has at most {MAX_SHARD_ROWS}: write them in parts"
            )
        index = self.next_index if index is None else index
        if index > self.next_index and not self.has_shard(index - 1):
            raise self._lost(index - 1)
        try:
            validate(experiences, self._limits)
            check_groups(experiences)
            data = encode(experiences, notes)
        except DataError as error:
            raise DataError(f"{error}. Nothing of this write was stored; correct the row or drop it") from error
        try:
            self._store.create(self._shard(index), data, durable=self._durable)
        except FileExistsError:
            self.next_index = max(self.next_index, index + 1)
            raise
        self.next_index = max(self.next_index, index + 1)
        return ShardRecord(self._shard(index), len(experiences), len(data), hashlib.sha256(data).hexdigest())

    def has_shard(self, index: int) -> bool:
        """Whether the shard has been written, by whatever process."""
        return self._store.exists(self._shard(index))

    def end(self) -> None:
        """Tell readers that no more will come. Idempotent.

        Raises DataError if another process ended this writer at another number of shards.
        """
        name = self._folder.end(self.name)
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
        self.close()

    def reopen(self) -> None:
        """Take `end` back, so that more can be written. A reader that has seen the end may have stopped already."""
        self._store.remove(self._folder.end(self.name))
        self.ended = False

    def close(self) -> None:
        """Stop saying that this writer lives. Idempotent; `end` does it too."""
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _new_name() -> str:
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()).lstrip("_.-")
    return f"{host or 'writer'}-{os.getpid()}-{secrets.token_hex(3)}"
