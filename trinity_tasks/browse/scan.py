"""`Scan`: the wanted rows of a buffer, shard by shard, and the shards that could not be read.

Owns: which shards a buffer has, filtering. At any time one shard is in memory. Does not own: what is made of the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from engines.config import Frozen
from engines.errors import ConfigError, DataError
from engines.plugins import hint
from trinity_tasks.browse.columns import Place, frame_of, keys_of, sources_of
from trinity_tasks.browse.names import flattened_field, unknown
from trinity_tasks.browse.where import Where
from trinity_tasks.buffer.layout import BufferFolder, ShardId
from trinity_tasks.buffer.removal import first_kept
from trinity_tasks.buffer.shards import read_columns
from trinity_tasks.storage import Storage

FOLDER = "experiences"


class DamagedShard(Frozen):
    """A shard whose rows are in no number that is shown."""

    name: str
    """Path below the job's folder."""
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class WantedRows:
    """One shard, and which of its rows are wanted."""

    place: Place
    data: bytes
    where: str
    """URL, for messages."""
    rows: npt.NDArray[np.int64]
    """Ascending."""

    def table(self, columns: Sequence[str]) -> Any:
        """Chosen columns of the wanted rows, as an Arrow table."""
        return read_columns(self.data, columns, self.place.name, self.where).take(self.rows)

    def frame(self, names: Collection[str]) -> Any:
        """Chosen scalar columns of the wanted rows, as a pandas frame; its index counts the rows of the shard."""
        whole = read_columns(self.data, sources_of(names), self.place.name, self.where)
        return frame_of(whole, names, self.place).loc[self.rows]


class Scan:
    """The rows of one buffer that meet a condition. Iterate it as often as needed: it is of the shards found at first.

    Example:
        >>> scan = Scan(Storage("runs/demo/rft"), "main", Where.parse("reward > 0.5"))      # doctest: +SKIP
        >>> sum(len(shard.rows) for shard in scan)                                          # doctest: +SKIP
        96
    """

    def __init__(self, store: Storage, buffer: str, where: Where | None = None) -> None:
        """`store` is the job's folder. Raises ConfigError if the job has no such buffer, but has others."""
        self.buffer = buffer
        self.where = where
        self.damaged: dict[str, DamagedShard] = {}
        """By name: shards that are missing, or that an iteration found damaged."""
        BufferFolder(buffer)
        self.store = store
        found = _buffers(store)
        self.buffers = tuple(sorted(found))
        """Every buffer of the job that has shards."""
        self.places = found.get(buffer, [])
        """Shards by index, then by writer: about the order in which they train."""
        if not self.places and found:
            raise ConfigError(f"{store.url}: buffer {buffer!r} has no shards; {hint(buffer, found, 'those that have')}")
        self._note_missing()

    def __iter__(self) -> Iterator[WantedRows]:
        """Every readable shard with its wanted rows, also where these are none.

        Raises ConfigError at the end if the condition names a key of info or metrics that no row has.
        """
        seen: set[str] = set()
        num_read = 0
        for place in self.places:
            try:
                found = self.read(place, seen)
            except (DataError, FileNotFoundError) as error:
                self.damaged[place.name] = DamagedShard(name=place.name, reason=str(error))
            else:
                num_read += 1
                yield found
        if num_read:
            self._check_keys(seen)

    def read(self, place: Place, seen: set[str] | None = None) -> WantedRows:
        """One shard with its wanted rows. seen: gets the keys of info and metrics that the condition could name.

        Raises DataError if it is damaged, FileNotFoundError if it is gone.
        """
        data, url = self.store.read_bytes(place.name), self.store.where(place.name)
        names = self.where.columns if self.where else frozenset[str]()
        table = read_columns(data, sources_of(names), place.name, url)
        if self.where is None:
            return WantedRows(place, data, url, np.arange(cast("int", table.num_rows)))
        if seen is not None:
            seen |= keys_of(table, names)
        return WantedRows(place, data, url, self.where.rows(frame_of(table, names, place), url))

    def _check_keys(self, seen: set[str]) -> None:
        for name in sorted(self.where.columns if self.where else ()):
            if flattened_field(name) and name not in seen:
                raise ConfigError(f"--where {self.where and self.where.text!r}: {unknown(name, seen)}")

    def _note_missing(self) -> None:
        last = {writer: index - 1 for writer, index in first_kept(self.store, BufferFolder(self.buffer)).items()}
        for place in self.places:  # by index
            for index in range(last.get(place.writer, -1) + 1, place.index):
                name = BufferFolder(self.buffer).shard(ShardId(index, place.writer))
                reason = f"{self.store.where(name)} is missing, its writer has written later ones"
                self.damaged[name] = DamagedShard(name=name, reason=reason)
            last[place.writer] = place.index


def _buffers(store: Storage) -> dict[str, list[Place]]:
    """Buffer -> its shards, by index and writer."""
    found: dict[str, list[Place]] = {}
    for info in store.list(FOLDER, recursive=True):
        folder, buffer, *rest = info.name.split("/")
        if len(rest) == 1 and (shard := ShardId.parse(rest[0])):
            place = Place(f"{folder}/{buffer}/{rest[0]}", shard.writer, shard.index)
            found.setdefault(buffer, []).append(place)
    return {buffer: sorted(places, key=lambda place: (place.index, place.writer)) for buffer, places in found.items()}
