"""`Shard`: a shard that was read, and experiences of any range of its rows.

Owns: decoding and every check of it. Does not own: the columns (`schema.py`), writing (`encoding.py`), which shards
there are (`reader.py`).
"""

from __future__ import annotations

import dataclasses
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue

from engines.errors import DataError
from engines.experience import EID, Experience
from trinity_tasks.buffer.bounds import read_in_pieces, too_large
from trinity_tasks.buffer.row_checks import (
    DTYPES,
    EXPERIENCE_TYPES,
    MESSAGES,
    NO_LIMITS,
    PER_TOKEN,
    TRUNCATE_STATUSES,
    RowLimits,
    check_groups,
    validate,
)
from trinity_tasks.buffer.schema import (
    CHECKSUM_KEY,
    CHECKSUM_MARK,
    DICTS,
    NAMES,
    NOTES_KEY,
    PARQUET_MAGIC,
    SCHEMA,
    SCHEMA_VERSION,
    TAIL_BYTES,
    VERSION_KEY,
    footer_bytes,
    from_text,
    from_texts,
)

_T = TypeVar("_T")


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


@dataclass(frozen=True, eq=False)
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
    notes: Mapping[str, JsonValue]
    """What the writer noted of the rows together."""

    def group_end(self, row: int) -> int:
        """The first row behind the group that `row` belongs to."""
        following = bisect_right(self.group_starts, row)
        return self.group_starts[following] if following < len(self.group_starts) else self.num_rows

    def last_boundary(self, row: int) -> int:
        """The last row at or before `row` at which a group begins, or the end of the shard."""
        return self.num_rows if row >= self.num_rows else self.group_starts[bisect_right(self.group_starts, row) - 1]

    def groups(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """(first row, row behind the last) of each group among these rows."""
        stop = self.num_rows if stop is None else stop
        while start < stop:
            end = min(self.group_end(start), stop)
            yield start, end
            start = end

    def group_id(self, row: int) -> str:
        """The `eid.tid` of a row."""
        return f"{self._scalars['eid_batch'][row]}/{self._scalars['eid_task'][row]}"

    def oldest_version(self, start: int, stop: int) -> int:
        """Train step of the oldest weights that sampled one of the rows. Raises DataError if a row does not say."""
        versions: list[int | None] = self._scalars.get("model_version", [None] * self.num_rows)[start:stop]
        if None in versions:
            raise DataError(
                f"{self.name}, row {start + versions.index(None)}: it has no info['model_version'], so nobody knows "
                "how old it is; let the producer write it, or use sample_strategy: fifo without max_staleness"
            )
        return min(cast("list[int]", versions))

    def response_tokens(self, start: int, stop: int) -> int:
        """Response tokens of the rows, for pairs those of both responses."""
        return int(self._response_lengths[start:stop].sum())

    @cached_property
    def _response_lengths(self) -> npt.NDArray[np.int64]:
        lengths = np.diff(self._lists["tokens"].offsets) - np.asarray(self._scalars["prompt_length"], np.int64)
        for name in ("chosen", "rejected"):
            if name in self._lists:
                lengths = lengths + np.diff(self._lists[name].offsets)
        return lengths

    def check_texts(self) -> None:
        """Each text that should be JSON is one value; `rows` reads many at once. Raises DataError."""
        for name in (*DICTS, *MESSAGES):
            for row, text in enumerate(self._scalars.get(name, ())):
                try:
                    if text is not None:
                        _check_kind(name, from_text(text))
                except (ValueError, RecursionError) as error:
                    raise DataError(f"row {row}: {name} cannot be read ({error})") from error

    def rows(self, start: int, stop: int) -> list[Experience]:
        """Rows start to stop - 1, equal to those that were written, bit for bit.

        Raises DataError if a column holds a bad value; only a shard of another program can have such.
        """
        size = stop - start
        none: list[Any] = [None] * size
        columns: dict[str, list[Any]] = {name: lists.rows(start, stop) for name, lists in self._lists.items()}
        columns.update({name: values[start:stop] for name, values in self._scalars.items()})
        try:
            for name in (*DICTS, *MESSAGES):
                if name in columns:
                    columns[name] = _from_texts(name, columns[name])
            columns["eid"] = _eids(columns, size)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.name}, rows {start} to {stop - 1}: a column holds a bad value ({error})") from error
        columns["info"] = _infos(columns.get("info", none), columns.get("model_version", none))
        columns["metrics"] = [value or {} for value in columns.get("metrics", none)]
        # The constructor would turn single_turn rows with their mask into multi_turn ones.
        return _instances(Experience, size, {name: columns.get(name, none) for name in _FIELDS})


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(Experience))


