"""A job's objects on any fsspec URL: `file://` or a path, `s3://`, `gs://`, `memory://`.

Owns: which paths there are, verified transfers, and what a failure tells the user. Does not own: how a kind of store
keeps its promises (`trinity_tasks.local_files`, `trinity_tasks.remote_files`), what the objects mean. Every listing and
size is fresh: nothing is cached but the connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import JsonValue

from engines.config import Frozen
from engines.errors import StorageError
from trinity_tasks.local_files import TMP_PREFIX, LocalFiles
from trinity_tasks.remote_files import RemoteFiles
from trinity_tasks.store_failures import advice

RETRY_S = 60.0
"""How long a remote operation is tried again before it becomes an error."""


class DamagedObject(StorageError):
    """The object is there but is not what was written: its size, hash or content is wrong."""


class FileRecord(Frozen):
    """One stored file, as it was written."""

    path: str
    """Relative to the folder that was stored, forward slashes."""
    size: int
    """Bytes."""
    sha256: str
    """Hex digest."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    name: str
    """Relative to the Storage that listed it."""
    size: int
    """Bytes."""


class _Backend(Protocol):
    @property
    def errors(self) -> tuple[type[Exception], ...]: ...
    def local_path(self, path: str) -> Path | None: ...
    def read(self, path: str) -> bytes: ...
    def write(self, path: str, data: bytes, durable: bool) -> None: ...
    def create(self, path: str, data: bytes, durable: bool) -> None: ...
    def upload(self, local: Path, path: str, move: bool) -> None: ...
    def download(self, path: str, local: Path, has_hash: bool) -> None: ...
    def list(self, prefix: str, recursive: bool) -> list[tuple[str, int]]: ...
    def size(self, path: str) -> int | None: ...
    def remove(self, path: str) -> None: ...
    def remove_tree(self, prefix: str) -> None: ...
    def sweep(self, prefix: str) -> int: ...
    def flush(self) -> None: ...


