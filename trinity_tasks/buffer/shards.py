"""Experience shards: one Parquet object holds the rows of one write. Its columns, encoding and decoding.

Owns: the schema and its version, bit-exact conversion of `Experience` to bytes and back, the checksum of a shard.
Does not own: which rows are good (`row_checks.py`), names of objects (`layout.py`), readers (`reader.py`).

A shard is plain Parquet (zstd, page checksums), readable by pandas, pyarrow, DuckDB and `datasets`. Parquet's checksums
leave its footer uncovered, so eight bytes stand between the last page and the footer, where every reader skips them:
b"TFC1" and the CRC-32 of all other bytes. A shard of another program may lack them; then its rows are checked one by
one when it is opened.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from operator import attrgetter
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from engines.errors import DataError
from engines.experience import EID, Experience
from trinity_tasks.buffer.row_checks import DTYPES, EXPERIENCE_TYPES, PER_TOKEN, TRUNCATE_STATUSES, refused

SCHEMA_VERSION: Final = 1
ROW_GROUP_ROWS: Final = 256

_VERSION_KEY: Final = "trinity_flows.schema"
_CHECKSUM_KEY: Final = "trinity_flows.checksum"
_CHECKSUM_MARK: Final = b"TFC1"
_PARQUET_MAGIC: Final = b"PAR1"
_TAIL_BYTES: Final = 8
"""Length of the footer (4) and the Parquet magic (4)."""

_TEXT: Final = ("prompt_text", "response_text")
_DICTS: Final = ("info", "metrics")
"""JSON, null when empty."""
_MESSAGES: Final = ("messages", "tools", "chosen_messages", "rejected_messages")
"""JSON, null when absent."""


def _column(name: str, kind: Any, *, nullable: bool = False) -> Any:
    return pa.field(name, kind, nullable=nullable)


def _list_of(dtype: np.dtype[Any]) -> Any:
    return pa.list_(pa.field("element", pa.from_numpy_dtype(dtype)))


SCHEMA: Final[Any] = pa.schema(
    [
        _column("eid_batch", pa.string()),
        _column("eid_batch_is_int", pa.bool_()),
        _column("eid_task", pa.string()),
        _column("eid_task_is_int", pa.bool_()),
        _column("eid_run", pa.int64()),
        _column("eid_step", pa.int64()),
        _column("eid_suffix", pa.string()),
        _column("experience_type", pa.string()),
        _column("truncate_status", pa.string(), nullable=True),
        _column("prompt_length", pa.int32()),
        _column("reward", pa.float64(), nullable=True),
        _column("model_version", pa.int64(), nullable=True),
        *(_column(name, _list_of(dtype), nullable=name != "tokens") for name, dtype in DTYPES.items()),
        *(_column(name, pa.string(), nullable=True) for name in (*_DICTS, *_TEXT, *_MESSAGES)),
    ]
)
"""Columns of a shard. `model_version` is `info["model_version"]`, taken out of that JSON so that readers can filter."""

_NAMES: Final = cast("list[str]", SCHEMA.names)

_WRITE_OPTIONS: Final[dict[str, Any]] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": ["eid_batch", "eid_task", "experience_type", "prompt_text"],
    "use_byte_stream_split": ["logprobs.list.element"],
    "write_statistics": ["eid_batch", "reward", "model_version"],
    "write_page_checksum": True,
    "store_schema": False,
}


def encode(rows: Sequence[Experience]) -> bytes:
    """The Parquet shard of these rows, which `validate` has accepted. Zero rows make a valid shard.

    A column in which no row has a value is left out: each costs as much as one with values, to write and to read.

    Raises DataError if info, metrics, messages, tools or a text cannot be written as JSON or UTF-8.
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
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, **_WRITE_OPTIONS) as writer:
        writer.add_key_value_metadata({_VERSION_KEY: str(SCHEMA_VERSION), _CHECKSUM_KEY: "crc32"})
        writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
    data: bytes = sink.getvalue().to_pybytes()
    split = len(data) - _TAIL_BYTES - _footer_bytes(data)
    checksum = zlib.crc32(data[split:], zlib.crc32(data[:split]))
    return b"".join((data[:split], _CHECKSUM_MARK, checksum.to_bytes(4, "little"), data[split:]))


def _footer_bytes(data: bytes) -> int:
    return int.from_bytes(data[-_TAIL_BYTES:-4], "little")


def _column_values(name: str, rows: Sequence[Experience]) -> list[Any]:
    if (values := _SCALAR_VALUES.get(name)) is not None:
        return values(rows)
    return list(map(attrgetter(name), rows))