def _instances(kind: type[_T], size: int, columns: Mapping[str, Iterable[Any]]) -> list[_T]:
    """Instances of a class with slots, one from each row; constructors would take five times as long."""
    made = [kind.__new__(kind) for _ in range(size)]
    for name, values in columns.items():
        put: Callable[[_T, Any], None] = getattr(kind, name).__set__
        deque(map(put, made, values), maxlen=0)
    return made


def _eids(columns: Mapping[str, list[Any]], size: int) -> list[EID]:
    parts = {name: columns[f"eid_{name}"] for name in ("batch", "task", "run", "step", "suffix")}
    for name in ("batch", "task"):
        are_ints = columns[f"eid_{name}_is_int"]
        parts[name] = [int(text) if is_int else text for text, is_int in zip(parts[name], are_ints, strict=True)]
    return _instances(EID, size, parts)


def _from_texts(name: str, texts: Sequence[str | None]) -> list[Any]:
    values = from_texts(texts)
    for value in values:
        _check_kind(name, value)
    return values


def _check_kind(name: str, value: object) -> None:
    kind: type = dict if name in DICTS else list
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"a JSON {type(value).__name__} instead of a {kind.__name__}")


def _infos(infos: list[Any], versions: list[int | None]) -> list[dict[str, Any]]:
    return [
        (info or {}) if version is None else {"model_version": version, **(info or {})}
        for info, version in zip(infos, versions, strict=True)
    ]


def decode(data: bytes, name: str, where: str | None = None, limits: RowLimits = NO_LIMITS) -> Shard:
    """Read a shard. `where` is its full URL, for messages. limits: for shards that no `ExperienceWriter` has written.

    Raises DataError if the object is damaged, cut, of a newer version, has other columns than `SCHEMA`, is larger than
    a shard may be, or comes from another program and has a row that `validate` refuses.
    """
    where = where or name
    table, has_checksum, notes = _read(data, NAMES, where)
    with _naming(where, intact=has_checksum):
        shard = _decode_table(table, name, where, notes)
    if not has_checksum:
        _check_foreign(shard, where, limits)
    return shard


def read_columns(data: bytes, columns: Sequence[str], name: str, where: str | None = None) -> Any:
    """The chosen columns of a shard as an Arrow table; where no row has a value, the column is all null.

    Raises DataError where `decode` does: a shard of another program is decoded once, to check its rows.
    """
    where = where or name
    table, has_checksum, _ = _read(data, columns, where)
    if not has_checksum:
        decode(data, name, where)  # and with it the texts, which pyarrow does not look into
    present = frozenset(cast("list[str]", table.column_names))
    for column in columns:
        if column not in present:
            table = table.append_column(SCHEMA.field(column), pa.nulls(table.num_rows, SCHEMA.field(column).type))
        elif not SCHEMA.field(column).nullable:
            _check_present(table.column(column), column, where)
    fields = [SCHEMA.field(column) for column in columns]
    return table.select(list(columns)).cast(pa.schema(fields))


def _read(data: bytes, columns: Sequence[str], where: str) -> tuple[Any, bool, Mapping[str, JsonValue]]:
    """(those of the columns that the shard has, as an Arrow table; whether it carries our checksum; its notes)."""
    has_checksum = _check_bytes(data, where)
    with _naming(where, intact=has_checksum):
        # CRC-32 has just covered every byte, page checksums included.
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=not has_checksum)
        metadata: dict[bytes, bytes] = file.metadata.metadata or {}
        if (CHECKSUM_KEY.encode() in metadata) != has_checksum:
            raise _damaged(where, "its checksum is missing or misplaced")
        _check_schema(file.schema_arrow, metadata, where)
        if fault := too_large(file.metadata, is_foreign=not has_checksum):
            raise _damaged(where, fault)
        present = frozenset(cast("list[str]", file.schema_arrow.names))
        chosen = [column for column in columns if column in present]
        table = file.read(columns=chosen, use_threads=False) if has_checksum else read_in_pieces(file, chosen)
        if table.num_rows != file.metadata.num_rows:
            raise _damaged(where, f"it says it has {file.metadata.num_rows} rows, and {table.num_rows} can be read")
        return table, has_checksum, _notes(metadata, where)


@contextmanager
def _naming(where: str, *, intact: bool) -> Generator[None]:
    """Whatever pyarrow, numpy and json say of bytes that they cannot read becomes an error that names the shard.

    intact: every byte is as it was written, so if there is not enough memory, that is no fault of the shard.
    """
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        if isinstance(error, DataError) or (intact and isinstance(error, MemoryError)):
            raise
        raise _damaged(where, str(error)) from error


def _check_present(column: Any, name: str, where: str) -> None:
    if nulls := column.null_count:
        raise _damaged(where, f"column {name!r} has {nulls} empty values")


def _notes(metadata: Mapping[bytes, bytes], where: str) -> Mapping[str, JsonValue]:
    notes = from_text(metadata.get(NOTES_KEY.encode(), b"{}").decode())
    if not isinstance(notes, dict):
        raise _damaged(where, f"{NOTES_KEY!r} in its metadata is not a JSON object")
    return cast("dict[str, JsonValue]", notes)


