"""`export`: the wanted rows of a buffer as one file, Parquet or JSON lines, on any store. Whole or absent.

Owns: the form of a JSON line, publication. Does not own: which rows (`scan.py`), the bytes of a shard (`shards.py`).
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from engines.errors import ConfigError, DataError
from engines.experience import Experience
from trinity_tasks.browse.columns import Place
from trinity_tasks.browse.scan import Scan, WantedRows
from trinity_tasks.buffer.encoding import write_shard
from trinity_tasks.buffer.schema import SCHEMA
from trinity_tasks.buffer.shards import decode
from trinity_tasks.local_files import TMP_PREFIX
from trinity_tasks.storage import Storage

PARQUET, JSONL = ".parquet", ".jsonl"
PART_BYTES: Final = 16 * 2**20
"""Rows of several shards are put together until they have so many bytes: many small row groups are slow to read."""


class NewFile:
    """A file, or an object by its URL, that is not there yet."""

    def __init__(self, target: str) -> None:
        """Raises ConfigError if the name is none of a file, or if something is there: nothing is overwritten."""
        folder, _, self.name = target.replace("file://", "", 1).rpartition("/")
        if not self.name or folder.endswith(":/"):
            raise ConfigError(f"{target} names no file")
        self._store = Storage(folder or ("/" if target.startswith("/") else "."))
        self.url = self._store.where(self.name)
        self.require_absent()

    def require_absent(self) -> None:
        """Raises ConfigError if something is there."""
        if self._store.exists(self.name) or ((local := self._store.local_path(self.name)) and local.is_dir()):
            raise ConfigError(f"{self.url} exists, and nothing is overwritten; give another name, or remove it")

    def write(self, data: bytes) -> None:
        """Make it of these bytes. Raises FileExistsError if another process was faster, StorageError."""
        self._store.create(self.name, data)

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        """A local folder for making it, beside it if that is a folder of this machine: publishing is a rename then."""
        parent = self._store.local_path()
        return tempfile.TemporaryDirectory(prefix=TMP_PREFIX, dir=parent if parent and parent.is_dir() else None)

    def publish(self, local: Path) -> None:
        """Make it of a local file, which may be consumed. Raises as `require_absent` does, StorageError."""
        self.require_absent()
        self._store.put_file(local, self.name, move=True)


def export_file(target: str) -> NewFile:
    """A file that `export` can make. Raises ConfigError as `NewFile`, and for another suffix."""
    file = NewFile(target)
    if not file.name.endswith((PARQUET, JSONL)):
        raise ConfigError(f"{file.url}: an export is {PARQUET} or {JSONL}; give a name that ends so")
    return file


def export(scan: Scan, file: NewFile) -> int:
    """Copy the wanted rows of all readable shards, and return their number; `scan.damaged` names the other shards.

    .parquet: a shard, as `decode` reads it. .jsonl: an object for each row, its arrays as lists.
    Raises DataError (a number that JSON has not), StorageError, ConfigError (it exists now); then nothing is made.
    """
    with file.scratch() as folder:
        local = Path(folder) / file.name
        num_rows = write_shard(local, _parts(scan)) if file.name.endswith(PARQUET) else _write_lines(local, scan)
        file.publish(local)
    return num_rows


def _parts(scan: Iterable[WantedRows]) -> Iterator[Any]:
    """Tables of all columns, not too small."""
    waiting: list[Any] = []
    for shard in scan:
        waiting.append(shard.table(SCHEMA.names))
        if sum(table.nbytes for table in waiting) >= PART_BYTES:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _write_lines(local: Path, scan: Iterable[WantedRows]) -> int:
    num_rows = 0
    with open(local, "w", encoding="utf-8") as lines:
        for shard in scan:
            rows = decode(shard.data, shard.place.name, shard.where)
            for number in shard.rows.tolist():
                (row,) = rows.rows(number, number + 1)
                lines.write(_line(row, shard.place, number) + "\n")
                num_rows += 1
    return num_rows


def _line(row: Experience, place: Place, number: int) -> str:
    """Where the row lies, its identity, and every field of an experience."""
    fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(Experience)}
    fields["eid"] = dataclasses.asdict(row.eid)
    line = {"uid": row.eid.uid, "writer": place.writer, "shard": place.index, "row": number, **fields}
    try:
        return json.dumps(line, allow_nan=False, ensure_ascii=False, default=np.ndarray.tolist)
    except ValueError as error:
        raise DataError(
            f"{place.name}, row {number}, experience {row.eid.uid}: it holds NaN or infinity, which JSON has not; "
            f"export to {PARQUET}"
        ) from error