def hash_file(path: Path) -> str:
    """sha256 of a local file, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(local: Path, name: str, *, size: int | None, sha256: str | None) -> None:
    """Raises DamagedObject, about `name`, if a local file has not this size or hash; FileNotFoundError."""
    found = local.stat().st_size
    if size is not None and found != size:
        raise DamagedObject(f"{name} has {found} bytes, recorded were {size}; it was cut or replaced")
    if sha256 is not None and (digest := hash_file(local)) != sha256:
        raise DamagedObject(f"{name} has sha256 {digest}, recorded was {sha256}; its bytes changed")


class Storage:
    """A prefix on a store. Holds no connection: picklable, and safe to use from any thread or process.

    Paths are relative to `url`, with forward slashes. Every method raises StorageError for what is not named below it.

    Example:
        >>> store = Storage("memory://job")
        >>> store.create_json("commits/00000001.json", {"step": 10})
        >>> store.read_json("commits/00000001.json")
        {'step': 10}
    """

    def __init__(
        self,
        url: str,
        options: dict[str, Any] | None = None,
        *,
        retry_s: float = RETRY_S,
        single_writer: bool = False,
    ) -> None:
        """single_writer: nobody else writes here meanwhile, so that stores without create-only writes are safe too."""
        self.options = dict(options or {})
        self.retry_s = retry_s
        self.single_writer = single_writer
        protocol, separator, rest = url.partition("://")
        if separator and protocol not in ("file", "local"):
            self.url = url.rstrip("/")
            if not rest.strip("/"):
                raise StorageError(f"{url}: names no bucket; give {protocol}://BUCKET/PREFIX")
            protocol = "s3" if protocol == "s3a" else protocol
            self._backend: _Backend = RemoteFiles(protocol, self.url, self.options, retry_s, single_writer)
        else:
            self.url = os.path.abspath(os.path.expanduser(rest if separator else url))
            self._backend = LocalFiles(self.url)

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    def child(self, *parts: str) -> Storage:
        """The Storage of a prefix below this one."""
        url = "/".join([self.url, *(self._checked(part) for part in parts)])
        return Storage(url, self.options, retry_s=self.retry_s, single_writer=self.single_writer)

    def with_retry_s(self, retry_s: float) -> Storage:
        """The same Storage, which gives up after another time, seconds."""
        return Storage(self.url, self.options, retry_s=retry_s, single_writer=self.single_writer)

    def local_path(self, path: str = "") -> Path | None:
        """The object's file when the store is a local folder, for readers that map it; None elsewhere."""
        return self._backend.local_path(self._checked(path) if path else "")

    def where(self, path: str) -> str:
        """The full URL of an object, for messages."""
        return f"{self.url}/{path}" if path else self.url

    @staticmethod
    def _checked(path: str) -> str:
        refused = "\\" in path or "\0" in path
        if refused or any(part in ("", ".", "..") or part.startswith(TMP_PREFIX) for part in path.split("/")):
            raise StorageError(f"{path!r} is not a path inside a store: use names joined by single slashes")
        return path

    @contextlib.contextmanager
    def _told(self, action: str, path: str, *passed: type[Exception]) -> Generator[None]:
        """Turn a driver's error into one that says what, where, why and what to do."""
        try:
            yield
        except StorageError:
            raise
        except self._backend.errors as error:
            if passed and isinstance(error, passed):
                raise
            raise StorageError(f"cannot {action} {self.where(path)}: {error}; {advice(error, self.url)}") from error

    def read_bytes(self, path: str) -> bytes:
        """The object's content. Raises FileNotFoundError if there is none."""
        with self._told("read", path, FileNotFoundError):
            return self._backend.read(self._checked(path))

    def read_json(self, path: str) -> JsonValue:
        """Raises FileNotFoundError, and DamagedObject if the content is not JSON."""
        data = self.read_bytes(path)
        try:
            return json.loads(data)
        except ValueError as error:
            raise DamagedObject(f"{self.where(path)} is not JSON ({len(data)} bytes): {error}") from error

    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Create or replace an object, atomically. `durable`: see `create`."""
        with self._told("write", path):
            self._backend.write(self._checked(path), data, durable)

    def create(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Create an object that must not exist: of any number of writers one wins. Raises FileExistsError.

        durable=False: do not wait for a local disk; `flush` does, and a commit calls it. A killed process loses
        nothing either way, a power failure may lose or tear the last objects: only for what a resume makes again.
        """
        if not data:
            raise StorageError(f"cannot create {self.where(path)}: an empty object would bypass the create-only rule")
        with self._told("create", path, FileExistsError):
            self._backend.create(self._checked(path), data, durable)

    def write_json(self, path: str, value: JsonValue, *, durable: bool = True) -> None:
        """Raises ValueError for NaN and infinity: JSON has none."""
        self.write(path, _encoded(value), durable=durable)

    def create_json(self, path: str, value: JsonValue, *, durable: bool = True) -> None:
        """Raises FileExistsError, and ValueError for NaN and infinity: JSON has none."""
        self.create(path, _encoded(value), durable=durable)

    def put_file(self, local: Path, path: str, *, move: bool = False) -> FileRecord:
        """Store a local file: 16 MB parts, four at once, size checked afterwards. Durable when it returns.

        move: the local file may be consumed, which saves the copy when it is on the store's own file system.
        """
        with self._told(f"store {local} as", path):
            size, sha256 = local.stat().st_size, hash_file(local)
            self._backend.upload(local, self._checked(path), move)
        stored = self.size(path)
        if stored != size:
            raise DamagedObject(f"{self.where(path)} has {stored} bytes after an upload of {size}; upload it again")
        return FileRecord(path=path, size=size, sha256=sha256)

    def get_file(self, path: str, local: Path, *, size: int | None = None, sha256: str | None = None) -> None:
        """Fetch an object to a local file, which appears complete and verified or not at all.

        Raises FileNotFoundError, and DamagedObject if the size or hash is not the given one.
        """
        self._checked(path)
        partial = local.with_name(f"{TMP_PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with self._told("fetch", path, FileNotFoundError):
                local.parent.mkdir(parents=True, exist_ok=True)
                self._backend.download(path, partial, sha256 is not None)
                try:
                    check_file(partial, self.where(path), size=size, sha256=sha256)
                except DamagedObject:  # or the transfer was: only a second one can tell
                    self._backend.download(path, partial, sha256 is not None)
                    check_file(partial, self.where(path), size=size, sha256=sha256)
            os.replace(partial, local)
        finally:
            partial.unlink(missing_ok=True)

    def list(self, prefix: str = "", *, recursive: bool = False) -> list[ObjectInfo]:
        """Objects directly below a prefix, or at any depth, by name. A prefix without objects gives []."""
        with self._told("list", prefix):
            found = self._backend.list(self._checked(prefix) if prefix else "", recursive)
        return [ObjectInfo(name, size) for name, size in sorted(found)]

    def size(self, path: str) -> int | None:
        """Bytes of an object; None if there is none."""
        with self._told("look up", path):
            return self._backend.size(self._checked(path))

    def exists(self, path: str) -> bool:
        """Whether there is such an object now."""
        return self.size(path) is not None

    def remove(self, path: str) -> None:
        """Remove an object; none is fine."""
        with self._told("remove", path):
            self._backend.remove(self._checked(path))

    def remove_tree(self, prefix: str) -> None:
        """Remove every object below a prefix; none is fine."""
        with self._told("remove", prefix):
            self._backend.remove_tree(self._checked(prefix))

    def flush(self) -> None:
        """Return when every write with durable=False of this process is on disk."""
        with self._told("flush", ""):
            self._backend.flush()

    def sweep_temporaries(self, prefix: str) -> int:
        """Remove what killed writers left half-written below a prefix that nobody else writes. Returns the number."""
        with self._told("clean", prefix):
            return self._backend.sweep(self._checked(prefix))

    def check_writable(self) -> None:
        """Try every operation that a job needs, for real, with one small object that is removed again.

        Raises StorageError that names the wrong bucket, missing permission, read-only folder, or a store that ignores
        create-only writes (which only a single writer may use).
        """
        path, data = f"probe-{secrets.token_hex(6)}", secrets.token_bytes(16)
        self.create(path, data)
        try:
            if (back := self.read_bytes(path)) != data:
                raise StorageError(f"{self.where(path)}: 16 bytes were written and {len(back)} other ones came back")
            with contextlib.suppress(FileExistsError):
                self.create(path, b"second writer")
                raise StorageError(
                    f"{self.url}: the store ignores create-only writes (If-None-Match), so two runs could overwrite "
                    f"each other's checkpoints; use a store that honours them, or, if you promise that only one "
                    f"process at a time writes this job, set storage.single_writer: true"
                )
            if path not in {info.name for info in self.list()}:
                raise StorageError(f"{self.where(path)} was written but a listing does not show it; use another store")
            self.write(path, data[::-1])
        finally:
            self.remove(path)


def _encoded(value: JsonValue) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
