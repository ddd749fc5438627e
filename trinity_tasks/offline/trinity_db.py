"""Experience databases of Trinity-RFT, sqlite or JSON lines, become the same rows in our buffer, group by group.

Owns: tables and lines, which rows are one group, agreement of a row's columns with its blob. Does not own: what is in a
blob (`trinity_blobs.py`).

    <name>        id, task_id, run_id, msg_id, model_version, reward, ...   what is searched for
    <name>_blob   id, experience_bytes                                      the experience
    <name>        all of these                                              in older databases

Rows of one group may lie anywhere, and a shard must hold whole groups. So a database is read twice: first for the
identities, then group by group, in the order in which groups begin.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

from engines.errors import ConfigError, DataError
from engines.experience import EID, Experience
from trinity_tasks.buffer.row_checks import RowLimits, limit_fault, validate
from trinity_tasks.offline.config import OfflineConfig
from trinity_tasks.offline.files import DataFiles
from trinity_tasks.offline.sources import MAX_LINE_BYTES, Unit, parse_line, read_lines
from trinity_tasks.offline.trinity_blobs import Fields, as_mapping, experience, identity, read_blob, read_line

MAX_BLOB_BYTES: Final = 256 * 2**20
"""Largest blob that is read; Trinity-RFT writes none above 32 MiB unless it is told to."""
_BLOB_COLUMN: Final = "experience_bytes"
_BLOB_SUFFIX: Final = "_blob"
_CHECKED_COLUMNS: Final = ("task_id", "run_id", "msg_id", "reward", "model_version")


class _Rows(Protocol):
    """Stored experiences by position."""

    def positions(self) -> Iterator[int]:
        """Every position, in order."""
        ...

    def where(self, position: int) -> str:
        """The place, for messages."""
        ...

    def fields(self, position: int) -> Fields:
        """Raises DataError without the place."""
        ...


def experience_units(files: DataFiles, config: OfflineConfig, limits: RowLimits) -> Iterator[Unit]:
    """The groups of a database. Rows without any group are one each.

    Raises ConfigError (no such table, several files), DataError that names the row.
    """
    file, *more = files.listed
    if more:
        raise ConfigError(f"{files.path} has {1 + len(more)} files; give the path of one experience database")
    local = files.local(file)
    rows: _Rows
    if files.kind(file) == "sqlite":
        if files.size_beside(file, "-wal"):
            raise DataError(
                f"{files.path}-wal holds rows that are not in the database yet; open it once with sqlite3 and "
                "run PRAGMA wal_checkpoint(TRUNCATE)"
            )
        rows = _Database(local, file.name, config.table)
    else:
        rows = _Lines(local, file.name)
    groups: dict[tuple[int | str, int | str], list[int]] = {}
    for position in rows.positions():
        eid = _identity(rows, position)
        groups.setdefault((eid.batch, eid.task), []).append(position)
    for positions in groups.values():
        yield Unit(len(positions), partial(_group, rows, positions, config, limits))


@contextmanager
def _placed(rows: _Rows, position: int) -> Generator[None]:
    """Put the row's place in front of what is wrong with it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{rows.where(position)}: {error}") from error


def _identity(rows: _Rows, position: int) -> EID:
    with _placed(rows, position):
        return _grouped(identity(rows.fields(position)), position)


def _grouped(eid: EID, position: int) -> EID:
    """A group of its own for a row that Trinity-RFT gave none, as it does when it formats a data set."""
    return EID("import", position, eid.run, eid.step, eid.suffix) if (eid.batch, eid.task) == ("", "") else eid


def _group(rows: _Rows, positions: list[int], config: OfflineConfig, limits: RowLimits) -> list[Experience]:
    """Rows of a group; none if one of them is too long and may be dropped, since the others are only half a group."""
    group: list[Experience] = []
    for position in positions:
        with _placed(rows, position):
            fields = rows.fields(position)
            row = experience(fields, _grouped(identity(fields), position))
            if fault := limit_fault(row, limits):
                if config.too_long == "drop":
                    return []
                raise DataError(f"{fault}; raise the model's limit, or set too_long: drop, which drops the whole group")
            validate([row], limits)
            group.append(row)
    return group


