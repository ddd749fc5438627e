"""Records of data files, one at a time: JSON lines, Parquet, Arrow. Memory is bounded by a line or a slice of rows.

Owns: reading and the name of each record's place. Does not own: which files there are (`files.py`), what a record means
(`formats.py`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from engines.errors import DataError
from engines.experience import Experience
from trinity_tasks.offline.files import DataFiles, Kind

MAX_LINE_BYTES: Final = 64 * 2**20
"""Longest line that is taken for a record; a file without line ends must not fill the memory."""
SLICE_ROWS: Final = 256
"""Rows of a column file that are turned into records at once."""


class Record(NamedTuple):
    """One record and its place."""

    where: str
    """chats.jsonl line 12, or part-0.parquet row 7 (from 0)."""
    content: Mapping[str, Any]


class Unit(NamedTuple):
    """Source rows that must lie in one shard: one record, or one group of experiences."""

    size: int
    """Source rows."""
    load: Callable[[], list[Experience]]
    """Makes the rows that are left of them. Not called for those of a shard that exists."""


def read_records(files: DataFiles) -> Iterator[Record]:
    """Every record of the files, in order. Raises DataError that names file and line or row, StorageError."""
    for file in files.listed:
        kind = files.kind(file)
        if kind == "sqlite":
            raise DataError(f"{file.name} is a database, and format: {files.format} expects files of records")
        yield from _READERS[kind](files.local(file), file.name)


def read_lines(path: Path, name: str) -> Iterator[Record]:
    """Records of a JSONL file; empty lines are skipped. Raises DataError that names the line."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{name} line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{where} is longer than {MAX_LINE_BYTES} bytes; give each record a line of its own")
            if line.strip():
                yield Record(where, parse_line(line, where))


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line. Raises DataError that names it."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}; give each record a line of its own, in UTF-8") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} is a JSON {type(value).__name__}, not an object; give each record a line of its own")
    return cast("dict[str, Any]", value)


def _read_parquet(path: Path, name: str) -> Iterator[Record]:
    with _damage_told(name), pq.ParquetFile(path, page_checksum_verification=True) as file:
        yield from _of_batches(file.iter_batches(batch_size=SLICE_ROWS, use_threads=False), name)


def _read_arrow(path: Path, name: str) -> Iterator[Record]:
    """The streams that `datasets` saves, and files of the random-access format."""
    with _damage_told(name), pa.memory_map(str(path)) as file:
        if path.stat().st_size >= 6 and file.read(6) == b"ARROW1":
            opened = ipc.open_file(file)
            batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
        else:
            file.seek(0)
            batches = ipc.open_stream(file)
        yield from _of_batches(batches, name)


@contextlib.contextmanager
def _damage_told(name: str) -> Generator[None]:
    """Turn what pyarrow raises for a damaged file into a DataError that names it."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name} cannot be read: {error}; it is cut or damaged, copy it again") from error


def _of_batches(batches: Any, name: str) -> Iterator[Record]:
    row = 0
    for batch in batches:
        for start in range(0, batch.num_rows, SLICE_ROWS):
            for content in batch.slice(start, SLICE_ROWS).to_pylist():
                yield Record(f"{name} row {row}", {key: _without_nulls(value) for key, value in content.items()})
                row += 1


def _without_nulls(value: Any) -> Any:
    """Column files give every message all keys that any has: a null within a structure stands for an absent key."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return {key: _without_nulls(item) for key, item in pairs if item is not None}
    return value


_READERS: Final[Mapping[Kind, Callable[[Path, str], Iterator[Record]]]] = {
    "jsonl": read_lines,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
