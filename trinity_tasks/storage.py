"""A job's objects on any fsspec URL: `file://` or a path, `s3://`, `gs://`, `memory://`. The only door to fsspec.

Owns: atomic writes, create-only writes, retries, verified transfers, and what a failure tells the user. Does not own:
what the objects mean. Every listing and size is fresh: nothing is cached but the connection.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import JsonValue
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from engines.config import Frozen
from engines.errors import StorageError
from trinity_tasks.local_files import TMP_PREFIX, LocalFiles
from trinity_tasks.store_failures import advice, http_status, is_refused_condition

PART_BYTES = 16 * 2**20
NUM_PARTS_AT_ONCE = 4
MAX_PARTS = 10_000
S3_CONFIG: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 120, "retries": {"max_attempts": 2}}
"""Of one request, seconds; a part of 16 MB must pass a slow line. The client retries little: `RETRY_S` does."""
RETRY_S = 60.0
"""How long a remote operation is tried again before it becomes an error."""

_T = TypeVar("_T")
_FILESYSTEMS: dict[tuple[int, str, str], Any] = {}
"""(pid, protocol, options and environment) -> fsspec filesystem. By pid: a connection must not cross a fork."""
_ENVIRONMENT = ("AWS_", "FSSPEC_")
"""Variables that drivers read when they connect: a corrected endpoint must not find the old connection."""
_TOKEN = "created-by"
_MEMORY_LOCK = threading.RLock()


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
    def download(self, path: str, local: Path) -> None: ...
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


def part_bytes(size: int) -> int:
    """Bytes of one part of a multi-part upload: 16 MB, more where that would make over 10,000 parts, S3's limit."""
    return max(PART_BYTES, -(-size // MAX_PARTS))


class _RemoteFiles:
    """The store of a job behind fsspec."""

    def __init__(self, protocol: str, url: str, options: dict[str, Any], retry_s: float) -> None:
        self.protocol = protocol
        self.url = url
        self.options = options
        self.retry_s = retry_s

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return (OSError, ValueError, *_client_errors(self.protocol)[0])

    def local_path(self, path: str) -> Path | None:
        return None

    def _filesystem(self) -> Any:
        options: dict[str, Any] = {"use_listings_cache": False, **self.options}
        if self.protocol == "s3":
            options["config_kwargs"] = {**S3_CONFIG, **options.get("config_kwargs", {})}
        environment = sorted((name, value) for name, value in os.environ.items() if name.startswith(_ENVIRONMENT))
        key = (os.getpid(), self.protocol, json.dumps([options, environment], sort_keys=True, default=str))
        filesystem = _FILESYSTEMS.get(key)
        if filesystem is None:
            import fsspec  # pyright: ignore[reportMissingTypeStubs]

            try:
                filesystem = fsspec.filesystem(self.protocol, skip_instance_cache=True, **options)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            except (ValueError, ImportError) as error:
                raise StorageError(
                    f"{self.url}: no driver for {self.protocol}://: {error}; install the package that it names, or use "
                    f"a local folder or s3://"
                ) from error
            filesystem = _FILESYSTEMS.setdefault(key, filesystem)
        return filesystem

    def _forget_connections(self) -> None:
        for key in [key for key in _FILESYSTEMS if key[:2] == (os.getpid(), self.protocol)]:
            _FILESYSTEMS.pop(key, None)

    def _lock(self) -> AbstractContextManager[object]:
        return _MEMORY_LOCK if self.protocol == "memory" else nullcontext()

    def _once(self, call: Callable[[Any], _T]) -> _T:
        """One try; refused permission may be an expired token in a cached connection, so a new one is tried once."""
        with self._lock():
            try:
                return call(self._filesystem())
            except PermissionError:
                self._forget_connections()
                return call(self._filesystem())

    def _call(self, call: Callable[[Any], _T]) -> _T:
        transient = _client_errors(self.protocol)[1]

        def is_transient(error: BaseException) -> bool:
            status = http_status(error)
            if status is not None:
                return status >= 500 or status in (408, 409, 429)
            return isinstance(error, transient)

        retrying = Retrying(
            retry=retry_if_exception(is_transient),
            stop=stop_after_delay(self.retry_s),
            wait=wait_random_exponential(0.2, max=5),
            reraise=True,
        )
        return retrying(lambda: self._once(call))

    def _full(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    def _relative(self, filesystem: Any, name: str) -> str:
        root: str = filesystem._strip_protocol(self.url)
        return name[len(root) :].lstrip("/")

    def _transfer_options(self, size: int) -> dict[str, Any]:
        if self.protocol != "s3":
            return {}
        return {"chunksize": part_bytes(size), "max_concurrency": NUM_PARTS_AT_ONCE}

    def read(self, path: str) -> bytes:
        return self._call(lambda fs: fs.cat_file(self._full(path)))

    def write(self, path: str, data: bytes, durable: bool) -> None:
        self._call(lambda fs: fs.pipe_file(self._full(path), data, **self._transfer_options(len(data))))

    def create(self, path: str, data: bytes, durable: bool) -> None:
        """Raises FileExistsError.

        Drivers and HTTP clients try again when an answer was lost, and then find the object that they had created.
        A token in its metadata tells that from another writer's object.
        """
        token, options = secrets.token_hex(8), self._transfer_options(len(data))
        if self.protocol == "s3":
            options["Metadata"] = {_TOKEN: token}
        try:
            self._call(lambda fs: fs.pipe_file(self._full(path), data, mode="create", **options))
        except self.errors as error:
            if not is_refused_condition(error):
                raise
            if self.protocol != "s3" or self._token_of(path) != token:
                raise FileExistsError(errno.EEXIST, "the object exists", self._full(path)) from error

    def _token_of(self, path: str) -> str | None:
        try:
            return self._call(lambda fs: fs.metadata(self._full(path))).get(_TOKEN)
        except FileNotFoundError:
            return None

    def upload(self, local: Path, path: str, move: bool) -> None:
        options = self._transfer_options(local.stat().st_size)
        self._call(lambda fs: fs.put_file(str(local), self._full(path), **options))

    def download(self, path: str, local: Path) -> None:
        self._call(lambda fs: fs.get_file(self._full(path), str(local), **self._transfer_options(0)))

    def list(self, prefix: str, recursive: bool) -> list[tuple[str, int]]:
        def call(fs: Any) -> list[tuple[str, int]]:
            try:
                if recursive:
                    entries = list(fs.find(self._full(prefix), detail=True).values())
                else:
                    entries = fs.ls(self._full(prefix), detail=True)
            except FileNotFoundError:
                return []
            return [
                (self._relative(fs, entry["name"]), int(entry["size"]))
                for entry in entries
                if entry["type"] == "file" and not entry["name"].endswith("/")
            ]

        return self._call(call)

    def size(self, path: str) -> int | None:
        try:
            info = self._call(lambda fs: fs.info(self._full(path)))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(lambda fs: fs.rm_file(self._full(path)))

    def remove_tree(self, prefix: str) -> None:
        def call(fs: Any) -> None:
            with contextlib.suppress(FileNotFoundError):
                fs.rm(self._full(prefix), recursive=True)

        self._call(call)
        # s3fs does not report the objects that a bulk delete could not delete.
        if left := self.list(prefix, recursive=True):
            raise PermissionError(errno.EACCES, f"{len(left)} objects could not be deleted", self._full(left[0][0]))

    def sweep(self, prefix: str) -> int:
        return 0

    def flush(self) -> None:
        return None


def _client_errors(protocol: str) -> tuple[tuple[type[Exception], ...], tuple[type[Exception], ...]]:
    """(what the driver may raise beside OSError, what of all that is worth a retry)."""
    transient: tuple[type[Exception], ...] = (TimeoutError, ConnectionError)
    if protocol != "s3":
        return (), transient
    import aiohttp
    import botocore.exceptions as botocore  # pyright: ignore[reportMissingTypeStubs]

    retryable = (
        botocore.HTTPClientError,
        botocore.ConnectionError,
        botocore.IncompleteReadError,
        aiohttp.ClientError,
        *transient,
    )
    return (botocore.BotoCoreError, botocore.ClientError, aiohttp.ClientError), retryable


class Storage:
    """A prefix on a store. Holds no connection: picklable, and safe to use from any thread or process.

    Paths are relative to `url`, with forward slashes. Every method raises StorageError for what is not named below it.

    Example:
        >>> store = Storage("memory://job")
        >>> store.create_json("commits/00000001.json", {"step": 10})
        >>> store.read_json("commits/00000001.json")
        {'step': 10}
    """

    def __init__(self, url: str, options: dict[str, Any] | None = None, *, retry_s: float = RETRY_S) -> None:
        self.options = dict(options or {})
        self.retry_s = retry_s
        protocol, separator, rest = url.partition("://")
        if separator and protocol not in ("file", "local"):
            self.url = url.rstrip("/")
            if not rest.strip("/"):
                raise StorageError(f"{url}: names no bucket; give {protocol}://BUCKET/PREFIX")
            protocol = "s3" if protocol == "s3a" else protocol
            self._backend: _Backend = _RemoteFiles(protocol, self.url, self.options, retry_s)
        else:
            self.url = os.path.abspath(os.path.expanduser(rest if separator else url))
            self._backend = LocalFiles(self.url)

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    def child(self, *parts: str) -> Storage:
        """The Storage of a prefix below this one."""
        url = "/".join([self.url, *(self._checked(part) for part in parts)])
        return Storage(url, self.options, retry_s=self.retry_s)

    def with_retry_s(self, retry_s: float) -> Storage:
        """The same Storage, which gives up after another time, seconds."""
        return Storage(self.url, self.options, retry_s=retry_s)

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
                self._backend.download(path, partial)
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

    def check_writable(self, *, require_create_only: bool = True) -> None:
        """Try every operation that a job needs, for real, with one small object that is removed again.

        Raises StorageError that names the wrong bucket, missing permission, read-only folder, or a store that ignores
        create-only writes (which only a job whose config promises a single writer may use).
        """
        path, data = f"probe-{secrets.token_hex(6)}", secrets.token_bytes(16)
        self.create(path, data)
        try:
            if (back := self.read_bytes(path)) != data:
                raise StorageError(f"{self.where(path)}: 16 bytes were written and {len(back)} other ones came back")
            if require_create_only:
                with contextlib.suppress(FileExistsError):
                    self.create(path, b"second writer")
                    raise StorageError(
                        f"{self.url}: the store ignores create-only writes (If-None-Match), so two runs could "
                        f"overwrite each other's checkpoints; use a store that honours them"
                    )
            if path not in {info.name for info in self.list()}:
                raise StorageError(f"{self.where(path)} was written but a listing does not show it; use another store")
            self.write(path, data[::-1])
        finally:
            self.remove(path)


def _encoded(value: JsonValue) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