class _Lines:
    """Lines of JSON, found again by where they begin."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._starts = array("q")
        with open(path, "rb") as file:
            start = 0
            for line in iter(partial(file.readline, MAX_LINE_BYTES + 1), b""):
                self._starts.append(start)
                start += len(line)

    def positions(self) -> Iterator[int]:
        for record in read_lines(self._path, self._name):
            yield int(record.where.rpartition(" ")[2]) - 1

    def where(self, position: int) -> str:
        return f"{self._name} line {position + 1}"

    def fields(self, position: int) -> Fields:
        with open(self._path, "rb") as file:
            file.seek(self._starts[position])
            return read_line(parse_line(file.readline(MAX_LINE_BYTES), self.where(position)))


class _Database:
    """A table of blobs, and the columns beside them. Opened for each use, read-only, as a file that stands still."""

    def __init__(self, path: Path, name: str, table: str | None) -> None:
        """Raises ConfigError if it is not clear which table is meant, DataError."""
        self._url = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
        self._name = name
        with self._opened() as database:
            tables = _tables_of(database)
            self._blobs = _blob_table(tables, table, name)
            about = self._blobs.removesuffix(_BLOB_SUFFIX)
            self._about = about if "id" in tables.get(about, ()) else self._blobs
            self._columns = [column for column in _CHECKED_COLUMNS if column in tables[self._about]]
            query = f"SELECT id FROM {_quoted(self._about)} WHERE id NOT IN (SELECT id FROM {_quoted(self._blobs)})"
            if lost := database.execute(f"{query} LIMIT 1").fetchone():
                raise DataError(
                    f"{name} table {self._about} id {lost[0]} has no experience in {self._blobs}; it was lost"
                )

    @contextmanager
    def _opened(self) -> Generator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._url, uri=True)) as database:
                database.execute("PRAGMA trusted_schema = OFF")
                yield database
        except sqlite3.Error as error:
            raise DataError(
                f"{self._name} cannot be read as a database: {error}; copy it again while no job runs"
            ) from error

    def positions(self) -> Iterator[int]:
        with self._opened() as database:
            for (position,) in database.execute(f"SELECT id FROM {_quoted(self._blobs)} ORDER BY id"):
                if type(position) is not int:
                    raise DataError(
                        f"{self._name} table {self._blobs} has the id {position!r}; it must be a whole number"
                    )
                yield position

    def where(self, position: int) -> str:
        return f"{self._name} table {self._blobs} id {position}"

    def fields(self, position: int) -> Fields:
        blobs = _quoted(self._blobs)
        with self._opened() as database:
            (size,) = database.execute(
                f"SELECT length({_BLOB_COLUMN}) FROM {blobs} WHERE id = ?", (position,)
            ).fetchone()
            if not size or size > MAX_BLOB_BYTES:
                raise DataError(f"its blob has {size} bytes; it must have 1 to {MAX_BLOB_BYTES}")
            (blob,) = database.execute(f"SELECT {_BLOB_COLUMN} FROM {blobs} WHERE id = ?", (position,)).fetchone()
            if not isinstance(blob, bytes):
                raise DataError(f"its blob is a {type(blob).__name__}")
            names = ", ".join(_quoted(column) for column in self._columns) or "NULL"
            beside = database.execute(
                f"SELECT {names} FROM {_quoted(self._about)} WHERE id = ?", (position,)
            ).fetchone()
        fields = read_blob(blob)
        if beside is None:
            raise DataError(f"there is no row of that id in table {self._about}")
        self._check_agreement(fields, dict(zip(self._columns, beside, strict=False)))
        return fields

    def _check_agreement(self, fields: Fields, columns: dict[str, Any]) -> None:
        """Trinity-RFT lets columns win over the blob, and gives each task back as text; here both must say the same."""
        eid, info = identity(fields), as_mapping(fields.get("info"))
        inside: dict[str, Any] = {
            "task_id": str(eid.task),
            "run_id": eid.run,
            "msg_id": eid.suffix,
            "reward": fields.get("reward"),
            "model_version": (info or {}).get("model_version"),
        }
        for column, value in columns.items():
            if value != inside[column]:
                raise DataError(
                    f"column {column} of table {self._about} is {value!r}, the experience has {inside[column]!r}: "
                    "one of them was changed after it was written. Set the column back, or write the experiences anew"
                )


def _tables_of(database: sqlite3.Connection) -> dict[str, list[str]]:
    """Columns of each real table; views could run anything."""
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    return {name: [column[1] for column in database.execute(f"PRAGMA table_info({_quoted(name)})")] for name in names}


def _blob_table(tables: dict[str, list[str]], table: str | None, name: str) -> str:
    found = [each for each, columns in tables.items() if _BLOB_COLUMN in columns and "id" in columns]
    wanted = [each for each in found if table is None or each in (table, f"{table}{_BLOB_SUFFIX}")]
    if len(wanted) == 1:
        return wanted[0]
    shown = ", ".join(each.removesuffix(_BLOB_SUFFIX) for each in found) or "none"
    raise ConfigError(f"{name}: tables of experiences are {shown}; set table to one of them (it is {table})")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
