"""The files that a path means: which, in what order, of which kind, as local files, and the identity of their content.

Owns: splits and layouts of folders, downloads from a remote store, the hash of the data. Does not own: what is inside a
file (`sources.py`, `trinity_db.py`).
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Final, Literal, Self, cast

from pydantic import JsonValue

from engines.errors import ConfigError, DataError
from trinity_tasks.offline.config import Format
from trinity_tasks.storage import FileRecord, Storage, hash_file

Kind = Literal["jsonl", "parquet", "arrow", "sqlite"]

_SUFFIXES: Final[Mapping[str, Kind]] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".db": "sqlite",
    ".sqlite": "sqlite",
    ".sqlite3": "sqlite",
}
_MAGIC: Final[tuple[tuple[bytes, Kind], ...]] = (
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"\xff\xff\xff\xff", "arrow"),
    (b"SQLite format 3\0", "sqlite"),
    (b"{", "jsonl"),
    (b"\xef\xbb\xbf{", "jsonl"),
)
"""First bytes of a file, for names that say nothing."""
_KINDS: Final[Mapping[Format, frozenset[Kind]]] = {
    "auto": frozenset(("jsonl", "parquet", "arrow", "sqlite")),
    "jsonl": frozenset(("jsonl",)),
    "parquet": frozenset(("parquet",)),
    "datasets": frozenset(("arrow", "parquet", "jsonl")),
    "trinity": frozenset(("sqlite", "jsonl")),
}
_SPLITS: Final[Mapping[str, str]] = {"dev": "validation", "valid": "validation", "val": "validation", "eval": "test"}
"""Names that files of a split may have, beside its own."""
_SPLIT_WORD: Final = re.compile(r"(?<![a-z])(train|test|validation|dev|valid|val|eval)(?![a-z])")
_SQLITE_SCHEME: Final = "sqlite:///"


class NoData(ConfigError):
    """There is neither a file nor a folder at the path."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of the data."""

    name: str
    """Below the data's folder, forward slashes; how messages and rows name it."""
    size: int
    """Bytes."""


class DataFiles:
    """The files of one path, in the order of their names; remote ones are downloaded once, when first needed.

    Example:
        >>> with DataFiles("chats", "auto", "train") as files:      # doctest: +SKIP
        ...     [file.name for file in files.listed]
        ['part-0.parquet', 'part-1.parquet']
    """

    def __init__(self, path: str, format: Format, split: str) -> None:
        """Raises NoData, ConfigError if it is not clear which files are meant, DataError, StorageError."""
        if format in ("auto", "trinity"):
            path = path.removeprefix(_SQLITE_SCHEME)
        self.path = path
        self.format: Format = format
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._store, self.listed = _found(path, format, split)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    @property
    def is_local(self) -> bool:
        """Whether the files can be read where they are."""
        return self._store.local_path() is not None

    def local(self, file: DataFile) -> Path:
        """The file itself, or its download. Raises DataError if it is gone, StorageError."""
        itself = self._store.local_path(file.name)
        try:
            if itself is not None:
                return itself
            if self._scratch is None:
                self._scratch = tempfile.TemporaryDirectory(prefix="trinity-flows-import-")
            copy = Path(self._scratch.name) / f"{self.listed.index(file):08d}{PurePosixPath(file.name).suffix}"
            if not copy.exists():
                self._store.get_file(file.name, copy, size=file.size)
            return copy
        except FileNotFoundError as error:
            raise DataError(f"{self._store.where(file.name)} was listed and is gone; leave data in place") from error

    def kind(self, file: DataFile) -> Kind:
        """By name, or by content if the name says nothing. Raises DataError if that is nothing known."""
        kind = _SUFFIXES.get(PurePosixPath(file.name).suffix.lower())
        if kind is None or self.format == "trinity":
            with open(self.local(file), "rb") as opened:
                head = opened.read(16)
            kind = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
        wanted = _KINDS[self.format]
        if kind is None or kind not in wanted:
            raise DataError(
                f"{self._store.where(file.name)} is {kind or 'of no kind that is known'}; format: {self.format} reads "
                f"{', '.join(sorted(wanted))}. Give it the name that its content has, or correct format"
            )
        return kind

    def size_beside(self, file: DataFile, suffix: str) -> int:
        """Bytes of the object whose name is the file's and a suffix; 0 if there is none."""
        return self._store.size(f"{file.name}{suffix}") or 0

    def records(self) -> tuple[FileRecord, ...]:
        """Every file with its size and hash; all bytes are read."""
        found: list[FileRecord] = []
        for file in self.listed:
            local = self.local(file)
            found.append(FileRecord(path=file.name, size=local.stat().st_size, sha256=hash_file(local)))
        return tuple(found)