def _encode_column(field: Any, values: list[Any], rows: Sequence[Experience]) -> Any:
    name = str(field.name)
    if name in DTYPES:
        return _encode_lists(field.type, DTYPES[name], values)
    if name in _DICTS or name in _MESSAGES:
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
    return version if type(version) is int and abs(version) < 2**63 else None


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


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return cast("Any", value).tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


_to_text: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=_plain).encode
_from_text: Final = json.JSONDecoder().decode


def _to_json(name: str, values: list[Any], rows: Sequence[Experience]) -> list[str | None]:
    texts: list[str | None] = []
    for index, value in enumerate(values):
        try:
            texts.append(None if value is None else _to_text(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise refused(rows, index, f"{name} cannot be written as JSON ({error})") from error
    return texts


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class _Lists:
    """One ragged column: row i is flat[offsets[i]:offsets[i + 1]], or None where it is not valid."""

    flat: npt.NDArray[Any]
    offsets: npt.NDArray[np.int32]
    valid: list[bool] | None
    """None: every row has a value."""

    def rows(self, start: int, stop: int) -> list[npt.NDArray[Any] | None]:
        """Writable arrays of their own, so that a consumer may change its rows."""
        bounds: list[int] = self.offsets[start : stop + 1].tolist()
        first = bounds[0]
        flat = self.flat[first : bounds[-1]].copy()
        if self.valid is None:
            return [flat[a - first : b - first] for a, b in pairwise(bounds)]
        valid = self.valid[start:stop]
        return [
            flat[a - first : b - first] if good else None for (a, b), good in zip(pairwise(bounds), valid, strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A decoded shard. Columns stay flat; `rows` makes fresh experiences of any range."""

    name: str
    num_rows: int
    num_bytes: int
    """Of the decoded columns, in memory."""
    group_starts: tuple[int, ...]
    """First row of each group, ascending. Rows of a group are neighbours."""
    _lists: dict[str, _Lists]
    """Columns in which no row has a value are left out, here and below."""
    _scalars: dict[str, list[Any]]

    def rows(self, start: int, stop: int) -> list[Experience]:
        """Rows start to stop - 1, equal to those that were written, bit for bit.

        Raises DataError if a JSON column cannot be read; only a shard of another program can have such.
        """
        size = stop - start
        none: list[Any] = [None] * size
        columns: dict[str, list[Any]] = {name: lists.rows(start, stop) for name, lists in self._lists.items()}
        columns.update({name: values[start:stop] for name, values in self._scalars.items()})
        try:
            for name in (*_DICTS, *_MESSAGES):
                if name in columns:
                    columns[name] = [None if text is None else _from_text(text) for text in columns[name]]
            columns["eid"] = list(_eids(columns))
        except ValueError as error:
            raise DataError(f"{self.name}, rows {start} to {stop - 1}: a column holds a bad value ({error})") from error
        columns["info"] = _infos(columns.get("info", none), columns.get("model_version", none))
        columns["metrics"] = [value or {} for value in columns.get("metrics", none)]
        # The constructor would turn single_turn rows with their mask into multi_turn ones, and is five times slower.
        result: list[Experience] = [Experience.__new__(Experience) for _ in range(size)]
        for name in _FIELDS:
            deque(map(setattr, result, repeat(name), columns.get(name, none)), maxlen=0)
        return result


_FIELDS: Final = (
    *("eid", "prompt_length", "reward", "truncate_status", "experience_type"),
    *DTYPES,
    *_DICTS,
    *_TEXT,
    *_MESSAGES,
)
"""Every field of an experience."""


def _eids(columns: dict[str, list[Any]]) -> list[EID]:
    parts = (
        [int(text) if is_int else text for text, is_int in zip(columns[name], columns[f"{name}_is_int"], strict=True)]
        for name in ("eid_batch", "eid_task")
    )
    return list(map(EID, *parts, columns["eid_run"], columns["eid_step"], columns["eid_suffix"]))


def _infos(infos: list[Any], versions: list[int | None]) -> list[dict[str, Any]]:
    return [
        (info or {}) if version is None else {"model_version": version, **(info or {})}
        for info, version in zip(infos, versions, strict=True)
    ]


def decode(data: bytes, name: str, where: str | None = None) -> Shard:
    """Read a shard. `where` is its full URL, for messages.

    Raises DataError if the object is damaged, cut, of a newer version, or has other columns than `SCHEMA`.
    """
    where = where or name
    has_checksum = _check_bytes(data, where)
    try:
        # CRC-32 has just covered every byte, page checksums included.
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=not has_checksum)
        metadata: dict[bytes, bytes] = file.metadata.metadata or {}
        if (_CHECKSUM_KEY.encode() in metadata) != has_checksum:
            raise _damaged(where, "its checksum is missing or misplaced")
        _check_schema(file.schema_arrow, metadata, where)
        present = frozenset(cast("list[str]", file.schema_arrow.names))
        columns = [column for column in _NAMES if column in present]
        table = file.read(columns=columns, use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise _damaged(where, str(error)) from error
    shard = _decode_table(table, name, where)
    if not has_checksum:
        shard.rows(0, shard.num_rows)
    return shard


def _damaged(name: str, reason: str) -> DataError:
    return DataError(f"shard {name} cannot be read: {reason}. Restore the object from a copy, or leave its rows out")


def _check_bytes(data: bytes, name: str) -> bool:
    """Verify the checksum over the whole object; False if the shard carries none."""
    size = len(data)
    if size < 12 or data[:4] != _PARQUET_MAGIC or data[-4:] != _PARQUET_MAGIC:
        raise _damaged(name, f"its {size} bytes do not begin and end as Parquet does; it was cut or is something else")
    split = size - _TAIL_BYTES - _footer_bytes(data)
    view = memoryview(data)
    if split < 12 or data[split - 8 : split - 4] != _CHECKSUM_MARK:
        return False
    found = zlib.crc32(view[split:], zlib.crc32(view[: split - 8]))
    if found != int.from_bytes(data[split - 4 : split], "little"):
        raise _damaged(name, f"the CRC-32 of its {size} bytes is not the one that it was written with")
    return True


def _check_schema(schema: Any, metadata: dict[bytes, bytes], name: str) -> None:
    """Same columns and types; more columns are ignored, and optional ones may be missing."""
    version = metadata.get(_VERSION_KEY.encode(), b"").decode(errors="replace")
    if not version.isdecimal():
        raise _damaged(name, f"it is Parquet without {_VERSION_KEY!r} in its metadata: no shard of experiences")
    if int(version) > SCHEMA_VERSION:
        raise _damaged(
            name, f"its schema is version {version}, this trinity-flows knows up to {SCHEMA_VERSION}; upgrade"
        )
    for field in SCHEMA:
        if (index := schema.get_field_index(field.name)) < 0:
            if not field.nullable:
                raise _damaged(name, f"column {field.name!r} is missing")
        elif schema.field(index).type != field.type:
            raise _damaged(name, f"column {field.name!r} is {schema.field(index).type}, it must be {field.type}")


def _decode_table(table: Any, name: str, where: str) -> Shard:
    lists: dict[str, _Lists] = {}
    scalars: dict[str, list[Any]] = {}
    present = frozenset(cast("list[str]", table.column_names))  # pyarrow makes the list anew at each access
    for field in SCHEMA:
        if field.name not in present:
            continue
        column = table.column(field.name).combine_chunks()
        nulls: int = column.null_count
        if nulls and not field.nullable:
            raise _damaged(where, f"column {field.name!r} has {nulls} empty values")
        if nulls == len(column) and len(column):
            continue
        if field.name in DTYPES:
            valid = column.is_valid().to_pylist() if nulls else None
            lists[field.name] = _Lists(column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy(), valid)
        elif nulls:
            scalars[field.name] = column.to_pylist()
        else:
            scalars[field.name] = column.to_numpy(zero_copy_only=False).tolist()
    _check_rows(lists, scalars, where)
    starts = _group_starts(scalars["eid_batch"], scalars["eid_task"])
    return Shard(name, table.num_rows, table.nbytes, starts, lists, scalars)


def _check_rows(lists: dict[str, _Lists], scalars: dict[str, list[Any]], name: str) -> None:
    """Lengths and names that training relies on, over all rows at once."""
    status = scalars.get("truncate_status", [])
    if not (TRUNCATE_STATUSES.issuperset(status) and EXPERIENCE_TYPES.issuperset(scalars["experience_type"])):
        raise _damaged(name, "experience_type or truncate_status has a value that this version does not know")
    expected = np.diff(lists["tokens"].offsets) - np.asarray(scalars["prompt_length"], np.int64)
    exempt = np.asarray([value == "prompt_truncated" for value in status] or [False])
    for column in PER_TOKEN:
        if column in lists:
            wrong = np.diff(lists[column].offsets) != expected
            if lists[column].valid is not None:
                wrong &= np.asarray(lists[column].valid)
            if (rows := np.flatnonzero(wrong & ~exempt)).size:
                raise _damaged(name, f"row {rows[0]}: {column} does not have one entry per response token")


def _group_starts(batches: list[str], tasks: list[str]) -> tuple[int, ...]:
    groups = list(zip(batches, tasks, strict=True))
    return tuple(i for i, group in enumerate(groups) if not i or group != groups[i - 1])