def _check_foreign(shard: Shard, where: str, limits: RowLimits) -> None:
    """What `ExperienceWriter` checks before it writes, or writes as it must be."""
    try:
        shard.check_texts()
        rows = shard.rows(0, shard.num_rows)
        validate(rows, limits)
        check_groups(rows)
    except DataError as error:
        raise _damaged(where, str(error)) from error


def _damaged(name: str, reason: str) -> DataError:
    return DataError(f"shard {name} cannot be read: {reason}. Restore the object from a copy, or leave its rows out")


def _check_bytes(data: bytes, name: str) -> bool:
    """Verify the checksum over the whole object; False if the shard carries none."""
    size = len(data)
    if size < 12 or data[:4] != PARQUET_MAGIC or data[-4:] != PARQUET_MAGIC:
        raise _damaged(name, f"its {size} bytes do not begin and end as Parquet does; it was cut or is something else")
    split = size - TAIL_BYTES - footer_bytes(data)
    view = memoryview(data)
    if split < 12 or data[split - 8 : split - 4] != CHECKSUM_MARK:
        return False
    found = zlib.crc32(view[split:], zlib.crc32(view[: split - 8]))
    if found != int.from_bytes(data[split - 4 : split], "little"):
        raise _damaged(name, f"the CRC-32 of its {size} bytes is not the one that it was written with")
    return True


def _check_schema(schema: Any, metadata: dict[bytes, bytes], name: str) -> None:
    """Same columns and types; more columns are ignored, and optional ones may be missing."""
    version = metadata.get(VERSION_KEY.encode(), b"").decode(errors="replace")
    if not version.isdecimal():
        raise _damaged(name, f"it is Parquet without {VERSION_KEY!r} in its metadata: no shard of experiences")
    if int(version) > SCHEMA_VERSION:
        raise _damaged(
            name, f"its schema is version {version}, this trinity-flows knows up to {SCHEMA_VERSION}; upgrade"
        )
    for field in SCHEMA:
        found = schema.get_all_field_indices(field.name)
        if len(found) > 1:
            raise _damaged(name, f"column {field.name!r} is there {len(found)} times")
        if not found and not field.nullable:
            raise _damaged(name, f"column {field.name!r} is missing")
        if found and (kind := schema.field(found[0]).type) != field.type:
            raise _damaged(name, f"column {field.name!r} is {kind}, it must be {field.type}")


def _decode_table(table: Any, name: str, where: str, notes: Mapping[str, JsonValue]) -> Shard:
    lists: dict[str, _Lists] = {}
    scalars: dict[str, list[Any]] = {}
    present = frozenset(cast("list[str]", table.column_names))  # pyarrow makes the list anew at each access
    for field in SCHEMA:
        if field.name not in present:
            continue
        column = table.column(field.name).combine_chunks()
        nulls: int = column.null_count
        if not field.nullable:
            _check_present(column, field.name, where)
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
    if "action_mask" not in lists:
        _default_masks(lists, scalars)
    starts = _group_starts(scalars["eid_batch"], scalars["eid_task"])
    return Shard(name, table.num_rows, table.nbytes, starts, lists, scalars, notes)


def _default_masks(lists: dict[str, _Lists], scalars: dict[str, list[Any]]) -> None:
    """Every response token of a single turn trains, as in an `Experience` that is given no mask."""
    status = scalars.get("truncate_status", [None] * len(scalars["prompt_length"]))
    valid = [
        kind == "single_turn" and cut != "prompt_truncated"
        for kind, cut in zip(scalars["experience_type"], status, strict=True)
    ]
    if any(valid):
        lengths = np.diff(lists["tokens"].offsets) - np.asarray(scalars["prompt_length"], np.int32)
        offsets = np.zeros(len(valid) + 1, np.int32)
        np.cumsum(np.where(valid, lengths, 0), out=offsets[1:])
        lists["action_mask"] = _Lists(np.ones(int(offsets[-1]), np.bool_), offsets, valid)


def _check_rows(lists: dict[str, _Lists], scalars: dict[str, list[Any]], name: str) -> None:
    """Lengths and names that training relies on, over all rows at once."""
    status = scalars.get("truncate_status", [])
    if not (TRUNCATE_STATUSES.issuperset(status) and EXPERIENCE_TYPES.issuperset(scalars["experience_type"])):
        raise _damaged(name, "experience_type or truncate_status has a value that this version does not know")
    prompts = np.asarray(scalars["prompt_length"], np.int64)
    expected = np.diff(lists["tokens"].offsets) - prompts
    if (rows := np.flatnonzero((prompts < 1) | (expected < 0))).size:
        raise _damaged(name, f"row {rows[0]}: prompt_length is {prompts[rows[0]]}, which its tokens do not have")
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
