"""`RemoteFiles`: objects behind an fsspec driver, for `trinity_tasks.storage`. The only door to fsspec.

Owns: connections, retries, create-only writes, whether everything arrived. Does not own: what a failure tells the user
(`trinity_tasks.store_failures`), hashes of files (`trinity_tasks.storage`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from engines.errors import StorageError
from trinity_tasks.store_failures import (
    CutShort,
    http_status,
    is_expired,
    is_lost_upload,
    is_refused_condition,
    is_refused_key,
)

PART_BYTES = 16 * 2**20
NUM_PARTS_AT_ONCE = 4
MAX_PARTS = 10_000
S3_CONFIG: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 120, "retries": {"max_attempts": 2}}
"""Of one request, seconds; a part of 16 MB must pass a slow line. The client retries little: `retry_s` does."""

_T = TypeVar("_T")
_FILESYSTEMS: dict[tuple[int, str, str], Any] = {}
"""(pid, protocol, options and environment) -> fsspec filesystem. By pid: a connection must not cross a fork."""
_ENVIRONMENT = ("AWS_", "FSSPEC_")
"""Variables that drivers read when they connect: a corrected endpoint must not find the old connection."""
_TOKEN = "created-by"
_MEMORY_LOCK = threading.RLock()


def part_bytes(size: int) -> int:
    """Bytes of one part of a multi-part upload: 16 MB, more where that would make over 10,000 parts, S3's limit."""
    return max(PART_BYTES, -(-size // MAX_PARTS))


class RemoteFiles:
    """The store of a job behind fsspec."""

    def __init__(self, protocol: str, url: str, options: dict[str, Any], retry_s: float, single_writer: bool) -> None:
        self.protocol = protocol
        self.url = url
        self.options = options
        self.retry_s = retry_s
        self.single_writer = single_writer

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
        """One try; a refused key may be an expired one in a cached connection, so a new one is tried once."""
        with self._lock():
            try:
                return call(self._filesystem())
            except self.errors as error:
                if not is_refused_key(error):
                    raise
            self._forget_connections()
            return call(self._filesystem())

    def _call(self, call: Callable[[Any], _T]) -> _T:
        transient = _client_errors(self.protocol)[1]

        def is_transient(error: BaseException) -> bool:
            if is_expired(error) or is_lost_upload(error):
                return True
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

    def _in_one_piece(self) -> dict[str, Any]:
        """For what no hash vouches for: when parts arrive at once, s3fs fills with zeros what one of them lacks."""
        return {"max_concurrency": 1} if self.protocol == "s3" else {}

    def _check_arrived(self, filesystem: Any, path: str, num_bytes: int) -> None:
        """A body can be cut without an error, by a proxy that counts what it passes on. Raises CutShort."""
        size = filesystem.info(self._full(path))["size"]
        if size is not None and size != num_bytes:
            raise CutShort(f"{num_bytes} of {size} bytes arrived")

    def read(self, path: str) -> bytes:
        def call(fs: Any) -> bytes:
            data: bytes = fs.cat_file(self._full(path), **self._in_one_piece())
            self._check_arrived(fs, path, len(data))
            return data

        return self._call(call)

    def write(self, path: str, data: bytes, durable: bool) -> None:
        self._call(lambda fs: fs.pipe_file(self._full(path), data, **self._transfer_options(len(data))))

    def create(self, path: str, data: bytes, durable: bool) -> None:
        """Raises FileExistsError.

        Drivers and HTTP clients try again when an answer was lost, and then find the object that they had created.
        A token in its metadata tells that from another writer's object. Where one writer is promised, looking first is
        enough, on any store.
        """
        if self.single_writer and self.size(path) is not None:
            raise FileExistsError(errno.EEXIST, "the object exists", self._full(path))
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

    def download(self, path: str, local: Path, has_hash: bool) -> None:
        options = self._transfer_options(0) if has_hash else self._in_one_piece()

        def call(fs: Any) -> None:
            fs.get_file(self._full(path), str(local), **options)
            self._check_arrived(fs, path, local.stat().st_size)

        self._call(call)

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
        botocore.FlexibleChecksumError,
        aiohttp.ClientError,
        *transient,
    )
    return (botocore.BotoCoreError, botocore.ClientError, aiohttp.ClientError), retryable
