"""Experiences as the bytes of a shard, bit for bit.

Owns: `encode`. Does not own: which rows are good (`row_checks.py`), the columns (`schema.py`), reading (`shards.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue

from engines.errors import DataError
from engines.experience import Experience
from trinity_tasks.buffer.row_checks import DTYPES, MESSAGES, refused
from trinity_tasks.buffer.schema import (
    CHECKSUM_KEY,
    CHECKSUM_MARK,
    DICTS,
    MAX_WRITTEN_BYTES,
    NOTES_KEY,
    ROW_GROUP_ROWS,
    SCHEMA,
    SCHEMA_VERSION,
    TAIL_BYTES,
    VERSION_KEY,
    footer_bytes,
    to_text,
)

_READ_BYTES: Final = 2**20
_WRITE_OPTIONS: Final[dict[str, Any]] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": ["eid_batch", "eid_task", "experience_type", "prompt_text"],
    "use_byte_stream_split": ["logprobs.list.element"],
    "write_statistics": ["eid_batch", "reward", "model_version"],
    "write_page_checksum": True,
    "store_schema": False,
    "write_batch_size": 65_536,  # of 1,024, the default, levels of list columns take a tenth longer
}


def encode(rows: Sequence[Experience], notes: Mapping[str, JsonValue] | None = None) -> bytes:
    """The Parquet shard of these rows, which `validate` has accepted. Zero rows make a valid shard.

    notes: facts about the rows together, kept in the file's metadata.

    A column in which no row has a value is left out: each costs as much as one with values, to write and to read.

    Raises DataError if info, metrics, messages, tools or a text cannot be written as JSON or UTF-8, or if the rows are
    larger than a shard may be.
    """
    columns: list[Any] = []
    fields: list[Any] = []
    for field in SCHEMA:
        values = _column_values(field.name, rows)
        if not field.nullable or any(value is not None for value in values):
            columns.append(_encode_column(field, values, rows))
            fields.append(field)
    schema = pa.schema(fields)
    table = pa.Table.from_arrays(columns, schema=schema)
    if table.nbytes > MAX_WRITTEN_BYTES:
        raise DataError(f"{len(rows)} rows have {table.nbytes} bytes, one write at most {MAX_WRITTEN_BYTES}: split it")
    sink = pa.BufferOutputStream()
    _write_parquet(sink, schema, [table], notes)
    data = memoryview(sink.getvalue())
    split = len(data) - TAIL_BYTES - footer_bytes(data)
    checksum = zlib.crc32(data)
    return b"".join((data[:split], CHECKSUM_MARK, checksum.to_bytes(4, "little"), data[split:]))


def write_shard(path: Path, tables: Iterable[Any]) -> int:
    """Write Arrow tables of `SCHEMA` to a local file as one shard, never more than one of them in memory.

    Returns the number of rows. What is there of the file after an error is no shard.
    """
    with open(path, "w+b") as file:
        num_rows = _write_parquet(file, SCHEMA, tables)
        file.seek(-TAIL_BYTES, 2)
        split = file.tell() - footer_bytes(file.read())
        file.seek(split)
        footer = file.read()
        file.seek(0)
        checksum = zlib.crc32(footer, _crc32_of(file, split))
        file.write(b"".join((CHECKSUM_MARK, checksum.to_bytes(4, "little"), footer)))
    return num_rows


def _write_parquet(sink: Any, schema: Any, tables: Iterable[Any], notes: Mapping[str, JsonValue] | None = None) -> int:
    num_rows = 0
    with pq.ParquetWriter(sink, schema, **_WRITE_OPTIONS) as writer:
        metadata = {VERSION_KEY: str(SCHEMA_VERSION), CHECKSUM_KEY: "crc32"}
        writer.add_key_value_metadata(metadata | ({NOTES_KEY: to_text(notes)} if notes else {}))
        for table in tables:
            writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
            num_rows += table.num_rows
    return num_rows


def _crc32_of(file: BinaryIO, size: int) -> int:
    """Of the next `size` bytes of a file."""
    checksum = 0
    for start in range(0, size, _READ_BYTES):
        checksum = zlib.crc32(file.read(min(_READ_BYTES, size - start)), checksum)
    return checksum


def _column_values(name: str, rows: Sequence[Experience]) -> list[Any]:
    if (values := _SCALAR_VALUES.get(name)) is not None:
        return values(rows)
    return list(map(attrgetter(name), rows))


def _encode_column(field: Any, values: list[Any], rows: Sequence[Experience]) -> Any:
    name = str(field.name)
    if name in DTYPES:
        return _encode_lists(field.type, DTYPES[name], values)
    if name in DICTS or name in MESSAGES:
        values = _to_json(name, values, rows)
    try:
        return pa.array(values, field.type)
    except UnicodeEncodeError as error:
        index = next(i for i, value in enumerate(values) if isinstance(value, str) and not _is_utf8(value))
        raise refused(rows, index, f"{name} cannot be written as UTF-8 ({error.reason})") from error


def _without_version(row: Experience) -> dict[str, Any]:
    """`info` without what the column model_version holds."""
    if _version_or_none(row) is None:
        return row.info
    return {key: value for key, value in row.info.items() if key != "model_version"} if len(row.info) > 1 else {}


def _version_or_none(row: Experience) -> int | None:
    version = row.info.get("model_version")
    if isinstance(version, bool) or not isinstance(version, int | np.integer):
        return None
    number = int(cast("Any", version))
    return number if abs(number) < 2**63 else None


_SCALAR_VALUES: Final[dict[str, Callable[[Sequence[Experience]], list[Any]]]] = {
    "eid_batch": lambda rows: [str(row.eid.batch) for row in rows],
    "eid_batch_is_int": lambda rows: [not isinstance(row.eid.batch, str) for row in rows],
    "eid_task": lambda rows: [str(row.eid.task) for row in rows],
    "eid_task_is_int": lambda rows: [not isinstance(row.eid.task, str) for row in rows],
    "eid_run": lambda rows: [row.eid.run for row in rows],
    "eid_step": lambda rows: [row.eid.step for row in rows],
    "eid_suffix": lambda rows: [row.eid.suffix for row in rows],
    "reward": lambda rows: [None if row.reward is None else float(row.reward) for row in rows],
    "model_version": lambda rows: [_version_or_none(row) for row in rows],
    "info": lambda rows: [_without_version(row) or None for row in rows],
    "metrics": lambda rows: [row.metrics or None for row in rows],
}


def _encode_lists(kind: Any, dtype: npt.DTypeLike, values: list[npt.NDArray[Any] | None]) -> Any:
    present = [value for value in values if value is not None]
    if not present:
        return pa.array([], kind)
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([0 if value is None else len(value) for value in values], out=offsets[1:])
    absent = None if len(present) == len(values) else pa.array([value is None for value in values])
    flat = np.concatenate(present, dtype=dtype, casting="equiv")
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=kind, mask=absent)


def _to_json(name: str, values: list[Any], rows: Sequence[Experience]) -> list[str | None]:
    texts: list[str | None] = []
    for index, value in enumerate(values):
        try:
            texts.append(None if value is None else to_text(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise refused(rows, index, f"{name} cannot be written as JSON ({error})") from error
    return texts


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
