"""A local folder stored as objects, each recorded with size and hash, and fetched back verified.

Owns: upload, presence check, full check, download. Does not own: the manifest that makes the objects mean something
(`trinity_tasks.checkpoint`, `trinity_tasks.weights`).
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import cast

from engines.errors import CheckpointError
from trinity_tasks.storage import DamagedObject, FileRecord, Storage, check_file

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""


class DamagedFolder(CheckpointError):
    """An object that a manifest names is missing, or is not what was written."""


def unreadable(path: Path) -> str | None:
    """Why a .safetensors or .json file cannot be read; None if it can. Other files are not judged."""
    if path.suffix == ".safetensors":
        return _bad_safetensors(path)
    if path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            return f"is not JSON: {error}"
    return None


def _bad_safetensors(path: Path) -> str | None:
    """Header is JSON, and its tensors cover the rest of the file without gap or overlap."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            return f"is not a safetensors file: {size} bytes, header of {length}"
        try:
            header = json.loads(file.read(length))
            spans = sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return f"has no safetensors header: {error}"
    end = 0
    for start, stop in cast("list[tuple[int, int]]", spans):
        if start != end or stop < start:
            return f"has a safetensors header with a gap or overlap at byte {end}"
        end = stop
    return None if end == size - 8 - length else f"has {size - 8 - length} bytes of tensors, its header says {end}"


def store_folder(store: Storage, staging: Path, prefix: str, *, move: bool = False) -> tuple[FileRecord, ...]:
    """Upload every file below `staging`, each readable and its stored size checked. Durable when it returns.

    move: the files may be consumed. Raises CheckpointError if there is nothing or something unreadable, StorageError.
    """
    paths = sorted(path for path in staging.rglob("*") if not path.is_dir() or path.is_symlink())
    if not paths:
        raise CheckpointError(f"{staging} has no files: the engine staged nothing, so there is nothing to store")
    for path in paths:
        reason = "is a symbolic link" if path.is_symlink() else unreadable(path)
        if reason is not None:
            raise CheckpointError(f"{path} {reason}; the engine must stage complete, readable files")
    records: list[FileRecord] = []
    for path in paths:
        name = path.relative_to(staging).as_posix()
        record = store.put_file(path, f"{prefix}/{name}", move=move)
        records.append(record.model_copy(update={"path": name}))
    return tuple(records)


def missing_files(store: Storage, prefix: str, files: Sequence[FileRecord]) -> list[str]:
    """What a listing shows to be wrong: absent objects and wrong sizes. One request. Empty: all present."""
    sizes = {info.name: info.size for info in store.list(prefix, recursive=True)}
    problems: list[str] = []
    for file in files:
        size = sizes.get(f"{prefix}/{file.path}")
        if size is None:
            problems.append(f"{store.where(prefix)}/{file.path} is missing")
        elif size != file.size:
            problems.append(f"{store.where(prefix)}/{file.path} has {size} bytes, the manifest says {file.size}")
    return problems


def fetch_folder(store: Storage, prefix: str, files: Sequence[FileRecord], into: Path) -> None:
    """Download into an absent or empty folder, every size and hash verified.

    Raises DamagedFolder, which names the object; StorageError if the store cannot be read (nothing is known to be
    damaged then); CheckpointError if `into` has files.
    """
    if into.exists() and any(into.iterdir()):
        raise CheckpointError(f"{into} is not empty; restore into a new folder")
    into.mkdir(parents=True, exist_ok=True)
    for file in files:
        try:
            store.get_file(f"{prefix}/{file.path}", into / file.path, size=file.size, sha256=file.sha256)
        except FileNotFoundError as error:
            raise DamagedFolder(f"{store.where(prefix)}/{file.path} is missing") from error
        except DamagedObject as error:
            raise DamagedFolder(str(error)) from error


@contextlib.contextmanager
def _at_hand(store: Storage, path: str, file: FileRecord) -> Generator[Path]:
    """The verified object as a local file: itself on a local store, a download for the moment elsewhere."""
    itself = store.local_path(path)
    if itself is not None:
        check_file(itself, store.where(path), size=file.size, sha256=file.sha256)
        yield itself
        return
    with tempfile.TemporaryDirectory(prefix="trinity-flows-") as folder:
        local = Path(folder) / Path(file.path).name
        store.get_file(path, local, size=file.size, sha256=file.sha256)
        yield local


def damaged_files(store: Storage, prefix: str, files: Sequence[FileRecord]) -> list[str]:
    """Every problem of every object, all bytes read: presence, size, hash, readable. Empty: all is well."""
    problems: list[str] = []
    for file in files:
        path = f"{prefix}/{file.path}"
        try:
            with _at_hand(store, path, file) as local:
                reason = unreadable(local)
        except FileNotFoundError:
            problems.append(f"{store.where(path)} is missing")
        except DamagedObject as error:
            problems.append(str(error))
        else:
            if reason is not None:
                problems.append(f"{store.where(path)} {reason}")
    return problems