def content_sha256(records: Sequence[FileRecord]) -> str:
    """Identity of the data: the content of its files, in order. Their names and place do not matter."""
    return hashlib.sha256("".join(record.sha256 for record in records).encode()).hexdigest()


def _found(path: str, format: Format, split: str) -> tuple[Storage, tuple[DataFile, ...]]:
    """The folder and its files. A path is a file if there is one of that name."""
    folder, slash, name = path.rstrip("/").rpartition("/")
    if name and not folder.endswith(":/"):
        store = Storage(folder or slash or ".")
        if (size := store.size(name)) is not None:
            return store, (DataFile(name, size),)
    store = Storage(path)
    sizes = {info.name: info.size for info in store.list(recursive=True)}
    names = _saved_dataset(store, sizes, split) or _loose_files(path, sizes, format, split)
    return store, tuple(DataFile(name, sizes[name]) for name in names)


def _saved_dataset(store: Storage, sizes: Mapping[str, int], split: str) -> list[str]:
    """Files of a folder that `datasets` saved, in its own order; empty if it is none."""
    folder = ""
    if "dataset_dict.json" in sizes:
        splits = _json_object(store, "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or split not in splits:
            raise ConfigError(f"{store.url} has no split {split!r}; its splits are {splits}. Set split to one of them")
        folder = f"{split}/"
    if f"{folder}state.json" not in sizes:
        if folder:
            raise DataError(f"{store.where(folder)}state.json is missing: the folder was not saved completely")
        return []
    state = _json_object(store, f"{folder}state.json")
    entries = state.get("_data_files")
    if not isinstance(entries, list) or state.get("_indices_files"):
        raise DataError(f"{store.where(folder)}state.json names no data files that can be read in order; save it again")
    names = [f"{folder}{entry['filename']}" for entry in entries if isinstance(entry, dict) and "filename" in entry]
    for name in names:
        if name not in sizes:
            raise DataError(f"{store.where(name)} is missing, and state.json names it; copy the folder completely")
    return names


def _json_object(store: Storage, name: str) -> dict[str, JsonValue]:
    value = store.read_json(name)
    if not isinstance(value, dict):
        raise DataError(f"{store.where(name)} is not a JSON object; the folder was not saved by `datasets`")
    return value


def _loose_files(path: str, sizes: Mapping[str, int], format: Format, split: str) -> list[str]:
    """Data files of a folder, at any depth, by name."""
    kinds = {name: kind for name in sorted(sizes) if (kind := _SUFFIXES.get(PurePosixPath(name).suffix.lower()))}
    kinds = {name: kind for name, kind in kinds.items() if kind in _KINDS[format] and not _hidden(name)}
    if not sizes:
        raise NoData(f"{path} is neither a file nor a folder with files; check path")
    if not kinds:
        raise ConfigError(f"{path} has no {', '.join(sorted(_KINDS[format]))} files; check path and format")
    if len(found := sorted(set(kinds.values()))) > 1:
        raise ConfigError(f"{path} holds files of several kinds ({', '.join(found)}); set format, or a path below it")
    splits = {name: _split_of(name) for name in kinds}
    if len(set(splits.values())) == 1:
        return list(kinds)
    wanted = _SPLITS.get(split, split)
    if chosen := [name for name in kinds if splits[name] == wanted]:
        return chosen
    known = sorted({found or "none" for found in splits.values()})
    raise ConfigError(f"{path} has no files of split {split!r}; by their names they are of {', '.join(known)}")


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _split_of(name: str) -> str | None:
    """The split that a file's name or folder tells, as the files of a data set on a hub do."""
    words = cast("list[str]", _SPLIT_WORD.findall(name.lower()))
    return _SPLITS.get(words[-1], words[-1]) if words else None
